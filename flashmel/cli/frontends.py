"""``flashmel frontends``: the front-ends of models, or what one of them is."""

from __future__ import annotations

import argparse
from typing import Any

from .. import frontends
from .console import Failure

FRAMES = "frames of L samples"


def add(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser("frontends", help="the front-ends of models that are known, or what one of them is")
    parser.add_argument("name", nargs="?", metavar="NAME", help="say what this one is, and its options")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a table of all, or a line for each property of one."""
    if args.name is None:
        rows = [("name", "sample rate", "shape", FRAMES)]
        for name in frontends.names():
            module = frontends.frontend(name)
            rows.append((name, f"{module.sample_rate} Hz", module.layout, module.length_rule))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(f"{value:{width}}" for value, width in zip(row, widths, strict=True)).rstrip())
        return 0
    try:
        module = frontends.frontend(args.name)
    except ValueError as error:
        raise Failure(str(error)) from error
    options = ", ".join(f"{name}={value!r}" for name, value in frontends.options(args.name).items())
    print(f"sample rate: {module.sample_rate} Hz")
    print(f"shape: {module.layout}")
    print(f"{FRAMES}: {module.length_rule}")
    print(f"source: {module.recipe.source}")
    print(f"compared with: {module.recipe.compared_with}")
    if module.recipe.not_checked:
        print(f"not checked: {module.recipe.not_checked}")
    print(f"options: {options or 'none'}")
    return 0
