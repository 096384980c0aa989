"""What ``flashmel warm`` and ``flashmel bundle build`` share: which kernels are meant, and their compilation."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import frontends, fused
from ..frontends import FrontEnd
from ..jit import compiler, driver
from ..jit.source import INPUT_TYPES, AnySpecialisation, sources
from ..jit.toolchain import ToolchainError
from ..plan import Architecture, UnsupportedError
from ..transform import MelSpectrogram
from .arguments import FRONTEND, architectures, positive_int, refuse_option, refuse_transform, transform_arguments, transform_of
from .console import Failure, printable, progress


def kernel_arguments() -> argparse.ArgumentParser:
    """A parent of commands that compile kernels."""
    parser = argparse.ArgumentParser(add_help=False, parents=[transform_arguments()])
    parser.add_argument(
        "--arch", type=architectures, required=True, metavar="sm_NN,...", help="of the GPUs that will run them, or all"
    )
    parser.add_argument("--sample-rate", type=positive_int, metavar="HZ", help="of the waveforms to come, in Hz (default: 16000)")
    parser.add_argument("--input-dtype", choices=INPUT_TYPES, default="float32", help="of the waveforms (default: float32)")
    parser.add_argument("--gradient", action="store_true", help="also the gradient's kernel, which is specific to --n-mels")
    parser.add_argument(
        "--frontend",
        nargs="+",
        metavar="NAME",
        help="instead of a transform, all kernels of these front-ends, with and without lengths; see flashmel frontends",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="instead of one transform, those of a JSON file: a list of objects with arguments of flashmel.MelSpectrogram, or "
        "with frontend and its options, and input_dtype and gradient",
    )
    return parser


def compiled(args: argparse.Namespace) -> dict[str, tuple[AnySpecialisation, bytes]]:
    """The kernels of the arguments by identity, each with its cubin, from the cache or compiled into it, on all cores.

    Raises:
        Failure: the arguments say no configuration, or a kernel of it cannot be.
    """
    wanted: dict[str, AnySpecialisation] = {}
    for configuration in _configurations(args):
        for arch in args.arch:
            try:
                found = configuration.kernels(arch)
            except UnsupportedError as error:
                raise Failure(f"{arch.name}: {error}", status=1) from error
            wanted |= {compiler.identity(sources(s), arch.name): s for s in found}

    def compile_one(item: tuple[str, AnySpecialisation]) -> tuple[str, AnySpecialisation, bytes]:
        identity, s = item
        try:
            return identity, s, driver.cubin(s)
        except (ToolchainError, compiler.CompileError, driver.MissingKernelError) as error:
            raise Failure(f"{s.arch.name}: {error}", status=1) from error

    kernels = {}
    # In threads: the compiler runs without Python's lock, and processes would each import torch first.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        bar, say = progress(pool.map(compile_one, wanted.items()), len(wanted), "kernel")
        for identity, s, data in bar:
            kernels[identity] = s, data
            say(f"{len(data) / 1024:.0f} KiB: {s}")
    return kernels


class _Configuration(NamedTuple):
    """What kernels are wanted for."""

    module: MelSpectrogram | FrontEnd
    samples: torch.dtype  # of its waveforms
    gradient: bool  # whether their gradient is wanted

    def kernels(self, arch: Architecture) -> list[AnySpecialisation]:
        """
        Raises:
            UnsupportedError: one cannot be; the message says why.
        """
        module, samples, gradient = self
        if isinstance(module, FrontEnd):
            return frontends.specialisations(module, arch, samples, gradient=gradient)
        tables, output = (module.spectrogram.window, module.mel_scale.fb), module.dtype or torch.float32
        return fused.specialisations(*tables, module.spec, arch, samples, output, gradient=gradient)


def _configurations(args: argparse.Namespace) -> list[_Configuration]:
    """Of the arguments, of each of --frontend, or of each of --config."""
    if args.frontend:
        entries = ((name, partial(_of_entry, entry)) for name, entry in _frontend_entries(args).items())
        return [_configuration(f"--frontend {name}: ", make, args.input_dtype, args.gradient) for name, make in entries]
    refuse_option(args)
    if args.config is None:
        make = partial(transform_of, args, args.sample_rate or 16000, getattr(torch, args.dtype))
        return [_configuration("", make, args.input_dtype, args.gradient)]
    refuse_transform(args, "--config, whose file says all that is computed", *(["sample_rate"] if args.sample_rate else []))
    found = []
    for number, entry in enumerate(_config_file(args.config), 1):
        options = dict(entry)
        samples, gradient = options.pop("input_dtype", args.input_dtype), options.pop("gradient", args.gradient)
        where = f"{printable(args.config)}, configuration {number}: "
        found.append(_configuration(where, partial(_of_entry, options), samples, gradient))
    return found


def _frontend_entries(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What a file of --config would have for each of --frontend, by name."""
    if args.config is not None:
        raise Failure('--config does not go with --frontend: name front-ends in the file, as {"frontend": "whisper"}')
    if args.sample_rate is not None:
        raise Failure("--sample-rate does not go with --frontend: a front-end has its sample rate")
    refuse_transform(args, FRONTEND)
    return {name: {"frontend": name, "dtype": args.dtype, **dict(args.option)} for name in args.frontend}


def _configuration(where: str, make: Callable[[], MelSpectrogram | FrontEnd], samples: str, gradient: bool) -> _Configuration:
    """One of them, or a failure that says where it stands."""
    if samples not in INPUT_TYPES or gradient not in (False, True):
        raise Failure(
            f"{where}input_dtype must be one of {', '.join(INPUT_TYPES)}, gradient true or false: {samples!r}, {gradient!r}"
        )
    if gradient and samples == "int16":
        raise Failure(f"{where}gradient: waveforms of int16 have none")
    try:
        return _Configuration(make(), getattr(torch, samples), bool(gradient))
    except (ValueError, TypeError) as error:
        raise Failure(f"{where}{error}") from error


def _of_entry(options: dict[str, Any]) -> MelSpectrogram | FrontEnd:
    """The transform with a JSON file's arguments, or the front-end that it names, with its options."""
    if isinstance(name := options.get("dtype"), str):
        options = options | {"dtype": getattr(torch, name, name)}
    if "frontend" not in options:
        return MelSpectrogram(**options)
    return frontends.frontend(options["frontend"], **{name: value for name, value in options.items() if name != "frontend"})


def _config_file(path: Path) -> list[dict[str, Any]]:
    """The configurations that a file lists."""
    try:
        entries = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise Failure(f"--config {printable(path)}: {error}") from error
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise Failure(f'--config {printable(path)}: expected a list of objects such as [{{"n_fft": 400, "hop_length": 160}}]')
    return entries
