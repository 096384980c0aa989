"""Bytes by key, on disk. Knows nothing of CUDA. Loading may only miss; failing to store is a warning, not an error.

An entry is a file: the sha256 of its bytes, then the bytes. It is written beside its place and renamed, so that readers and other
writers see all of it or nothing; there are no locks that could outlive their holders.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

MAX_BYTES = 512 * 2**20  # of all entries; what was used longest ago goes first
_STALE_SECONDS = 3600  # after which a file that is being written belongs to a process that is no more
_DIGEST_BYTES = hashlib.sha256().digest_size
_SUFFIX, _UNFINISHED = ".cubin", ".tmp"
_warned: set[str] = set()


class Usage(NamedTuple):
    """What a cache folder holds."""

    entries: int
    bytes: int


def load(folder: Path, key: str) -> bytes | None:
    """The bytes stored under ``key``; None if there are none, or none to be trusted.

    An entry that fails its digest is removed. One that somebody else put into a folder that others may write is left alone, with a
    warning.
    """
    path = folder / (key + _SUFFIX)
    try:
        with path.open("rb") as file:
            if (owner := _stranger(folder, os.fstat(file.fileno()))) is not None:
                _warn_once(
                    f"{folder} can be written by others and holds a kernel of another user (uid {owner}), which is not used. "
                    "Set FLASHMEL_CACHE_DIR to a folder of your own."
                )
                return None
            stored = file.read()
    except OSError:
        return None
    digest, data = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
    intact = hashlib.sha256(data).digest() == digest
    with contextlib.suppress(OSError):
        if intact:
            os.utime(path)  # last used now
        else:
            path.unlink()
    return data if intact else None


def store(folder: Path, key: str, data: bytes) -> None:
    """Store ``data`` under ``key``: whole or not at all, whoever else writes. A folder that cannot be written only warns, once."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with whole_file(folder / (key + _SUFFIX)) as file:
            file.write(hashlib.sha256(data).digest() + data)
    except OSError as error:
        _warn_once(
            f"the compiled kernel could not be stored in {folder} ({error.strerror or error}); it will be compiled again in the "
            "next process. Set FLASHMEL_CACHE_DIR to a folder that can be written."
        )
    else:
        _tidy(folder)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to be written, beside its place; it is renamed there at the end: all of it appears, or nothing.

    Raises:
        OSError: it cannot be written. After this and any other error or interruption nothing is left behind.
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}{_UNFINISHED}")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def sweep(folder: Path) -> None:
    """Remove what killed writers left in a folder, as far as it can be."""
    stale = time.time() - _STALE_SECONDS
    for path, found in _files(folder, _UNFINISHED):
        if found.st_mtime < stale:
            with contextlib.suppress(OSError):
                path.unlink()


def usage(folder: Path) -> Usage:
    """Number and size of the entries in a folder, which need not exist."""
    sizes = [found.st_size for _, found in _files(folder, _SUFFIX)]
    return Usage(len(sizes), sum(sizes))


def clear(folder: Path) -> Usage:
    """Remove all entries, and what writers left behind; other files stay. Returns what is gone.

    Raises:
        OSError: an entry cannot be removed.
    """
    removed = usage(folder)
    for path, _ in [*_files(folder, _SUFFIX), *_files(folder, _UNFINISHED)]:
        path.unlink(missing_ok=True)
    return removed


def _files(folder: Path, suffix: str) -> list[tuple[Path, os.stat_result]]:
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):  # gone since
                if entry.name.endswith(suffix) and entry.is_file(follow_symlinks=False):
                    found.append((Path(entry.path), entry.stat(follow_symlinks=False)))
    return found


def _tidy(folder: Path) -> None:
    """Remove what killed writers left, and the entries used longest ago beyond MAX_BYTES."""
    sweep(folder)
    total = 0
    for path, found in sorted(_files(folder, _SUFFIX), key=lambda file: file[1].st_mtime, reverse=True):
        total += found.st_size
        if total > MAX_BYTES:
            with contextlib.suppress(OSError):
                path.unlink()


def _stranger(folder: Path, found: os.stat_result) -> int | None:
    """The owner of a file, if it is neither this user nor root, and others may write the folder."""
    if not hasattr(os, "geteuid") or found.st_uid in (os.geteuid(), 0):
        return None
    return found.st_uid if folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH) else None


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=4)
