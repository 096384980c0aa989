"""``flashmel mel``: mel spectrograms of audio files, or a model's features of them."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import frontends
from ..cepstrum import AMIN
from ..frontends import FrontEnd
from ..jit.cache import whole_file
from ..transform import MelSpectrogram
from .arguments import (
    FRONTEND,
    device_arguments,
    positive_float,
    positive_int,
    refuse_option,
    refuse_transform,
    transform_arguments,
    transform_of,
)
from .console import Failure, device_of, need, printable, progress
from .picture import decibels, draw

FORMATS = ("npy", "pt", "safetensors", "png")

_EPILOG = """\
Frames are 25 ms long, 10 ms apart, with 80 filters, at any sample rate, unless told otherwise. (The class's own defaults, kept
for compatibility with torchaudio, do not follow the rate: --n-fft 400 --hop-length 200 --n-mels 128.)

OUT is a file, its format told by its extension (.npy, .pt, .safetensors, .png), or a folder, which is created: always for several
inputs, and for one if OUT exists as a folder or has no extension. In a folder, outputs are named after their inputs' stems.
An output that exists is left as it is and reported as a failure of its file, unless --overwrite is given: so a second run finishes
what an interrupted one began. A file is never left half written.

With --frontend, files are resampled to the front-end's rate, and arrays have its layout; pictures are not drawn.
Arrays are (n_mels, frames), or (channels, n_mels, frames) with --channels keep; the one of .safetensors is named "mel".
Pictures are in decibels, from the loudest value down to --db-range below it; kept channels are drawn one below the other.

Exit status: 0 all written; 1 a file failed, its reason on stderr, the others written; 2 usage; 130 interrupted."""


def add(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "mel",
        help="mel spectrograms of audio files",
        description="Write the mel spectrograms of audio files (wav, flac, ogg, mp3 and what else libsndfile reads).",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        parents=[device_arguments(), transform_arguments()],
    )
    parser.set_defaults(run=run)
    parser.add_argument("audio", nargs="+", metavar="AUDIO", help="audio file")
    parser.add_argument("-o", "--output", required=True, metavar="OUT", help="output file, or folder (see below)")
    parser.add_argument("--format", choices=FORMATS, help="of the outputs in a folder (default: npy)")
    parser.add_argument("--overwrite", action="store_true", help="replace outputs that exist")
    parser.add_argument(
        "--resample", type=positive_int, metavar="HZ", help="resample files to this rate (default: they keep theirs)"
    )
    parser.add_argument("--channels", choices=("mix", "keep"), default="mix", help="mean of the channels, or all (default: mix)")
    parser.add_argument(
        "--frontend", metavar="NAME", help="features of a model instead of a mel spectrogram, see flashmel frontends"
    )
    parser.add_argument("--db", action="store_true", help=f"write decibels, 20/power * log10, with a floor at {AMIN:g}")
    parser.add_argument("--db-range", type=positive_float, default=80.0, metavar="DB", help="of a picture's colours (default: 80)")


def run(args: argparse.Namespace) -> int:
    """Write the arrays or pictures of the files; those that fail are reported, and the others written."""
    jobs = _plan(args)
    _check_frontend(args)
    if args.format == "png":
        args.db, args.dtype = True, "float32"
    _check_transform(args)
    device = device_of(args.device)
    needed = {"soundfile": True, "scipy.signal": args.resample, "matplotlib": args.format == "png"}
    needed |= {"safetensors.torch": args.format == "safetensors"}
    for name in (name for name, used in needed.items() if used):
        need(name)  # here, so that a missing module is one message and not one for each file

    bar, say = progress(jobs, len(jobs), "file")
    failed = 0
    transforms: dict[int, MelSpectrogram | FrontEnd] = {}  # by sample rate
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: say(f"flashmel: warning: {message}", file=sys.stderr)  # type: ignore[assignment]
        for source, target in bar:
            try:
                line = _one(source, target, args, device, transforms)
            except Failure:
                raise
            except Exception as error:  # whatever is wrong with a file, the others are done
                failed += 1
                say(f"flashmel: {printable(source)}: {error or type(error).__name__}", file=sys.stderr)
            else:
                say(line)
    if failed and len(jobs) > 1:
        print(f"flashmel: {failed} of {len(jobs)} files failed", file=sys.stderr)
    return 1 if failed else 0


def _transform(args: argparse.Namespace, rate: int) -> MelSpectrogram | FrontEnd:
    """What computes the arrays of files with this sample rate.

    Raises:
        ValueError: it cannot be.
    """
    dtype = getattr(torch, args.dtype)
    if args.frontend:
        return frontends.frontend(args.frontend, dtype=dtype, **dict(args.option))
    return transform_of(args, rate, None if args.db else dtype)  # decibels are of float32 values; what is rounded is the result


def _check_frontend(args: argparse.Namespace) -> None:
    """Refuse what does not go with --frontend, and take its sample rate."""
    refuse_option(args)
    if not args.frontend:
        return
    try:
        rate = frontends.recipe(args.frontend, **dict(args.option)).sample_rate
    except (TypeError, ValueError) as error:
        raise Failure(f"--frontend {args.frontend}: {error}") from error
    refuse_transform(args, FRONTEND, *(["db"] if args.db else []), *(["format png"] if args.format == "png" else []))
    if args.resample not in (None, rate):
        raise Failure(
            f"--resample {args.resample}: front-end {args.frontend} takes audio at {rate} Hz, to which files are resampled"
        )
    args.resample = rate


def _check_transform(args: argparse.Namespace) -> None:
    """Refuse, before any file is read, parameters that are wrong at every sample rate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _transform(args, args.resample or 384_000)  # a rate above any file's, for f_min <= f_max
        except ValueError as error:
            raise Failure(str(error)) from error


