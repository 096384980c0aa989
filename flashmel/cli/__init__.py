"""The ``flashmel`` command: a module for each of its commands, each with its arguments and what it does."""

from __future__ import annotations

import argparse
import sys

from .. import __version__
from . import bundle, cache, demo, doctor, frontends, mel, warm
from .console import Failure


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("flashmel", description="Mel spectrograms, on a GPU in one kernel launch.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"flashmel {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (mel, frontends, demo, warm, bundle, cache, doctor):
        command.add(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status (see ``flashmel mel --help``)."""
    try:
        args = _parser().parse_args(argv)
        return args.run(args)
    except SystemExit as end:  # argparse: 0 after --help and --version, 2 after a usage error
        return int(end.code or 0)
    except Failure as failure:
        print(f"flashmel: error: {failure}", file=sys.stderr)
        return failure.status
    except KeyboardInterrupt:
        print("flashmel: interrupted", file=sys.stderr)
        return 130
