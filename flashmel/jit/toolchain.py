"""What run-time compilation needs: NVRTC, and nothing else (the kernel includes no headers but its own)."""

from __future__ import annotations

import importlib.metadata
from functools import cache

from .. import environment
from . import cache as disk


class ToolchainError(RuntimeError):
    """A part of the toolchain is missing; the message says which, and what to install."""


@cache
def nvrtc_version() -> str:
    """The version of NVRTC.

    Raises:
        ToolchainError: it cannot be loaded.
    """
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # whatever a broken or partial installation raises
        raise ToolchainError(f"NVRTC cannot be loaded ({error}): pip install 'cuda-python>=13,<14' nvidia-cuda-nvrtc") from error
    if int(status) != 0:
        raise ToolchainError(f"nvrtcVersion failed: {status.name}")
    return f"{major}.{minor}"


def describe() -> list[tuple[str, str]]:
    """(what, found) rows for ``flashmel doctor``: each part with its version, or why it is missing; the cache and its place."""
    rows = []
    try:
        rows.append(("NVRTC", f"{nvrtc_version()}, nvidia-cuda-nvrtc {_package_version('nvidia-cuda-nvrtc')}"))
    except ToolchainError as error:
        rows.append(("NVRTC", f"missing: {error}"))
    folder = environment.cache_dir()
    if folder is None:
        return [*rows, ("kernel cache", "none: this user has no home; set FLASHMEL_CACHE_DIR")]
    held = disk.usage(folder)
    return [*rows, ("kernel cache", f"{folder}: {held.entries} kernels, {held.bytes / 1024:.0f} KiB")]


def _package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
