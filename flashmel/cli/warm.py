"""``flashmel warm``: compile kernels into the cache, on any machine."""

from __future__ import annotations

import argparse
from typing import Any

from .. import environment
from .ahead import compiled, kernel_arguments
from .console import Failure, printable


def add(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "warm",
        help="compile a transform's or front-end's kernels into the cache, also without a GPU",
        description="Compile what a transform or front-ends need, for GPUs that need not be here, as in a container's build.",
        allow_abbrev=False,
        parents=[kernel_arguments()],
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compile what is missing there."""
    if (folder := environment.cache_dir()) is None:
        raise Failure("there is no place for the cache: this user has no home; set FLASHMEL_CACHE_DIR")
    compiled(args)
    print(f"the cache is {printable(folder)}")
    return 0
