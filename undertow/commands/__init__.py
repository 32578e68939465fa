"""One module per `undertow` command: its options, and how its result is told; `targets` is what two of them share."""
