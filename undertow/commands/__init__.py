"""One module per `undertow` command: its options, and how its result is told to people and to programs."""
