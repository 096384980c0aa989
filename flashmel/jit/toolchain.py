"""What run-time compilation needs: NVRTC, and nothing else (the kernel includes no headers but its own)."""

from __future__ import annotations

import importlib.metadata
from functools import cache

from .. import environment
from . import cache as disk


class ToolchainError(RuntimeError):
    """A part of the toolchain is missing; the message says which, and what to install."""


# One environment holds the bindings of one CUDA version, which load the NVRTC of that version.
INSTALL = "pip install 'flashmel[cu13]', or 'flashmel[cu12]' beside a torch for CUDA 12 and for drivers before 580"
_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12")


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
        raise ToolchainError(f"NVRTC cannot be loaded ({error}): {INSTALL}") from error
    if int(status) != 0:
        raise ToolchainError(f"nvrtcVersion failed: {status.name}")
    return f"{major}.{minor}"


@cache
def compiler_version() -> str:
    """What tells this compiler from others: the version of the one package that has it, else its own.

    The package's is known without loading the library, which took half of a first call from the cache.

    Raises:
        ToolchainError: there is no such package, or there are several, and NVRTC cannot be loaded.
    """
    versions = {name: _package_version(name) for name in _PACKAGES}
    installed = [f"{name} {version}" for name, version in versions.items() if version != "unknown"]
    return installed[0] if len(installed) == 1 else nvrtc_version()


def describe() -> list[tuple[str, str]]:
    """(what, found) rows for ``flashmel doctor``: each part with its version, or why it is missing; the cache and its place."""
    rows = []
    try:
        version = nvrtc_version()
        package = "nvidia-cuda-nvrtc-cu12" if version.startswith("12.") else "nvidia-cuda-nvrtc"
        rows.append(("NVRTC", f"{version}, {package} {_package_version(package)}"))
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
