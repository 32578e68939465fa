"""What the timing model refuses."""


class TimingError(ValueError):
    """A kernel whose time cannot be replayed; the message names the instruction and says why."""
