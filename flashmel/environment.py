"""What the user set: the environment variables that flashmel reads, all of them, and :func:`configure`, which goes before them.

Variables are read when they are needed: at the first call of a configuration.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

_configured_cache: Path | None = None
_configured_bundles: dict[str, str | None] = {}


def configure(
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    bundle_urls: Iterable[str | os.PathLike[str]] | Mapping[str, str | None] | None = None,
) -> None:
    """Where kernels are kept, and where they come from. What is not given stays as it is.

    Touches no disk and no network: the first kernel that is needed does.

    Args:
        cache_dir: the folder of the kernel cache and of downloaded bundles, before ``FLASHMEL_CACHE_DIR``; "" takes this back.
        bundle_urls: bundles to load, as :func:`flashmel.load_bundle` would, when the first kernel is needed: folders, zip files or
            https addresses; or a mapping from these to the digests expected. One that cannot be loaded is passed over with a
            warning. They replace those of an earlier call; bundles that are loaded stay loaded.

    Raises:
        ValueError: an address that can never be loaded (http, a digest that is no sha256).
        TypeError: ``bundle_urls`` is a single string.

    Example:
        >>> import flashmel
        >>> flashmel.configure(bundle_urls={"https://example.org/kernels": "0" * 64})
        >>> flashmel.configure(bundle_urls=[])
    """
    global _configured_cache, _configured_bundles
    if bundle_urls is not None:
        if isinstance(bundle_urls, str):
            raise TypeError(f"bundle_urls must be a sequence of addresses or a mapping to digests, got the string {bundle_urls!r}")
        digests = bundle_urls if isinstance(bundle_urls, Mapping) else dict.fromkeys(bundle_urls)
        wanted = {os.fspath(url): digest for url, digest in digests.items()}
        for url, digest in wanted.items():
            if "://" in url and not url.lower().startswith("https://"):
                raise ValueError(f"bundle_urls: {url} is not https, and nothing else is downloaded from")
            if digest is not None and not re.fullmatch(r"[0-9a-f]{64}", digest):
                raise ValueError(f"bundle_urls: the digest of {url} must be a sha256 in hexadecimal, got {digest!r}")
        _configured_bundles = wanted
    if cache_dir is not None:
        _configured_cache = Path(cache_dir).expanduser() if os.fspath(cache_dir) else None


def cache_dir() -> Path | None:
    """That of :func:`configure`, else ``FLASHMEL_CACHE_DIR``, else ``flashmel`` in the user's cache folder; None without a home."""
    if _configured_cache is not None:
        return _configured_cache
    if override := os.environ.get("FLASHMEL_CACHE_DIR"):
        return Path(os.path.expanduser(override))
    parent = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return None if parent.startswith("~") else Path(parent) / "flashmel"


def bundle_urls() -> dict[str, str | None]:
    """The bundles of :func:`configure`, each with the digest expected."""
    return _configured_bundles


def no_jit() -> bool:
    """``FLASHMEL_NO_JIT``: whether compiling is forbidden. Unset, empty and 0 mean that it is not.

    Raises:
        ValueError: it is set to something other than 0 or 1.
    """
    value = os.environ.get("FLASHMEL_NO_JIT", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"FLASHMEL_NO_JIT must be 0 or 1, got {value!r}")
    return value == "1"


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
