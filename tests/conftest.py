"""Settings that every room shares."""

from __future__ import annotations

import os

from hypothesis import settings

# Emulated cases have no useful deadline. "proof" draws the same examples every time, so a red run is red again.
settings.register_profile("proof", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "proof"))
