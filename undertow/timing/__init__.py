"""When the instructions of an emulated kernel would run: models of a chip's units, and what they predict."""
