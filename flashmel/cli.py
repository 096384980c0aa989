"""The ``flashmel`` command: mel spectrograms of audio files, a demonstration, and a report of what was found."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.metadata
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeAlias, TypeVar

import numpy as np

from . import __version__
from .jit.cache import whole_file
from .jit.source import INPUT_TYPES, NormalizeSpecialisation, Specialisation
from .plan import ARCHITECTURES, Architecture, UnsupportedError, make_plan
from .spec import MEL_SCALES, NORMALIZATIONS, PAD_MODES, MelBankSpec, StftSpec

if TYPE_CHECKING:
    import torch

    from .frontends import FrontEnd
    from .transform import MelSpectrogram

T = TypeVar("T")
_Kernel: TypeAlias = Specialisation | NormalizeSpecialisation
FORMATS = ("npy", "pt", "safetensors", "png")
WINDOWS = ("hann", "hamming", "blackman", "bartlett", "kaiser")
# What says which transform: a front-end says it all.
TRANSFORM = (
    "n_fft", "win_length", "hop_length", "f_min", "f_max", "pad", "n_mels", "window", "power", "normalized", "no_center",
    "pad_mode", "norm", "mel_scale",
)  # fmt: skip
AMIN = 1e-10  # the floor of --db, as in torchaudio.transforms.AmplitudeToDB

_MEL_HELP = """\
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


class _Failure(Exception):
    """Ends the command with a message on stderr and ``status``."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


def _need(name: str) -> Any:
    """Import a module of the ``cli`` extra, or end with the command that installs it."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: soundfile without its C library
        raise _Failure(f'this needs {name} ({error}): pip install "flashmel[cli]"', status=1) from error


def _shown(path: Path) -> str:
    """A path that can be printed, also where its name is not valid UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _progress(items: Iterable[T], total: int, unit: str) -> tuple[Iterable[T], Callable[..., Any]]:
    """The items under a progress bar, if tqdm is there and stderr a terminal; and what prints a line above it."""
    try:
        bar = importlib.import_module("tqdm").tqdm(items, total=total, unit=unit, disable=None)  # None: by the terminal
    except ImportError:
        return items, print
    return bar, bar.write


def _positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return value


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value


def _device(name: str | None) -> torch.device:
    """The device of ``--device``, checked; by default a GPU if there is one."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps"):
            raise RuntimeError("expected cpu, cuda, cuda:N or mps")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch has no one type for an absent device
        raise _Failure(f"--device {name}: {str(error).splitlines()[0]}") from error
    return device


# ---------------------------------------------------------------------------------------------------------------- flashmel mel


def _transform(args: argparse.Namespace, rate: int) -> MelSpectrogram:
    """The transform of the arguments.

    Raises:
        ValueError: see MelSpectrogram.
    """
    import torch

    from .transform import MelSpectrogram

    win_length = args.win_length or args.n_fft or max(1, round(0.025 * rate))
    return MelSpectrogram(
        sample_rate=rate,
        n_fft=args.n_fft or 1 << (win_length - 1).bit_length(),
        win_length=win_length,
        hop_length=args.hop_length or max(1, round(0.010 * rate)),
        f_min=args.f_min,
        f_max=args.f_max,
        pad=args.pad,
        n_mels=args.n_mels,
        window_fn=getattr(torch, f"{args.window}_window"),
        power=args.power,
        normalized=False if args.normalized == "none" else args.normalized,
        center=not args.no_center,
        pad_mode=args.pad_mode,
        norm=None if args.norm == "none" else args.norm,
        mel_scale=args.mel_scale,
        # Decibels are of the float32 values; what is rounded is the result.
        dtype=None if args.db else getattr(torch, args.dtype),
    )


