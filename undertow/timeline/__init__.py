"""What a predicted timeline looks like: as a picture, and as a trace for a viewer."""
