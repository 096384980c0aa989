"""``flashmel doctor``: what was found, which path runs, and why."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from collections.abc import Callable
from typing import Any

import torch

from .. import __version__, fused
from ..jit import toolchain
from ..plan import ARCHITECTURES, Architecture, LaunchPlan, UnsupportedError, make_backward_plan, make_plan
from ..plan import architecture as architecture_of
from ..spec import StftSpec
from .arguments import architecture, positive_int
from .console import Failure, device_name

Row = tuple[str, str]  # what, and what was found


def add(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser("doctor", help="what was found, and whether the fused CUDA path is available and why")
    parser.add_argument("--n-fft", type=int, metavar="N", help="also which path this size and its gradient take, and why")
    parser.add_argument("--hop-length", type=int, metavar="N", help="with --n-fft (default: half of it)")
    parser.add_argument("--n-mels", type=positive_int, default=80, metavar="N", help="with --n-fft: of the gradient (default: 80)")
    parser.add_argument(
        "--arch", type=architecture, metavar="sm_NN", help="with --n-fft: the GPU's (default: this machine's, else all)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a row for each thing that was looked at."""
    gpus = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
    rows = [
        ("flashmel", __version__),
        ("Python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", torch.__version__),
        ("torch's CUDA", torch.version.cuda or "none (a build without CUDA)"),
        *(("GPU", device_name(gpu)) for gpu in gpus),
        *([] if gpus else [("GPU", "none that torch can use")]),
        *toolchain.describe(),
        *_mismatch(torch.version.cuda),
        *((f"{name} (cli)", _installed(name)) for name in ("soundfile", "scipy", "matplotlib", "safetensors", "tqdm")),
        *([_availability(gpu) for gpu in gpus] or [_availability(None)]),
        *([] if args.n_fft is None else _paths(args, gpus)),
    ]
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label:{width}}  {value}")
    return 0


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _mismatch(torchs_cuda: str | None) -> list[Row]:
    """A row, if compiler and torch are of different CUDA versions."""
    try:
        version = toolchain.nvrtc_version()
    except toolchain.ToolchainError:
        return []
    major = (torchs_cuda or version).split(".")[0]
    if version.split(".")[0] == major:
        return []
    advice = (
        f"torch is for CUDA {major}, NVRTC for {version}: runs if the driver knows both, else pip install 'flashmel[cu{major}]'"
    )
    return [("note", advice)]


def _availability(gpu: torch.device | None) -> Row:
    reason = fused.unavailable_reason(gpu)
    return "fused path" + (f", {gpu}" if gpu else ""), "available" if reason is None else f"not available: {reason}"


def _paths(args: argparse.Namespace, gpus: list[torch.device]) -> list[Row]:
    """Which paths a size and its gradient take: on --arch, else this machine's GPUs, else all architectures."""
    try:
        spec = StftSpec(args.n_fft, args.n_fft, args.hop_length or max(1, args.n_fft // 2))
    except ValueError as error:
        raise Failure(str(error)) from None
    rows = []
    for place in [args.arch] if args.arch else gpus or ARCHITECTURES:
        if isinstance(place, Architecture):
            name, forward, gradient = place.name, _path(make_plan, spec, place), _path(make_backward_plan, spec, place, args.n_mels)
        else:
            name, forward, gradient = str(place), fused.path(spec, place), _gradient_path_on(place, spec, args.n_mels)
        rows += [(f"n_fft {args.n_fft}, {name}", forward), (f"its gradient, {name}", gradient)]
    return rows


def _path(make: Callable[..., LaunchPlan], *arguments: Any) -> str:
    try:
        return f"fused kernel: {make(*arguments)}"
    except UnsupportedError as error:
        return f"plain torch: {error}"


def _gradient_path_on(gpu: torch.device, spec: StftSpec, n_mels: int) -> str:
    if reason := fused.unavailable_reason(gpu):
        return f"plain torch on {gpu}: {reason}"
    return _path(make_backward_plan, spec, architecture_of(*torch.cuda.get_device_capability(gpu)), n_mels)
