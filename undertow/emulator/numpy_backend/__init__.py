"""The NumPy back end: each basic block becomes one Python function whose lines are array operations over lanes."""
