"""The environment variables that flashmel reads, all of them, and when: at the first call of a configuration."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path | None:
    """``FLASHMEL_CACHE_DIR``, or ``flashmel`` in the user's cache folder; None for a user without a home."""
    if override := os.environ.get("FLASHMEL_CACHE_DIR"):
        return Path(os.path.expanduser(override))
    parent = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return None if parent.startswith("~") else Path(parent) / "flashmel"


def frames_per_tile() -> int | None:
    """``FLASHMEL_FPB``: frames per tile instead of the plan's choice, for tuning.

    Raises:
        ValueError: it is set to something other than an integer.
    """
    value = os.environ.get("FLASHMEL_FPB")
    if not value:
        return None
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"FLASHMEL_FPB must be an integer, got {value!r}") from None
