"""Observers over the machine's events, one file each."""

from .base import Finding, Observer
from .coverage import Coverage

__all__ = ["Coverage", "Finding", "Observer"]
