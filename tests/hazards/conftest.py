"""The peer kernel is compiled by its own room; hazards are looked for in it, too."""

from tests.flash_attn_4.conftest import flash_attn_4_ptx

__all__ = ["flash_attn_4_ptx"]
