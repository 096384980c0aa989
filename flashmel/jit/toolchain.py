"""What run-time compilation needs and where it lies: NVRTC and the headers, all from Python packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .. import environment

# Header that identifies a folder, the folder below the namespace package `nvidia`, and the package that ships it.
_HEADERS = (
    ("cufftdx.hpp", "mathdx/include", "nvidia-mathdx"),
    ("cuda_fp16.h", "cu13/include", "nvidia-cuda-runtime"),
    ("cuda/std/type_traits", "cu13/include/cccl", "nvidia-cuda-cccl"),
)


class ToolchainError(RuntimeError):
    """A part of the toolchain is missing; the message says which, and what to install."""


@dataclass(frozen=True)
class Toolchain:
    """NVRTC's version, the include folders, and the versions of the packages that they come from."""

    nvrtc: str
    include: tuple[Path, ...]
    versions: tuple[tuple[str, str], ...]


def _package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _include_folder(header: str, folder: str, package: str) -> Path:
    # `nvidia` is a namespace package: its parts may lie in several folders. A system toolkit is never mixed in.
    found = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (found.submodule_search_locations or ())] if found else []
    for root in roots:
        if (root / folder / header).exists():
            return root / folder
    searched = ", ".join(str(root / folder) for root in roots) or "no package named nvidia"
    raise ToolchainError(f"{header} not found ({searched}): pip install {package}")


def _nvrtc_version() -> str:
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # whatever a broken or partial installation raises
        raise ToolchainError(f"NVRTC cannot be loaded ({error}): pip install 'cuda-python>=13,<14' nvidia-cuda-nvrtc") from error
    if int(status) != 0:
        raise ToolchainError(f"nvrtcVersion failed: {status.name}")
    return f"{major}.{minor}"


@cache
def find() -> Toolchain:
    """The toolchain.

    Raises:
        ToolchainError: naming the first missing part.
    """
    include = tuple(_include_folder(*header) for header in _HEADERS)
    return Toolchain(_nvrtc_version(), include, tuple((package, _package_version(package)) for _, _, package in _HEADERS))


def describe() -> list[tuple[str, str]]:
    """(what, found) rows for ``flashmel doctor``: each part with its version and place, or why it is missing."""
    rows = []
    try:
        rows.append(("NVRTC", f"{_nvrtc_version()}, nvidia-cuda-nvrtc {_package_version('nvidia-cuda-nvrtc')}"))
    except ToolchainError as error:
        rows.append(("NVRTC", f"missing: {error}"))
    for header in _HEADERS:
        package = header[2]
        try:
            rows.append((package, f"{_package_version(package)} in {_include_folder(*header)}"))
        except ToolchainError as error:
            rows.append((package, f"missing: {error}"))
    folder = environment.cache_dir()
    if folder is None:
        return [*rows, ("kernel cache", "none: this user has no home; set FLASHMEL_CACHE_DIR")]
    entries = [path.stat().st_size for path in folder.glob("*.cubin")] if folder.is_dir() else []
    rows.append(("kernel cache", f"{folder}: {len(entries)} kernels, {sum(entries) / 1024:.0f} KiB"))
    return rows
