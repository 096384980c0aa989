"""Kernels compiled ahead, in a folder or a zip file that can be carried to machines without a compiler.

A bundle is ``manifest.json`` and the cubins that it lists, each with its size and sha256. Nothing of it is used unverified: all of
it is read when it is loaded, and a kernel again when it is needed. Knows nothing of CUDA.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
import zipfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .cache import write_whole

MANIFEST = "manifest.json"
_SCHEMA = 1
_MAX_BYTES = 64 * 2**20  # of one file; a kernel has less than 1 MiB


class BundleError(RuntimeError):
    """A bundle is not what it says it is, or cannot be read; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Variant:
    """One kernel of a bundle."""

    identity: str  # digest of its source: see compiler.py
    arch: str  # "sm_90"
    cuda: int  # major version of the compiler, which the driver must know
    description: str
    file: str  # its name in the bundle
    size: int
    sha256: str


@dataclass(frozen=True)
class Bundle:
    """A verified bundle. ``digest`` is the sha256 of its manifest, which covers every byte of it."""

    path: Path
    digest: str
    variants: tuple[Variant, ...]

    def read(self, variant: Variant) -> bytes:
        """The kernel's bytes, verified.

        Raises:
            BundleError: they are not those of the manifest, or cannot be read.
        """
        data = _read(self.path, variant.file, variant.size)
        if len(data) != variant.size or hashlib.sha256(data).hexdigest() != variant.sha256:
            raise BundleError(f"{self.path}: {variant.file} is damaged: it is not the file that the manifest lists")
        return data


_loaded: dict[str, Bundle] = {}  # by digest


def load_bundle(path: str | os.PathLike[str], digest: str | None = None) -> Bundle:
    """Verify a bundle and use its kernels from now on, before the cache and the compiler.

    Args:
        path: a folder, or a zip file of one, as ``flashmel bundle build`` makes it.
        digest: sha256 of the manifest that is expected, as ``flashmel bundle build`` prints it; any bundle is taken if None.

    Raises:
        BundleError: it is missing, incomplete, damaged, of another format, or not the one expected. Nothing of it is used then.
    """
    bundle = open_bundle(path)
    if digest is not None and digest != bundle.digest:
        raise BundleError(f"{bundle.path}: the manifest's sha256 is {bundle.digest}, expected {digest}")
    for variant in bundle.variants:
        bundle.read(variant)
    _loaded[bundle.digest] = bundle
    return bundle


def loaded_bundles() -> tuple[Bundle, ...]:
    """The bundles in use, in the order in which they were loaded."""
    return tuple(_loaded.values())


def find(identity: str) -> bytes | None:
    """A kernel of the loaded bundles, or None. One that was damaged since is passed over, with a warning."""
    for bundle in _loaded.values():
        for variant in bundle.variants:
            if variant.identity == identity:
                try:
                    return bundle.read(variant)
                except BundleError as error:
                    warnings.warn(f"{error}; it is not used", stacklevel=2)
    return None


def open_bundle(path: str | os.PathLike[str]) -> Bundle:
    """A bundle by its manifest alone: what it lists, not whether that is there.

    Raises:
        BundleError: there is no manifest, or it is not one.
    """
    path = Path(path)
    text = _read(path, MANIFEST, _MAX_BYTES)
    try:
        manifest = json.loads(text)
        if manifest["schema"] != _SCHEMA:
            raise BundleError(f"{path}: the bundle's format is {manifest['schema']!r}, this version of flashmel reads {_SCHEMA}")
        variants = tuple(_variant(entry) for entry in manifest["kernels"])
    except (ValueError, TypeError, KeyError) as error:
        raise BundleError(f"{path}: {MANIFEST} is not a bundle's manifest ({type(error).__name__}: {error})") from None
    return Bundle(path, hashlib.sha256(text).hexdigest(), variants)


def write_bundle(folder: Path, cuda: int, kernels: Iterable[tuple[str, str, str, bytes]]) -> Bundle:
    """Write kernels, (identity, arch, description, cubin) each, into a new or empty folder; the manifest last.

    ``cuda`` is the major version of the compiler that made them.

    Raises:
        BundleError: the folder has files in it.
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise BundleError(f"{folder} is not empty: a bundle takes a folder of its own")
    variants = []
    for identity, arch, description, data in kernels:
        variant = Variant(identity, arch, cuda, description, f"{identity}.cubin", len(data), hashlib.sha256(data).hexdigest())
        _write(folder / variant.file, data)
        variants.append(variant)
    manifest = {"schema": _SCHEMA, "kernels": [asdict(variant) for variant in variants]}
    _write(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    return open_bundle(folder)


def _variant(entry: Any) -> Variant:
    variant = Variant(**entry)
    if not re.fullmatch(r"[0-9a-f]{64}\.cubin", variant.file):  # no path, so none that leads out
        raise ValueError(f"a file name must be a digest and .cubin, got {variant.file!r}")
    if not all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in (variant.identity, variant.sha256)):
        raise ValueError(f"{variant.file} has no sha256")
    if not re.fullmatch(r"sm_\d+", variant.arch) or not isinstance(variant.description, str):
        raise ValueError(f"{variant.file} is for {variant.arch!r}")
    if type(variant.size) is not int or not 0 <= variant.size <= _MAX_BYTES or type(variant.cuda) is not int:
        raise ValueError(f"{variant.file} has {variant.size!r} bytes for CUDA {variant.cuda!r}")
    return variant


def _read(path: Path, name: str, most: int) -> bytes:
    """Up to one byte more than ``most`` of a file in a folder or zip file."""
    try:
        if path.is_dir():
            with (path / name).open("rb") as file:
                return file.read(most + 1)
        with zipfile.ZipFile(path) as archive, archive.open(name) as member:
            return member.read(most + 1)
    except (OSError, KeyError, zipfile.BadZipFile, RuntimeError, EOFError, NotImplementedError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BundleError(f"{path}: {name} cannot be read ({reason})") from error


def _write(path: Path, data: bytes) -> None:
    write_whole(path, data)
    path.chmod(0o644)  # to be carried to other users
