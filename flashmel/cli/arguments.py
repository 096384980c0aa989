"""Arguments that several commands take, and the transform that they describe."""

from __future__ import annotations

import argparse
import ast
from typing import Any

import torch

from ..plan import ARCHITECTURES, Architecture
from ..spec import MEL_SCALES, NORMALIZATIONS, PAD_MODES
from ..transform import MelSpectrogram
from .console import Failure

# What says which transform, unless it is given; None depends on the others.
TRANSFORM = {
    "n_fft": None, "win_length": None, "hop_length": None, "f_min": 0.0, "f_max": None, "pad": 0, "n_mels": 80, "window": "hann",
    "power": 2.0, "normalized": "none", "no_center": False, "pad_mode": "reflect", "norm": "none", "mel_scale": "htk",
}  # fmt: skip
WINDOWS = ("hann", "hamming", "blackman", "bartlett", "kaiser")


def positive_int(text: str) -> int:
    """A type of argument: raises argparse's error for what is no positive integer."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return value


def positive_float(text: str) -> float:
    """A type of argument: raises argparse's error for what is no positive, finite number."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value


def architecture(name: str) -> Architecture:
    """A type of argument: sm_NN."""
    for arch in ARCHITECTURES:
        if arch.name == name:
            return arch
    raise argparse.ArgumentTypeError(f"must be one of {', '.join(arch.name for arch in ARCHITECTURES)}, got {name}")


def architectures(names: str) -> list[Architecture]:
    """A type of argument: sm_NN, several of them with commas between them, or all."""
    return list(ARCHITECTURES) if names == "all" else [architecture(name) for name in names.split(",")]


def option(text: str) -> tuple[str, Any]:
    """A type of argument: NAME=VALUE, the value a Python literal or else a string."""
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def device_arguments() -> argparse.ArgumentParser:
    """A parent of commands that compute."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", help="cpu, cuda, cuda:1 or mps (default: cuda if there is one, else cpu)")
    return parser


def transform_arguments() -> argparse.ArgumentParser:
    """A parent of commands for a transform, all but its sample rate, or for a front-end, all but its name."""
    parser = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)  # what is not given is not there
    group = parser.add_argument_group("transform", "the arguments of flashmel.MelSpectrogram")
    group.add_argument("--n-fft", type=positive_int, metavar="N", help="default: the window's length, to the next power of two")
    group.add_argument("--win-length", type=positive_int, metavar="N", help="in samples (default: N of --n-fft, else 25 ms)")
    group.add_argument("--hop-length", type=positive_int, metavar="N", help="in samples (default: 10 ms)")
    group.add_argument("--f-min", type=float, metavar="HZ", help="default: 0")
    group.add_argument("--f-max", type=float, metavar="HZ", help="default: half the sample rate")
    group.add_argument("--pad", type=int, metavar="N", help="zeros on each side (default: 0)")
    group.add_argument("--n-mels", type=positive_int, metavar="N", help="default: 80")
    group.add_argument("--window", choices=WINDOWS, help="default: hann; kaiser has torch's beta of 12")
    group.add_argument("--power", type=positive_float, help="1 for magnitude, 2 for power (default: 2)")
    group.add_argument("--normalized", choices=NORMALIZATIONS, help="default: none")
    group.add_argument("--no-center", action="store_true", help="frame t begins at t * hop, and nothing is padded")
    group.add_argument("--pad-mode", choices=PAD_MODES, help="default: reflect")
    group.add_argument("--norm", choices=("none", "slaney"), help="slaney: filters of unit area (default: none)")
    group.add_argument("--mel-scale", choices=MEL_SCALES, help="default: htk")
    group.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="default: float32")
    parser.add_argument(
        "--option", type=option, action="append", default=[], metavar="NAME=VALUE", help="of the front-end; may be repeated"
    )
    return parser


def transform_of(args: argparse.Namespace, rate: int, dtype: torch.dtype | None) -> MelSpectrogram:
    """The transform of the arguments, for waveforms of a sample rate in Hz, with this output dtype.

    Raises:
        ValueError: see MelSpectrogram.
    """
    of = argparse.Namespace(**(TRANSFORM | vars(args)))
    win_length = of.win_length or of.n_fft or max(1, round(0.025 * rate))
    return MelSpectrogram(
        sample_rate=rate,
        n_fft=of.n_fft or 1 << (win_length - 1).bit_length(),
        win_length=win_length,
        hop_length=of.hop_length or max(1, round(0.010 * rate)),
        f_min=of.f_min,
        f_max=of.f_max,
        pad=of.pad,
        n_mels=of.n_mels,
        window_fn=getattr(torch, f"{of.window}_window"),
        power=of.power,
        normalized=False if of.normalized == "none" else of.normalized,
        center=not of.no_center,
        pad_mode=of.pad_mode,
        norm=None if of.norm == "none" else of.norm,
        mel_scale=of.mel_scale,
        dtype=dtype,
    )


def refuse_transform(args: argparse.Namespace, why: str, *others: str) -> None:
    """Refuse arguments that say which transform, and others, where something else says it.

    Raises:
        Failure: one of them is given; its message ends with ``why``.
    """
    given = [*others, *(name for name in TRANSFORM if name in args)]
    if given:
        raise Failure(f"--{given[0].replace('_', '-')} does not go with {why}")


FRONTEND = "--frontend, which says all that is computed; its own options are set with --option"


def refuse_option(args: argparse.Namespace) -> None:
    """Refuse --option where no --frontend is given.

    Raises:
        Failure: it is given so.
    """
    if args.option and not args.frontend:
        raise Failure("--option is of a front-end: name one with --frontend")
