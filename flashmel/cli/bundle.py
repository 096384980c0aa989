"""``flashmel bundle``: kernels in a folder, for machines without a compiler."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..jit import toolchain
from ..jit.bundle import BundleError, check_unused, judge, write_bundle
from .ahead import compiled, kernel_arguments
from .arguments import architectures
from .console import Failure, printable


def add(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser("bundle", help="kernels in a folder, for machines without a compiler")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    build = actions.add_parser(
        "build", help="compile a transform's kernels into a new folder", allow_abbrev=False, parents=[kernel_arguments()]
    )
    build.add_argument("-o", "--output", required=True, metavar="DIR", help="a new or empty folder; it may be zipped afterwards")
    build.set_defaults(run=run_build)
    listed = actions.add_parser("list", help="verify a bundle and list its kernels, accepted or rejected and why")
    listed.add_argument("bundle", metavar="BUNDLE", help="folder, zip file or https address")
    listed.add_argument("--arch", type=architectures, metavar="sm_NN,...", help="of the GPUs meant (default: this machine's)")
    listed.set_defaults(run=run_list)


def run_build(args: argparse.Namespace) -> int:
    """Compile the kernels and write them with a manifest."""
    try:
        check_unused(Path(args.output))  # now, and not after minutes of compiling
        kernels = [(identity, s.arch.name, str(s), data) for identity, (s, data) in compiled(args).items()]
        bundle = write_bundle(Path(args.output), int(toolchain.nvrtc_version().split(".")[0]), kernels)
    except (BundleError, OSError) as error:
        raise Failure(str(error), status=1) from error
    print(f"{printable(bundle.path)}: {len(bundle.variants)} kernels, manifest sha256 {bundle.digest}")
    return 0


def run_list(args: argparse.Namespace) -> int:
    """Print a line for each kernel; fails if one is damaged."""
    try:
        digest, verdicts = judge(args.bundle, args.arch and [arch.name for arch in args.arch])
    except BundleError as error:
        raise Failure(str(error), status=1) from error
    for verdict in verdicts:
        print(f"{'accepted' if verdict.accepted else f'rejected, {verdict.reason}'}: {verdict.variant.description}")
    print(f"manifest sha256 {digest}")
    return int(any(verdict.damaged for verdict in verdicts))
