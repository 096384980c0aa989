"""Bytes by key, on disk. Knows nothing of CUDA. Loading may only miss; failing to store is a warning, not an error."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import warnings
from pathlib import Path

_DIGEST_BYTES = hashlib.sha256().digest_size


def load(folder: Path, key: str) -> bytes | None:
    """The bytes stored under ``key``; None if there are none, or if what is there fails its digest."""
    try:
        stored = (folder / f"{key}.cubin").read_bytes()
    except OSError:
        return None
    digest, data = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
    return data if hashlib.sha256(data).digest() == digest else None


def store(folder: Path, key: str, data: bytes) -> None:
    """Store ``data`` under ``key``: whole or not at all, whoever else writes. A folder that cannot be written only warns."""
    temporary = None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp", delete=False) as file:
            temporary = Path(file.name)
            file.write(hashlib.sha256(data).digest() + data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / f"{key}.cubin")
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
        warnings.warn(
            f"the compiled kernel could not be stored in {folder} ({error.strerror or error}); it will be compiled again in the "
            "next process. Set FLASHMEL_CACHE_DIR to a folder that can be written.",
            stacklevel=2,
        )
