"""Names of `torchtitan.lora.layer`, for those rooms that still import them from here."""

from __future__ import annotations

from torchtitan.lora.layer import DOWN, UP, apply_lora, is_adapter, merged

is_factor = is_adapter
__all__ = ["DOWN", "UP", "apply_lora", "is_factor", "merged"]
