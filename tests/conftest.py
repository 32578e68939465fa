"""Fixtures and settings that every room shares."""

from __future__ import annotations

import os

from hypothesis import settings

# Examples come from the test's own source, so a red run is red again; emulated cases have no useful deadline.
settings.register_profile("proof", deadline=None, derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "proof"))
