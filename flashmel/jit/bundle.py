"""Kernels compiled ahead, in a folder or a zip file that can be carried to machines without a compiler, or behind an https address.

A bundle is ``manifest.json`` and the cubins that it lists, each with its size and sha256. Nothing of it is used unverified: all of
it is read when it is loaded, and a kernel again when it is needed. Of one behind an address (that of its folder), the kernels for
this machine are downloaded, each verified before it gets its name, into a folder in the cache that the manifest's digest names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import environment
from . import cache as disk
from .machine import Machine, this_machine

if TYPE_CHECKING:
    from urllib.request import OpenerDirector

MANIFEST = "manifest.json"
_SCHEMA = 1
_DOWNLOADS = "bundles"  # folder in the cache
_CONNECTIONS = 8  # at once: a kernel takes a few round trips, hardly any time on the line
_MAX_BYTES = 64 * 2**20  # of one file; a kernel has less than 1 MiB
_MAX_MANIFEST = 16 * 2**20  # half a KiB a kernel


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


class Verdict(NamedTuple):
    """What becomes of a kernel of a bundle."""

    variant: Variant
    reason: str | None  # why it is rejected; None if it is accepted
    damaged: bool = False

    @property
    def accepted(self) -> bool:
        return self.reason is None


@dataclass(frozen=True)
class Bundle:
    """A verified bundle. ``digest`` is the sha256 of its manifest, which covers every byte of it."""

    path: Path
    digest: str
    variants: tuple[Variant, ...] = field(repr=False)

    def read(self, variant: Variant, archive: zipfile.ZipFile | None = None) -> bytes:
        """The kernel's bytes, verified; from the zip file if it is open already.

        Raises:
            BundleError: they are not those of the manifest, or cannot be read.
        """
        data = _read(self.path, variant.file, variant.size, archive)
        if len(data) != variant.size or hashlib.sha256(data).hexdigest() != variant.sha256:
            raise BundleError(f"{self.path}: {variant.file} is damaged: it is not the file that the manifest lists")
        return data


_loaded: dict[Bundle, None] = {}  # in the order in which they were loaded
_failures: dict[tuple[str, str | None], str | None] = {}  # of configure()'s bundles: why one cannot be loaded, None if it was
_configured = threading.RLock()  # one thread loads them, the others wait


def load_bundle(path: str | os.PathLike[str], digest: str | None = None, archs: Iterable[str] | None = None) -> Bundle:
    """Verify a bundle and use its kernels from now on, before the cache and the compiler.

    Args:
        path: a folder, or a zip file of one, as ``flashmel bundle build`` makes it; or the https address of such a folder
            (``https://example.org/kernels``, where ``https://example.org/kernels/manifest.json`` is).
        digest: sha256 of the manifest that is expected, as ``flashmel bundle build`` prints it; any bundle is taken if None. With
            it, a bundle that was downloaded before is loaded without a connection.
        archs: take the kernels for these architectures alone, ``["sm_90"]`` and the like. If None: all of a folder or zip file, and
            of an address those for the GPUs and the driver of this machine (all, where there is no GPU).

    Returns:
        The bundle: ``path``, where its files are (in the cache, if they were downloaded), ``digest``, ``variants``.

    Raises:
        BundleError: it is missing, incomplete, damaged, of another format, not the one expected, without a kernel for these
            architectures; it cannot be downloaded, or be written to the cache. Nothing of it is used then. What was downloaded and
            verified stays, and the next attempt goes on from there.
        ValueError: ``archs`` holds something else than names of architectures.
    """
    bundle = _download(os.fspath(path), digest, archs) if _is_address(path) else open_bundle(path)
    _check_digest(str(path), bundle.digest, digest)
    if archs is not None:
        bundle = Bundle(bundle.path, bundle.digest, _fitting(str(path), bundle.variants, _machine(archs)))
    with _opened(bundle.path) as archive:
        for variant in bundle.variants:
            bundle.read(variant, archive)
    _loaded[bundle] = None
    return bundle


def loaded_bundles() -> tuple[Bundle, ...]:
    """The bundles in use, in the order in which they were loaded."""
    return tuple(_loaded)


def bundle_variants(path: str | os.PathLike[str], archs: Iterable[str] | None = None) -> tuple[Verdict, ...]:
    """Each kernel of a bundle: accepted, or rejected and why.

    Of an address only the manifest is read; of a folder or zip file every byte.

    Args:
        path: as for :func:`load_bundle`.
        archs: of the GPUs meant, ``["sm_90"]`` and the like; if None, the GPUs and the driver of this machine (where there is no
            GPU, every architecture is accepted).

    Raises:
        BundleError: there is no manifest, or it is not one, or it cannot be downloaded.
        ValueError: ``archs`` holds something else than names of architectures.
    """
    return judge(path, archs)[1]


def judge(path: str | os.PathLike[str], archs: Iterable[str] | None = None) -> tuple[str, tuple[Verdict, ...]]:
    """The digest of a bundle, and what :func:`bundle_variants` says of it, with its errors."""
    machine = _machine(archs)
    if not _is_address(path):
        bundle = open_bundle(path)
        return bundle.digest, tuple(_verdict(v, machine, _damage(bundle, v)) for v in bundle.variants)
    from . import download

    if reason := download.refusal(str(path)):
        raise BundleError(f"{path}: {reason}")
    text = _get(download.opener(), str(path), MANIFEST, _MAX_MANIFEST)
    return hashlib.sha256(text).hexdigest(), tuple(_verdict(v, machine, None) for v in _parse(str(path), text))


def _verdict(variant: Variant, machine: Machine, damage: str | None) -> Verdict:
    return Verdict(variant, damage or machine.refusal(variant.arch, variant.cuda), damage is not None)


def has_bundle(path: str | os.PathLike[str], archs: Iterable[str] | None = None) -> bool:
    """Whether a bundle can be read and has a kernel that :func:`bundle_variants` accepts, which also says why it has none.

    Args:
        path, archs: as for :func:`bundle_variants`.

    Raises:
        ValueError: ``archs`` holds something else than names of architectures.
    """
    try:
        return any(verdict.accepted for verdict in bundle_variants(path, archs))
    except BundleError:
        return False


def expected() -> bool:
    """Whether bundles are loaded, or will be when a kernel is needed."""
    return bool(_loaded or environment.bundle_urls())


def find(identity: str) -> bytes | None:
    """A kernel of the loaded bundles and those of ``configure``, or None.

    One that was damaged since, or that the driver is too old for, is passed over, with a warning.
    """
    _load_configured()
    for bundle in loaded_bundles():
        for variant in bundle.variants:
            if variant.identity == identity:
                try:
                    if (reason := Machine((), this_machine().cuda).refusal(variant.arch, variant.cuda)) is None:
                        return bundle.read(variant)
                    raise BundleError(f"{bundle.path}: {variant.file}: {reason}")
                except BundleError as error:
                    warnings.warn(f"{error}; it is not used", stacklevel=2)
    return None


def describe() -> str:
    """How many bundles are loaded, and which of those wanted are not and why: for messages."""
    failures = [f"; {reason}" for reason in _failures.values() if reason]
    return f"{len(_loaded)} loaded{''.join(failures)}"


def _load_configured() -> None:
    """Load the bundles of ``configure``, each tried once: a server that is down must not hold up every kernel."""
    with _configured:
        for wanted in environment.bundle_urls().items():
            if wanted not in _failures:
                try:
                    load_bundle(*wanted)
                    _failures[wanted] = None
                except BundleError as error:
                    _failures[wanted] = str(error)
                    warnings.warn(f"{error}; this bundle is not used", stacklevel=3)


def open_bundle(path: str | os.PathLike[str]) -> Bundle:
    """A bundle by its manifest alone: what it lists, not whether that is there.

    Raises:
        BundleError: there is no manifest, or it is not one.
    """
    path = Path(path)
    text = _read(path, MANIFEST, _MAX_MANIFEST)
    return Bundle(path, hashlib.sha256(text).hexdigest(), _parse(str(path), text))


def write_bundle(folder: Path, cuda: int, kernels: Iterable[tuple[str, str, str, bytes]]) -> Bundle:
    """Write kernels, (identity, arch, description, cubin) each, into a new or empty folder; the manifest last.

    ``cuda`` is the major version of the compiler that made them.

    Raises:
        BundleError: the folder has files in it.
        OSError: it cannot be written.
    """
    check_unused(folder)
    folder.mkdir(parents=True, exist_ok=True)
    variants = []
    for identity, arch, description, data in kernels:
        variant = Variant(identity, arch, cuda, description, f"{identity}.cubin", len(data), hashlib.sha256(data).hexdigest())
        _write(folder / variant.file, data)
        variants.append(variant)
    manifest = {"schema": _SCHEMA, "kernels": [asdict(variant) for variant in variants]}
    _write(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    return open_bundle(folder)


def check_unused(folder: Path) -> None:
    """
    Raises:
        BundleError: the folder has files in it.
        OSError: it cannot be read, or is none.
    """
    if folder.exists() and any(folder.iterdir()):
        raise BundleError(f"{folder} is not empty: a bundle takes a folder of its own")


def downloads(cache: Path) -> list[Path]:
    """The folders of downloaded bundles in a cache folder, finished or not."""
    return [path for path in sorted((cache / _DOWNLOADS).glob("*")) if path.is_dir()]


def remove_downloads(cache: Path) -> None:
    """Remove them; other files stay.

    Raises:
        OSError: one cannot be removed.
    """
    for folder in downloads(cache):
        disk.clear(folder)
        (folder / MANIFEST).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody's files
            folder.rmdir()


def _is_address(path: str | os.PathLike[str]) -> bool:
    return isinstance(path, str) and "://" in path


def _machine(archs: Iterable[str] | None) -> Machine:
    """The machine that is meant: this one, or one with these architectures, whose driver is not known."""
    if archs is None:
        return this_machine()
    names = tuple(archs)
    if not names or not all(re.fullmatch(r"sm_\d+", name) for name in names):
        raise ValueError(f"archs must be names like 'sm_90' in a list, got {archs!r}")
    return Machine(names, None)


def _check_digest(where: str, digest: str, expected: str | None) -> None:
    if expected is not None and digest != expected:
        raise BundleError(f"{where}: the manifest's sha256 is {digest}, expected {expected}")


def _fitting(where: str, variants: tuple[Variant, ...], machine: Machine) -> tuple[Variant, ...]:
    refusals = {variant: machine.refusal(variant.arch, variant.cuda) for variant in variants}
    found = tuple(variant for variant, refusal in refusals.items() if refusal is None)
    if not found:
        reasons = ", ".join(sorted({f"{v.arch} of CUDA {v.cuda}: {refusal}" for v, refusal in refusals.items()})) or "it is empty"
        raise BundleError(f"{where}: none of its {len(variants)} kernels fits ({reasons})")
    return found


def _damage(bundle: Bundle, variant: Variant) -> str | None:
    try:
        bundle.read(variant)
    except BundleError as error:
        return str(error)
    return None


def _download(url: str, digest: str | None, archs: Iterable[str] | None) -> Bundle:
    """The bundle at an address: those of its kernels that fit, in the cache, each byte verified.

    There is a manifest in the folder only when the download was finished.

    Raises:
        BundleError: see :func:`load_bundle`.
    """
    from . import download  # urllib and ssl, which folders need not

    if reason := download.refusal(url):
        raise BundleError(f"{url}: {reason}")
    if (cache := environment.cache_dir()) is None:
        raise BundleError(f"{url}: there is no folder to download to: this user has no home; set FLASHMEL_CACHE_DIR")
    client = download.opener()
    text = _downloaded_manifest(cache, digest) or _get(client, url, MANIFEST, _MAX_MANIFEST)
    bundle = Bundle(cache / _DOWNLOADS / (found := hashlib.sha256(text).hexdigest()), found, _parse(url, text))
    _check_digest(url, bundle.digest, digest)
    bundle = Bundle(bundle.path, bundle.digest, _fitting(url, bundle.variants, _machine(archs)))
    missing = [variant for variant in bundle.variants if _damage(bundle, variant) is not None]
    if not missing and (bundle.path / MANIFEST).exists():
        return bundle  # also where nothing can be written
    try:
        bundle.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        disk.sweep(bundle.path)
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            list(pool.map(lambda variant: _fetch(client, url, bundle.path, variant), missing))
        _write(bundle.path / MANIFEST, text)
    except OSError as error:
        raise BundleError(
            f"{url}: it cannot be written to {bundle.path} ({error.strerror or error}): set FLASHMEL_CACHE_DIR, or "
            "flashmel.configure(cache_dir=...), to a folder that can be"
        ) from error
    return bundle


def _downloaded_manifest(cache: Path, digest: str | None) -> bytes | None:
    """That of an earlier download, where the digest leaves no doubt that it is the one."""
    if digest is None or not re.fullmatch(r"[0-9a-f]{64}", digest):
        return None
    try:
        text = (cache / _DOWNLOADS / digest / MANIFEST).read_bytes()
    except OSError:
        return None
    return text if hashlib.sha256(text).hexdigest() == digest else None


def _fetch(client: OpenerDirector, url: str, folder: Path, variant: Variant) -> None:
    data = _get(client, url, variant.file, variant.size)
    if len(data) != variant.size or hashlib.sha256(data).hexdigest() != variant.sha256:
        raise BundleError(f"{url}: {variant.file} is not the file that the manifest lists ({len(data)} bytes of {variant.size})")
    _write(folder / variant.file, data)


def _get(client: OpenerDirector, url: str, name: str, most: int) -> bytes:
    from . import download

    try:
        return download.get(client, download.below(url, name), most)
    except download.DownloadError as error:
        raise BundleError(f"{url}: {name} cannot be downloaded: {error}") from error


def _parse(where: str, text: bytes) -> tuple[Variant, ...]:
    try:
        manifest = json.loads(text)
        if manifest["schema"] != _SCHEMA:
            raise BundleError(f"{where}: the bundle's format is {manifest['schema']!r}, this version of flashmel reads {_SCHEMA}")
        return tuple(_variant(entry) for entry in manifest["kernels"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BundleError(f"{where}: {MANIFEST} is not a bundle's manifest ({type(error).__name__}: {error})") from None


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


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile | None]:
    """A zip file, open for many reads: each by itself would parse its directory. None for a folder."""
    if path.is_dir():
        yield None
        return
    try:
        archive = zipfile.ZipFile(path)
    except Exception as error:
        raise BundleError(f"{path}: it cannot be read ({error})") from error
    with archive:
        yield archive


def _read(path: Path, name: str, most: int, archive: zipfile.ZipFile | None = None) -> bytes:
    """Up to one byte more than ``most`` of a file in a folder or zip file."""
    try:
        if archive is not None:
            with archive.open(name) as member:
                return member.read(most + 1)
        if path.is_dir():
            with (path / name).open("rb") as file:
                return file.read(most + 1)
        with zipfile.ZipFile(path) as opened, opened.open(name) as member:
            return member.read(most + 1)
    except Exception as error:  # of a damaged archive, a dozen kinds: zlib.error, BadZipFile, NotImplementedError, ...
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BundleError(f"{path}: {name} cannot be read ({reason})") from error


def _write(path: Path, data: bytes) -> None:
    with disk.whole_file(path) as file:
        file.write(data)
