"""``flashmel cache``: what the kernel cache and downloaded bundles hold, or clear them."""

from __future__ import annotations

import argparse
from typing import Any

from .. import environment
from ..jit import bundle, cache
from .console import Failure, printable


def add(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser("cache", help="what the kernel cache and downloaded bundles hold, or clear them")
    parser.add_argument("action", choices=("info", "clear"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what is there, or remove it."""
    if (folder := environment.cache_dir()) is None:
        raise Failure("there is no cache: this user has no home; set FLASHMEL_CACHE_DIR")
    if args.action == "info":
        held = cache.usage(folder)
        print(f"{printable(folder)}: {held.entries} kernels, {held.bytes / 2**20:.1f} MiB of at most {cache.MAX_BYTES / 2**20:.0f}")
        for path in bundle.downloads(folder):
            held = cache.usage(path)
            print(f"{printable(path)}: {held.entries} downloaded kernels, {held.bytes / 2**20:.1f} MiB")
        return 0
    try:
        removed = cache.clear(folder)
        bundle.remove_downloads(folder)
    except OSError as error:
        raise Failure(f"{printable(folder)}: {error.strerror or error}", status=1) from error
    print(f"{printable(folder)}: removed {removed.entries} kernels, {removed.bytes / 2**20:.1f} MiB")
    return 0