def _check_transform(args: argparse.Namespace) -> None:
    """Refuse, before any file is read, parameters that are wrong at every sample rate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _transform(args, args.resample or 384_000)  # a rate above any file's, for f_min <= f_max
        except ValueError as error:
            raise _Failure(str(error)) from error


def _check_frontend(args: argparse.Namespace) -> None:
    """Refuse what does not go with --frontend, and take its sample rate."""
    if args.option and not args.frontend:
        raise _Failure("--option is of a front-end: name one with --frontend")
    if not args.frontend:
        return
    from .frontends import recipe

    try:
        rate = recipe(args.frontend, **dict(args.option)).sample_rate
    except (TypeError, ValueError) as error:
        raise _Failure(f"--frontend {args.frontend}: {error}") from error
    _refuse_transform(args, *(["db"] if args.db else []), *(["format png"] if args.format == "png" else []))
    if args.resample not in (None, rate):
        raise _Failure(
            f"--resample {args.resample}: front-end {args.frontend} takes audio at {rate} Hz, to which files are resampled"
        )
    args.resample = rate


def _refuse_transform(args: argparse.Namespace, *others: str) -> None:
    """Refuse arguments that say which transform, and others that do not go with --frontend."""
    given = [*others, *(name for name, default in args.defaults.items() if getattr(args, name) != default)]
    if given:
        raise _Failure(
            f"--{given[0].replace('_', '-')} does not go with --frontend, which says all that is computed; "
            "its own options are set with --option"
        )


def _frontend(args: argparse.Namespace) -> FrontEnd:
    import torch

    from .frontends import frontend

    return frontend(args.frontend, dtype=getattr(torch, args.dtype), **dict(args.option))


def _option(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value a Python literal or else a string."""
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def _frontends(args: argparse.Namespace) -> int:
    """List the front-ends, or say what one is."""
    from . import frontends

    if args.name is None:
        rows = [(name, frontends.frontend(name)) for name in frontends.names()]
        width = max(len(name) for name, _ in rows)
        for name, module in rows:
            print(f"{name:{width}}  {module.sample_rate:5} Hz  {module.layout:20}  {module.length_rule}")
        return 0
    try:
        module = frontends.frontend(args.name)
    except ValueError as error:
        raise _Failure(str(error)) from error
    shown = {"sample rate": f"{module.sample_rate} Hz", "layout": module.layout, "frames of L samples": module.length_rule}
    shown |= {"source": module.recipe.source, "compared with": module.recipe.compared_with}
    shown |= {"not checked": module.recipe.not_checked} if module.recipe.not_checked else {}
    shown |= {"options": ", ".join(f"{name}={value!r}" for name, value in frontends.options(args.name).items()) or "none"}
    for name, value in shown.items():
        print(f"{name}: {value}")
    return 0


def _plan(args: argparse.Namespace) -> list[tuple[Path, Path]]:
    """(input, output) for each input; decides what OUT is and sets ``args.format``.

    Raises:
        _Failure: OUT and the inputs do not fit together.
    """
    inputs, out = [Path(name) for name in args.audio], Path(args.output)
    suffix = out.suffix[1:].lower()
    folder = out.is_dir() or args.output.endswith(("/", os.sep)) or not suffix
    if not folder and len(inputs) > 1:
        raise _Failure(f"{len(inputs)} inputs need a folder for -o, got the file {_shown(out)}")
    if not folder and suffix not in FORMATS:
        raise _Failure(f"-o {_shown(out)}: the extension must be one of {', '.join('.' + name for name in FORMATS)}")
    if folder and out.exists() and not out.is_dir():
        raise _Failure(f"-o {_shown(out)} is a file, not a folder")
    if not folder and args.format not in (None, suffix):
        raise _Failure(f"--format {args.format} contradicts -o {_shown(out)}")
    args.format = (args.format or "npy") if folder else suffix
    if args.format == "npy" and args.dtype == "bfloat16":
        raise _Failure("NumPy has no bfloat16: choose another --dtype, or pt or safetensors as the format")

    sources: dict[Path, Path] = {}
    for source in inputs:
        target = out / f"{source.stem}.{args.format}" if folder else out
        if target in sources:
            raise _Failure(f"{_shown(sources[target])} and {_shown(source)} would both be written to {_shown(target)}")
        sources[target] = source
    originals = {source.resolve() for source in inputs}
    for target in sources:
        if target.resolve() in originals:
            raise _Failure(f"{_shown(target)} is an input: choose another output")
    return [(source, target) for target, source in sources.items()]


def _read(path: Path, mix: bool) -> tuple[np.ndarray, int]:
    """A file's samples, (time,) mixed or (channels, time), and its sample rate."""
    if not path.is_file():
        raise FileNotFoundError("not a file" if path.exists() else "no such file")
    with _need("soundfile").SoundFile(path) as file:
        # In blocks, so that a long file of many channels needs the memory of its mix only.
        blocks = file.blocks(blocksize=1 << 20, dtype="float32", always_2d=True)
        parts = [block.mean(axis=1) if mix else block.T for block in blocks]
        if not parts:
            raise ValueError("it holds no samples")
        return np.concatenate(parts, axis=-1), file.samplerate