def _plan(args: argparse.Namespace) -> list[tuple[Path, Path]]:
    """(input, output) for each input; decides what OUT is and sets ``args.format``.

    Raises:
        Failure: OUT and the inputs do not fit together.
    """
    inputs, out = [Path(name) for name in args.audio], Path(args.output)
    suffix = out.suffix[1:].lower()
    folder = out.is_dir() or args.output.endswith(("/", os.sep)) or not suffix
    if not folder and len(inputs) > 1:
        raise Failure(f"{len(inputs)} inputs need a folder for -o, got the file {printable(out)}")
    if not folder and suffix not in FORMATS:
        raise Failure(f"-o {printable(out)}: the extension must be one of {', '.join('.' + name for name in FORMATS)}")
    if folder and out.exists() and not out.is_dir():
        raise Failure(f"-o {printable(out)} is a file, not a folder")
    if not folder and args.format not in (None, suffix):
        raise Failure(f"--format {args.format} contradicts -o {printable(out)}")
    args.format = (args.format or "npy") if folder else suffix
    if args.format == "npy" and args.dtype == "bfloat16":
        raise Failure("NumPy has no bfloat16: choose another --dtype, or pt or safetensors as the format")

    sources: dict[Path, Path] = {}
    for source in inputs:
        target = out / f"{source.stem}.{args.format}" if folder else out
        if target in sources:
            raise Failure(f"{printable(sources[target])} and {printable(source)} would both be written to {printable(target)}")
        sources[target] = source
    originals = {source.resolve() for source in inputs}
    for target in sources:
        if target.resolve() in originals:
            raise Failure(f"{printable(target)} is an input: choose another output")
    return [(source, target) for target, source in sources.items()]


def _read(path: Path, mix: bool) -> tuple[np.ndarray, int]:
    """A file's samples, (time,) mixed or (channels, time), and its sample rate."""
    if not path.is_file():
        raise FileNotFoundError("not a file" if path.exists() else "no such file")
    with need("soundfile").SoundFile(path) as file:
        # In blocks, so that a long file of many channels needs the memory of its mix only.
        blocks = file.blocks(blocksize=1 << 20, dtype="float32", always_2d=True)
        parts = [block.mean(axis=1) if mix else block.T for block in blocks]
        if not parts:
            raise ValueError("it holds no samples")
        return np.concatenate(parts, axis=-1), file.samplerate


def _resample(waveform: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
    common = int(np.gcd(rate, new_rate))
    return need("scipy.signal").resample_poly(waveform, new_rate // common, rate // common, axis=-1).astype(np.float32)


def _save(mel: torch.Tensor, path: Path, args: argparse.Namespace, transform: Any, title: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        if args.format == "npy":
            np.save(file, mel.numpy())
        elif args.format == "pt":
            torch.save(mel, file)
        elif args.format == "safetensors":
            metadata = {"transform": transform.extra_repr(), "unit": "dB" if args.db else "1"}
            file.write(need("safetensors.torch").save({"mel": mel}, metadata))
        else:
            draw(file, mel.float().numpy(), transform, title, args.db_range)


def _one(
    source: Path, target: Path, args: argparse.Namespace, device: torch.device, transforms: dict[int, MelSpectrogram | FrontEnd]
) -> str:
    """Transform one file; returns the line to print."""
    if target.exists() and not args.overwrite:
        raise FileExistsError(f"{printable(target)} exists (--overwrite replaces it)")
    waveform, rate = _read(source, args.channels == "mix")
    seconds = waveform.shape[-1] / rate
    if args.resample and args.resample != rate:
        waveform, rate = _resample(waveform, rate, args.resample), args.resample
    if rate not in transforms:
        transforms[rate] = _transform(args, rate).to(device)
    transform = transforms[rate]
    with torch.inference_mode():
        mel = transform(torch.from_numpy(waveform).to(device))
        if args.db:
            mel = decibels(mel, transform.spec.power)
        mel = mel.to("cpu", getattr(torch, args.dtype)).contiguous()
    _save(mel, target, args, transform, printable(Path(source.name)))
    frames = mel.shape[-2 if transform.spec.epilogue.time_major else -1]
    return f"{printable(source)} -> {printable(target)}: {tuple(mel.shape)}, {frames} frames, {seconds:.3f} s"