def _resample(waveform: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
    common = int(np.gcd(rate, new_rate))
    return _need("scipy.signal").resample_poly(waveform, new_rate // common, rate // common, axis=-1).astype(np.float32)


def _decibels(mel: torch.Tensor, power: float) -> torch.Tensor:
    return (20.0 / power) * mel.clamp(min=AMIN).log10()


def _save(mel: torch.Tensor, path: Path, args: argparse.Namespace, transform: Any, title: str) -> None:
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        if args.format == "npy":
            np.save(file, mel.numpy())
        elif args.format == "pt":
            torch.save(mel, file)
        elif args.format == "safetensors":
            metadata = {"transform": transform.extra_repr(), "unit": "dB" if args.db else "1"}
            file.write(_need("safetensors.torch").save({"mel": mel}, metadata))
        else:
            _draw(file, mel.float().numpy(), transform, title, args.db_range)


def _one(source: Path, target: Path, args: argparse.Namespace, device: torch.device, transforms: dict[int, Any]) -> str:
    """Transform one file; returns the line to print."""
    import torch

    if target.exists() and not args.overwrite:
        raise FileExistsError(f"{_shown(target)} exists (--overwrite replaces it)")
    waveform, rate = _read(source, args.channels == "mix")
    seconds = waveform.shape[-1] / rate
    if args.resample and args.resample != rate:
        waveform, rate = _resample(waveform, rate, args.resample), args.resample
    if rate not in transforms:
        transforms[rate] = (_frontend(args) if args.frontend else _transform(args, rate)).to(device)
    with torch.inference_mode():
        mel = transforms[rate](torch.from_numpy(waveform).to(device))
        if args.db:
            mel = _decibels(mel, args.power)
        mel = mel.to("cpu", getattr(torch, args.dtype)).contiguous()
    _save(mel, target, args, transforms[rate], _shown(Path(source.name)))
    frames = mel.shape[-2 if transforms[rate].spec.epilogue.time_major else -1]
    return f"{_shown(source)} -> {_shown(target)}: {tuple(mel.shape)}, {frames} frames, {seconds:.3f} s"


def _mel(args: argparse.Namespace) -> int:
    jobs = _plan(args)
    _check_frontend(args)
    if args.format == "png":
        args.db, args.dtype = True, "float32"
    _check_transform(args)
    device = _device(args.device)
    needed = {"soundfile": True, "scipy.signal": args.resample, "matplotlib": args.format == "png"}
    needed |= {"safetensors.torch": args.format == "safetensors"}
    for name in (name for name, used in needed.items() if used):
        _need(name)  # here, so that a missing module is one message and not one for each file

    bar, say = _progress(jobs, len(jobs), "file")
    failed, transforms = 0, {}  # type: ignore[var-annotated]
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: say(f"flashmel: warning: {message}", file=sys.stderr)  # type: ignore[assignment]
        for source, target in bar:
            try:
                line = _one(source, target, args, device, transforms)
            except _Failure:
                raise
            except Exception as error:  # whatever is wrong with a file, the others are done
                failed += 1
                say(f"flashmel: {_shown(source)}: {error or type(error).__name__}", file=sys.stderr)
            else:
                say(line)
    if failed and len(jobs) > 1:
        print(f"flashmel: {failed} of {len(jobs)} files failed", file=sys.stderr)
    return 1 if failed else 0


# -------------------------------------------------------------------------------------------------------------------- pictures


def _hz_ticks(bank: MelBankSpec) -> list[float]:
    """Octaves, which lie nearly evenly on a mel axis; round numbers where the range holds too few."""
    octaves = [0.0] + [125.0 * 2**k for k in range(12)]
    ticks = [hz for hz in octaves if bank.f_min <= hz <= bank.f_max]
    if len(ticks) < 3:
        ticks = _need("matplotlib.ticker").MaxNLocator(6).tick_values(bank.f_min, bank.f_max)
    return [hz for hz in ticks if bank.f_min <= hz <= bank.f_max]


def _draw(file: BinaryIO, db: np.ndarray, transform: MelSpectrogram, title: str, db_range: float) -> None:
    """Write a picture of decibels (n_mels, frames) or (channels, n_mels, frames): seconds, Hz on a mel axis, a colour bar."""
    from .filterbank import hz_to_mel

    spec, bank = transform.spec, transform.bank
    db = db.reshape(-1, *db.shape[-2:])
    channels, n_mels, frames = db.shape
    low, high = hz_to_mel(bank.f_min, bank.mel_scale), hz_to_mel(bank.f_max, bank.mel_scale)
    half_row = 0.5 * (high - low) / (n_mels + 1)  # row m is centred at low + (m + 1) rows
    # Frame t begins at sample t * hop_length - margin - pad and is drawn around its middle.
    middle = spec.n_fft // 2 - spec.margin - spec.pad
    left, right = ((middle + (t - 0.5) * spec.hop_length) / bank.sample_rate for t in (0, frames))
    # A picture has some 1500 columns: the loudest of the frames that share one is drawn, so that clicks stay visible
    # and an hour of audio needs no more memory than a minute.
    step = -(-frames // 3000)
    db = np.maximum.reduceat(db, np.arange(0, frames, step), axis=-1)
    right = left + (right - left) * db.shape[-1] * step / frames
    floor = 20.0 / spec.power * float(np.log10(AMIN))
    top = float(np.max(db, initial=floor, where=np.isfinite(db)))  # a file may hold NaN

    fig = _need("matplotlib.figure").Figure(figsize=(11, 1.2 + 3.4 * channels), dpi=150, layout="constrained")
    axes = fig.subplots(channels, 1, sharex=True, squeeze=False)[:, 0]
    for channel, ax in enumerate(axes):
        image = ax.imshow(
            db[channel],
            origin="lower",
            aspect="auto",
            extent=(left, right, low + half_row, high - half_row),
            cmap="magma",
            vmin=top - db_range,
            vmax=top,
        )
        ticks = _hz_ticks(bank)
        ax.set_yticks([hz_to_mel(hz, bank.mel_scale) for hz in ticks], [f"{hz:g}" for hz in ticks])
        ax.set_ylim(low, high)
        ax.set_facecolor("black")  # the half row at either end, where no filter has its middle
        ax.set_ylabel("frequency (Hz)" if channels == 1 else f"channel {channel + 1}: frequency (Hz)")
    axes[0].set_title(title, loc="left", fontweight="bold", parse_math=False)  # a file name may hold a $
    settings = f"{bank.sample_rate:g} Hz, n_fft {spec.n_fft}, window {spec.win_length}, hop {spec.hop_length}, {n_mels} mels"
    axes[0].set_title(settings, loc="right", fontsize="small", color="0.4")
    axes[-1].set_xlabel("time (s)")
    quantity = {1.0: "mel magnitude", 2.0: "mel power"}.get(spec.power, f"mel of |X|^{spec.power:g}")
    fig.colorbar(image, ax=list(axes), pad=0.015, extend="min", label=f"{quantity} (dB re 1)")
    fig.savefig(file, format="png")


# --------------------------------------------------------------------------------------------------------------- flashmel demo


def _demo_sound(rate: int) -> np.ndarray:
    """Four seconds: a rising chirp, three vowels on a gliding voice, clicks, silence."""

    def fade(x: np.ndarray) -> np.ndarray:
        ramp = np.minimum(1.0, np.arange(len(x)) / (0.02 * rate))
        return x * ramp * ramp[::-1]

    t = np.arange(rate) / rate
    ratio = 7000 / 100
    chirp = fade(0.4 * np.sin(2 * np.pi * 100 / np.log(ratio) * (ratio**t - 1)))

    t = np.arange(int(1.6 * rate)) / rate
    pitch = 120 + 50 * np.sin(np.pi * t / 1.6)
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    formants = [np.interp(t, [0.3, 0.8, 1.3], hz) for hz in ([730, 270, 300], [1090, 2290, 870], [2440, 3010, 2240])]  # a, i, u
    vowels = np.zeros_like(t)
    for k in range(1, 70):
        gain = sum(weight / (1 + ((k * pitch - hz) / 90) ** 2) for weight, hz in zip((1.0, 0.5, 0.25), formants, strict=True))
        vowels += (gain + 0.003) * np.sin(k * phase) * (k * pitch < rate / 2)
    vowels = fade(vowels * 0.4 / np.abs(vowels).max())

    clicks = np.zeros(int(0.8 * rate))
    clicks[rate // 20 :: rate // 10] = 0.9
    silence = np.zeros(int(0.6 * rate))
    return np.concatenate([chirp, vowels, clicks, silence]).astype(np.float32)


def _medians_ms(calls: list[Callable[[], Any]], device: torch.device, budget: float = 6.0) -> list[float]:
    """Median time in ms of each call, in turns so that a busy machine is as unkind to each, within ``budget`` seconds."""
    import torch

    synchronize = getattr(torch, device.type).synchronize
    times: list[list[float]] = [[] for _ in calls]
    start = time.perf_counter()
    for turn in range(23):
        for call, own in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            synchronize()
            own.append(1e3 * (time.perf_counter() - begin))
        if turn == 2:
            times = [own[-1:] for own in times]  # the first turns are the warm-up
        if time.perf_counter() - start > budget:
            break
    return [statistics.median(own) for own in times]


def _torchaudio(options: dict[str, Any]) -> tuple[torch.nn.Module | None, str]:
    """torchaudio's transform, or None and the reason."""
    try:
        from torchaudio.transforms import MelSpectrogram as Theirs
    except Exception as error:  # absent, or built for another torch (OSError, RuntimeError, ...)
        return None, str(error).splitlines()[0]
    return Theirs(**options), ""


def _demo(args: argparse.Namespace) -> int:
    import torch

    from . import fused
    from .transform import MelSpectrogram

    if Path(args.output).suffix.lower() != ".png":
        raise _Failure(f"-o {args.output}: the picture's extension must be .png")
    _need("matplotlib")
    device, rate = _device(args.device), 16_000
    options: dict[str, Any] = {"sample_rate": rate, "n_fft": 400, "hop_length": 160, "n_mels": 80}
    sound = torch.from_numpy(_demo_sound(rate))
    # Eight different half minutes: the sound repeated, from eight beginnings.
    batch = torch.stack([sound.roll(-rate * n // 2).repeat(8)[: 30 * rate] for n in range(8)]).to(device)
    transform = MelSpectrogram(**options).to(device)
    torchaudio, absent = _torchaudio(options)

    with torch.inference_mode():
        begin = time.perf_counter()
        mel = transform(batch).cpu()
        first = time.perf_counter() - begin
        plain = fused.unavailable_reason(device)
        if plain is None:  # for the device; whether this configuration runs fused, only running it tells
            try:
                fused.features(batch, transform.spectrogram.window, transform.mel_scale.fb, transform.spec)
            except fused.UnavailableError as error:
                plain = str(error)
        print(f"input               8 x 30 s at {rate} Hz: {tuple(batch.shape)}")
        print(f"output              {tuple(mel.shape)}, {mel.dtype}".replace("torch.", ""))
        print(f"device              {_device_name(device)}")
        print(f"path                {'fused' if plain is None else f'plain torch ({plain})'}")
        calls: list[Callable[[], Any]] = [lambda: transform(batch)]
        if torchaudio is not None:
            torchaudio.to(device)
            expected = torchaudio(batch).cpu()
            calls.append(lambda: torchaudio(batch))
        ours, *theirs = _medians_ms(calls, device)
        print(f"first call          {1e3 * first:.1f} ms")
        print(f"time                {ours:.3f} ms, {8 * 30e3 / ours:,.0f} times as fast as the sound plays")
        if theirs:
            print(f"torchaudio's time   {theirs[0]:.3f} ms, {theirs[0] / ours:.2f} times flashmel's")
            difference, largest = (mel - expected).abs().max().item(), expected.max().item()
            print(f"largest difference  {difference:.2e} of values up to {largest:.2e}: {difference / largest:.1e}")
        else:
            print(f"torchaudio          not compared: {absent}")
        picture = _decibels(transform(sound.to(device)), 2.0).cpu().numpy()
    title = "flashmel demo: a chirp, three vowels, clicks, silence"
    path = Path(args.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        _draw(file, picture, transform, title, 80.0)
    print(f"picture             {_shown(path)}")
    return 0


# ------------------------------------------------------------------------------------------------------------- flashmel doctor


def _device_name(device: torch.device) -> str:
    import torch

    if device.type != "cuda":
        return f"{device} ({torch.get_num_threads()} threads)" if device.type == "cpu" else str(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device} ({torch.cuda.get_device_name(device)}, sm_{major}{minor})"


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _architecture(name: str) -> Architecture:
    for arch in ARCHITECTURES:
        if arch.name == name:
            return arch
    raise argparse.ArgumentTypeError(f"must be one of {', '.join(arch.name for arch in ARCHITECTURES)}, got {name}")


def _architectures(names: str) -> list[Architecture]:
    return list(ARCHITECTURES) if names == "all" else [_architecture(name) for name in names.split(",")]


def _planned(spec: StftSpec, arch: Architecture) -> str:
    try:
        return f"fused kernel: {make_plan(spec, arch)}"
    except UnsupportedError as error:
        return f"plain torch: {error}"


def _mismatch(torchs_cuda: str | None) -> list[tuple[str, str]]:
    """A row, if compiler and torch are of different CUDA versions."""
    from .jit import toolchain

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


def _doctor(args: argparse.Namespace) -> int:
    import platform

    import torch

    from . import fused
    from .jit import toolchain

    gpus = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
    rows = [
        ("flashmel", __version__),
        ("Python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", torch.__version__),
        ("torch's CUDA", torch.version.cuda or "none (a build without CUDA)"),
        *(("GPU", _device_name(gpu)) for gpu in gpus),
        *([] if gpus else [("GPU", "none that torch can use")]),
        *toolchain.describe(),
        *_mismatch(torch.version.cuda),
        *((f"{name} (cli)", _installed(name)) for name in ("soundfile", "scipy", "matplotlib", "safetensors", "tqdm")),
    ]
    targets: list[torch.device | None] = [*gpus] or [None]
    for gpu in targets:
        reason = fused.unavailable_reason(gpu)
        rows.append(("fused path" + (f", {gpu}" if gpu else ""), "available" if reason is None else f"not available: {reason}"))
    if args.n_fft is not None:
        try:
            spec = StftSpec(args.n_fft, args.n_fft, args.hop_length or max(1, args.n_fft // 2))
        except ValueError as error:
            raise _Failure(str(error)) from None
        if gpus and not args.arch:
            rows += [(f"n_fft {args.n_fft}, {gpu}", fused.path(spec, gpu)) for gpu in gpus]
        else:
            archs = [args.arch] if args.arch else ARCHITECTURES
            rows += [(f"n_fft {args.n_fft}, {arch.name}", _planned(spec, arch)) for arch in archs]
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label:{width}}  {value}")
    return 0


# -------------------------------------------------------------------------------------------------- flashmel warm, flashmel cache


class _Configuration(NamedTuple):
    """What kernels are wanted for."""

    module: MelSpectrogram | FrontEnd
    samples: torch.dtype  # of its waveforms
    gradient: bool  # whether their gradient is wanted

    def kernels(self, arch: Architecture) -> list[_Kernel]:
        """
        Raises:
            UnsupportedError: one cannot be; the message says why.
        """
        import torch

        from . import frontends, fused

        module, samples, gradient = self
        if isinstance(module, frontends.FrontEnd):
            return frontends.specialisations(module, arch, samples, gradient=gradient)
        tables, output = (module.spectrogram.window, module.mel_scale.fb), module.dtype or torch.float32
        return fused.specialisations(*tables, module.spec, arch, samples, output, gradient=gradient)


def _configurations(args: argparse.Namespace) -> list[_Configuration]:
    """Of the arguments, of each of --frontend, or of each of --config."""
    if args.frontend:
        entries = ((name, partial(_of_entry, entry)) for name, entry in _frontend_entries(args).items())
        return [_configuration(f"--frontend {name}: ", make, args.input_dtype, args.gradient) for name, make in entries]
    if args.option:
        raise _Failure("--option is of a front-end: name one with --frontend")
    if args.config is None:
        return [_configuration("", lambda: _transform(args, args.resample or 16000), args.input_dtype, args.gradient)]
    found = []
    for number, entry in enumerate(_config_file(args.config), 1):
        options = dict(entry)
        samples, gradient = options.pop("input_dtype", args.input_dtype), options.pop("gradient", args.gradient)
        make = partial(_of_entry, options)
        found.append(_configuration(f"{_shown(args.config)}, configuration {number}: ", make, samples, gradient))
    return found


def _frontend_entries(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What a file of --config would have for each of --frontend, by name."""
    if args.config is not None:
        raise _Failure('--config does not go with --frontend: name front-ends in the file, as {"frontend": "whisper"}')
    if args.resample is not None:
        raise _Failure("--resample does not go with --frontend: a front-end has its sample rate")
    _refuse_transform(args)
    return {name: {"frontend": name, "dtype": args.dtype, **dict(args.option)} for name in args.frontend}


def _configuration(where: str, make: Callable[[], MelSpectrogram | FrontEnd], samples: str, gradient: bool) -> _Configuration:
    """One of them, or a failure that says where it stands."""
    import torch

    if samples not in INPUT_TYPES or gradient not in (False, True):
        raise _Failure(
            f"{where}input_dtype must be one of {', '.join(INPUT_TYPES)}, gradient true or false: {samples!r}, {gradient!r}"
        )
    if gradient and samples == "int16":
        raise _Failure(f"{where}gradient: waveforms of int16 have none")
    try:
        return _Configuration(make(), getattr(torch, samples), bool(gradient))
    except (ValueError, TypeError) as error:
        raise _Failure(f"{where}{error}") from error


def _of_entry(options: dict[str, Any]) -> MelSpectrogram | FrontEnd:
    """The transform with a JSON file's arguments, or the front-end that it names, with its options."""
    import torch

    from .frontends import frontend
    from .transform import MelSpectrogram

    if isinstance(name := options.get("dtype"), str):
        options = options | {"dtype": getattr(torch, name, name)}
    if "frontend" not in options:
        return MelSpectrogram(**options)
    return frontend(options["frontend"], **{name: value for name, value in options.items() if name != "frontend"})


def _config_file(path: Path) -> list[dict[str, Any]]:
    """The configurations that a file lists."""
    try:
        entries = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise _Failure(f"--config {_shown(path)}: {error}") from error
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise _Failure(f'--config {_shown(path)}: expected a list of objects such as [{{"n_fft": 400, "hop_length": 160}}]')
    return entries


def _compiled(args: argparse.Namespace) -> dict[str, tuple[_Kernel, bytes]]:
    """The kernels of the arguments by identity, from the cache or compiled into it, on all cores."""
    from .jit import compiler, driver
    from .jit.source import sources
    from .jit.toolchain import ToolchainError

    wanted: dict[str, _Kernel] = {}
    for configuration in _configurations(args):
        for arch in args.arch:
            try:
                found = configuration.kernels(arch)
            except UnsupportedError as error:
                raise _Failure(f"{arch.name}: {error}", status=1) from error
            wanted |= {compiler.identity(sources(s), arch.name): s for s in found}

    def compile_one(item: tuple[str, _Kernel]) -> tuple[str, _Kernel, bytes]:
        identity, s = item
        try:
            return identity, s, driver.cubin(s)
        except (ToolchainError, compiler.CompileError, driver.MissingKernelError) as error:
            raise _Failure(f"{s.arch.name}: {error}", status=1) from error

    kernels = {}
    # In threads: the compiler runs without Python's lock, and processes would each import torch first.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        bar, say = _progress(pool.map(compile_one, wanted.items()), len(wanted), "kernel")
        for identity, s, data in bar:
            kernels[identity] = s, data
            say(f"{len(data) / 1024:.0f} KiB: {s}")
    return kernels


def _warm(args: argparse.Namespace) -> int:
    """Compile what transforms need into the cache, on any machine."""
    from . import environment

    if (folder := environment.cache_dir()) is None:
        raise _Failure("there is no place for the cache: this user has no home; set FLASHMEL_CACHE_DIR")
    _compiled(args)
    print(f"the cache is {_shown(folder)}")
    return 0


def _bundle_build(args: argparse.Namespace) -> int:
    from .jit import toolchain
    from .jit.bundle import BundleError, check_unused, write_bundle

    try:
        check_unused(Path(args.output))  # now, and not after minutes of compiling
        kernels = [(identity, s.arch.name, str(s), data) for identity, (s, data) in _compiled(args).items()]
        bundle = write_bundle(Path(args.output), int(toolchain.nvrtc_version().split(".")[0]), kernels)
    except (BundleError, OSError) as error:
        raise _Failure(str(error), status=1) from error
    print(f"{_shown(bundle.path)}: {len(bundle.variants)} kernels, manifest sha256 {bundle.digest}")
    return 0


def _bundle_list(args: argparse.Namespace) -> int:
    from .jit.bundle import BundleError, judge

    try:
        digest, verdicts = judge(args.bundle, args.arch and [arch.name for arch in args.arch])
    except BundleError as error:
        raise _Failure(str(error), status=1) from error
    for verdict in verdicts:
        print(f"{'accepted' if verdict.accepted else f'rejected, {verdict.reason}'}: {verdict.variant.description}")
    print(f"manifest sha256 {digest}")
    return int(any(verdict.damaged for verdict in verdicts))


def _cache(args: argparse.Namespace) -> int:
    from . import environment
    from .jit import bundle, cache

    if (folder := environment.cache_dir()) is None:
        raise _Failure("there is no cache: this user has no home; set FLASHMEL_CACHE_DIR")
    if args.action == "info":
        held = cache.usage(folder)
        print(f"{_shown(folder)}: {held.entries} kernels, {held.bytes / 2**20:.1f} MiB of at most {cache.MAX_BYTES / 2**20:.0f}")
        for path in bundle.downloads(folder):
            held = cache.usage(path)
            print(f"{_shown(path)}: {held.entries} downloaded kernels, {held.bytes / 2**20:.1f} MiB")
        return 0
    try:
        removed = cache.clear(folder)
        bundle.remove_downloads(folder)
    except OSError as error:
        raise _Failure(f"{_shown(folder)}: {error.strerror or error}", status=1) from error
    print(f"{_shown(folder)}: removed {removed.entries} kernels, {removed.bytes / 2**20:.1f} MiB")
    return 0


# ---------------------------------------------------------------------------------------------------------------- command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("flashmel", description="Mel spectrograms, on a GPU in one kernel launch.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"flashmel {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    device = argparse.ArgumentParser(add_help=False)
    device.add_argument("--device", help="cpu, cuda, cuda:1 or mps (default: cuda if there is one, else cpu)")

    transform = argparse.ArgumentParser(add_help=False)
    transform.add_argument(
        "--resample", type=_positive_int, metavar="HZ", help="sample rate; files are resampled to it (default: their own, or 16000)"
    )
    group = transform.add_argument_group("transform", "the arguments of flashmel.MelSpectrogram")
    group.add_argument("--n-fft", type=_positive_int, metavar="N", help="default: the window's length, to the next power of two")
    group.add_argument("--win-length", type=_positive_int, metavar="N", help="in samples (default: N of --n-fft, else 25 ms)")
    group.add_argument("--hop-length", type=_positive_int, metavar="N", help="in samples (default: 10 ms)")
    group.add_argument("--f-min", type=float, default=0.0, metavar="HZ", help="default: 0")
    group.add_argument("--f-max", type=float, metavar="HZ", help="default: half the sample rate")
    group.add_argument("--pad", type=int, default=0, metavar="N", help="zeros on each side (default: 0)")
    group.add_argument("--n-mels", type=_positive_int, default=80, metavar="N", help="default: 80")
    group.add_argument("--window", choices=WINDOWS, default="hann", help="default: hann; kaiser has torch's beta of 12")
    group.add_argument("--power", type=_positive_float, default=2.0, help="1 for magnitude, 2 for power (default: 2)")
    group.add_argument("--normalized", choices=NORMALIZATIONS, default="none", help="default: none")
    group.add_argument("--no-center", action="store_true", help="frame t begins at t * hop, and nothing is padded")
    group.add_argument("--pad-mode", choices=PAD_MODES, default="reflect", help="default: reflect")
    group.add_argument("--norm", choices=("none", "slaney"), default="none", help="slaney: filters of unit area (default: none)")
    group.add_argument("--mel-scale", choices=MEL_SCALES, default="htk", help="default: htk")
    group.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="default: float32")

    transform.set_defaults(defaults={name: transform.get_default(name) for name in TRANSFORM})
    transform.add_argument(
        "--option", type=_option, action="append", default=[], metavar="NAME=VALUE", help="of the front-end; may be repeated"
    )

    mel = commands.add_parser(
        "mel",
        help="mel spectrograms of audio files",
        description="Write the mel spectrograms of audio files (wav, flac, ogg, mp3 and what else libsndfile reads).",
        epilog=_MEL_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        parents=[device, transform],
    )
    mel.set_defaults(run=_mel)
    mel.add_argument("--frontend", metavar="NAME", help="features of a model instead of a mel spectrogram, see flashmel frontends")
    mel.add_argument("audio", nargs="+", metavar="AUDIO", help="audio file")
    mel.add_argument("-o", "--output", required=True, metavar="OUT", help="output file, or folder (see below)")
    mel.add_argument("--format", choices=FORMATS, help="of the outputs in a folder (default: npy)")
    mel.add_argument("--overwrite", action="store_true", help="replace outputs that exist")
    mel.add_argument("--channels", choices=("mix", "keep"), default="mix", help="mean of the channels, or all (default: mix)")
    mel.add_argument("--db", action="store_true", help=f"write decibels, 20/power * log10, with a floor at {AMIN:g}")
    mel.add_argument("--db-range", type=_positive_float, default=80.0, metavar="DB", help="of a picture's colours (default: 80)")

    known = commands.add_parser("frontends", help="the front-ends of models that are known, or what one of them is")
    known.add_argument("name", nargs="?", metavar="NAME", help="say what this one is, and its options")
    known.set_defaults(run=_frontends)

    demo = commands.add_parser(
        "demo",
        help="synthesise a sound, time the transform, draw a picture",
        description="Transform a synthesised sound: prints shape, device, path, time and the difference from torchaudio.",
        allow_abbrev=False,
        parents=[device],
    )
    demo.set_defaults(run=_demo)
    demo.add_argument("-o", "--output", default="flashmel-demo.png", metavar="PICTURE", help="default: %(default)s")

    ahead = argparse.ArgumentParser(add_help=False, parents=[transform])
    ahead.add_argument(
        "--arch", type=_architectures, required=True, metavar="sm_NN,...", help="of the GPUs that will run them, or all"
    )
    ahead.add_argument("--input-dtype", choices=INPUT_TYPES, default="float32", help="of the waveforms (default: float32)")
    ahead.add_argument("--gradient", action="store_true", help="also the kernel of the gradient")
    ahead.add_argument(
        "--frontend",
        nargs="+",
        metavar="NAME",
        help="instead of a transform, all kernels of these front-ends, with and without lengths; see flashmel frontends",
    )
    ahead.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="instead of one transform, those of a JSON file: a list of objects with arguments of flashmel.MelSpectrogram, or "
        "with frontend and its options, and input_dtype and gradient",
    )
    ahead.set_defaults(db=False)

    warm = commands.add_parser(
        "warm",
        help="compile a transform's or front-end's kernels into the cache, also without a GPU",
        description="Compile what a transform or front-ends need, for GPUs that need not be here, as in a container's build.",
        allow_abbrev=False,
        parents=[ahead],
    )
    warm.set_defaults(run=_warm)

    bundles = commands.add_parser("bundle", help="kernels in a folder, for machines without a compiler").add_subparsers(
        required=True, metavar="ACTION"
    )
    build = bundles.add_parser("build", help="compile a transform's kernels into a new folder", allow_abbrev=False, parents=[ahead])
    build.add_argument("-o", "--output", required=True, metavar="DIR", help="a new or empty folder; it may be zipped afterwards")
    build.set_defaults(run=_bundle_build)
    listed = bundles.add_parser("list", help="verify a bundle and list its kernels, accepted or rejected and why")
    listed.add_argument("bundle", metavar="BUNDLE", help="folder, zip file or https address")
    listed.add_argument("--arch", type=_architectures, metavar="sm_NN,...", help="of the GPUs meant (default: this machine's)")
    listed.set_defaults(run=_bundle_list)

    cache = commands.add_parser("cache", help="what the kernel cache and downloaded bundles hold, or clear them")
    cache.add_argument("action", choices=("info", "clear"))
    cache.set_defaults(run=_cache)

    doctor = commands.add_parser("doctor", help="what was found, and whether the fused CUDA path is available and why")
    doctor.add_argument("--n-fft", type=int, metavar="N", help="also which path this size takes, and why")
    doctor.add_argument("--hop-length", type=int, metavar="N", help="with --n-fft (default: half of it)")
    doctor.add_argument(
        "--arch", type=_architecture, metavar="sm_NN", help="with --n-fft: the GPU's (default: this machine's, else all)"
    )
    doctor.set_defaults(run=_doctor)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status (see ``flashmel mel --help``)."""
    try:
        args = _parser().parse_args(argv)
        return args.run(args)
    except SystemExit as end:  # argparse: 0 after --help and --version, 2 after a usage error
        return int(end.code or 0)
    except _Failure as failure:
        print(f"flashmel: error: {failure}", file=sys.stderr)
        return failure.status
    except KeyboardInterrupt:
        print("flashmel: interrupted", file=sys.stderr)
        return 130
