#!/usr/bin/env python3
"""Measure flashmel against torchaudio on this machine, print a table and write every figure as JSON.

    python scripts/bench.py                          # the GPU cases -> benchmarks/<gpu>.json
    python scripts/bench.py --device cpu             # the CPU cases -> benchmarks/<cpu>.json
    python scripts/bench.py --against DIR            # also another flashmel, installed with pip install --target DIR
    python scripts/bench.py --sizes                  # also one batch at many n_fft
    python scripts/bench.py --training               # also forward + backward of the float32 cases
    python scripts/bench.py --host                   # also what a call costs the host: eager, recording, compiled, replayed
    python scripts/bench.py --in-situ                # also the share of a model's time that the transform in front of it takes
    python scripts/bench.py --sweep                  # instead: try other plans at each n_fft -> flashmel/measured.json

GPU time is that of CUDA-graph replays (no launch gaps), the inputs rotated so that they do not lie in the L2 cache;
`warm` repeats one input. `floor` is the time a copy of as many bytes as the input and the output takes, by the copy bandwidth
measured in the same run. `tol` is the largest difference from torchaudio's float32 result as a fraction of the contract
(1e-4 + 1e-4 * |expected|; 1e-2 for a half-precision output), `tol64` the same from float64 arithmetic on the same float32 window
and filterbank, `error` the largest error against the latter relative to the frame's own peak. A case that fails, or where `tol` or
`tol64` is above 1, is recorded with the reason; the rest continue and the exit status is 1.

`training` is one step to the waveform's gradient, `torch.autograd.grad(mel(x), x, g)` with a random g, by the same clocks;
`forward` is the same run's time without a gradient, `backward` the step's less that. `MiB` is what a step requests at its peak
beyond x, g, the mel spectrogram and the gradient. `error` is the gradient's largest, on the first and the last row, against
float64 autograd of flashmel.reference on the same tables, relative to the peak; `equal` whether all runs gave the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
if TYPE_CHECKING:
    from flashmel import testing
else:  # by path: with --against, `flashmel` is another package, but the clock and the metrics stay ours
    _spec = importlib.util.spec_from_file_location("flashmel_testing", ROOT / "flashmel" / "testing.py")
    testing = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(testing)

Transform = Callable[[Tensor], Tensor]
Figures = dict[str, Any]
# For --sizes and --sweep: powers of two, windows of 10 to 100 ms at usual rates, and what has awkward factors.
# fmt: off
SIZES = (
    64, 100, 118, 128, 160, 200, 240, 256, 320, 400, 441, 480, 500, 512, 600, 640, 768, 800, 882, 960, 1000, 1024, 1102, 1200, 1280,
    1323, 1536, 1600, 1764, 1920, 2048, 2205, 2400, 2646, 3072, 3200, 4000, 4096, 4410, 4800, 6144, 6615, 8192, 9600, 12000, 16384,
)
# fmt: on


@dataclass(frozen=True)
class Case:
    """One configuration and size. ``published_us`` is flashmel 0.1.0 at its best frames per block on one H200."""

    name: str
    label: str
    kwargs: dict[str, Any]
    batch: int
    samples: int
    target_us: float | None = None
    published_us: float | None = None
    in_dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype = torch.float32

    @property
    def tolerance(self) -> float:
        return 1e-4 if self.out_dtype == torch.float32 else 1e-2

    @property
    def input_bytes(self) -> int:
        return self.batch * self.samples * self.in_dtype.itemsize


def _mel(sample_rate: int, n_fft: int, hop_length: int, n_mels: int, **more: int) -> dict[str, Any]:
    return {"sample_rate": sample_rate, "n_fft": n_fft, "hop_length": hop_length, "n_mels": n_mels, **more}


WHISPER = _mel(16000, 400, 160, 128)
GPU_CASES = (
    Case("whisper", "whisper 400/160, 128 mels", WHISPER, 32, 480000, 45, 112.7),
    Case("whisper-pcm", "whisper, int16 in, float16 out", WHISPER, 32, 480000, 43, 109.9, torch.int16, torch.float16),
    Case("asr", "asr 512/160 win 400, 80 mels", _mel(16000, 512, 160, 80, win_length=400), 32, 320000, 40, 93.3),
    Case("speech", "speech 1024/256, 80 mels", _mel(16000, 1024, 256, 80), 32, 160000, 27, 54.4),
    Case("small", "small 64/16, 40 mels", _mel(16000, 64, 16, 40), 64, 16000, 8, 15.8),
    Case("music-2048", "music 2048/512, 128 mels, 44.1k", _mel(44100, 2048, 512, 128), 16, 441000, 50, 110),
    Case("music-4096", "music 4096/1024, 256 mels, 44.1k", _mel(44100, 4096, 1024, 256), 16, 441000, 50, 100),
    Case("huge", "huge 16384/4096, 256 mels, 44.1k", _mel(44100, 16384, 4096, 256), 16, 441000, 130, 263),
    Case("clip", "one clip 400/160, 80 mels", _mel(16000, 400, 160, 80), 1, 480000, 5, 6.8),
    Case("second", "one second 400/160, 80 mels", _mel(16000, 400, 160, 80), 1, 16000),
    Case("seconds", "4096 clips of one second", _mel(16000, 400, 160, 80), 4096, 16000),
)
CPU_CASES = (
    Case("cpu-batch", "8 × 30 s, 400/160, 128 mels", WHISPER, 8, 480000),
    Case("cpu-clips", "256 × 1 s, 400/160, 128 mels", WHISPER, 256, 16000),
)
CASES = {case.name: case for case in GPU_CASES + CPU_CASES}
# What --training measures of a run's cases.
TRAINING = ("whisper", "asr", "speech", "small", "music-2048", "music-4096", "huge", "clip", "cpu-batch", "cpu-clips")
GRADIENT_TOLERANCE = 1e-5  # of the gradient's peak; float32 rounding leaves less than 1e-6


HOST = ("second", "clip", "whisper")


def size_case(n_fft: int) -> Case:
    """One batch at a size: hops of a quarter, 128 filters."""
    return Case(f"n_fft-{n_fft}", f"{n_fft}", _mel(16000, n_fft, n_fft // 4, 128), 32, 160000)


# ---- what is measured ----


def make_input(case: Case, device: str) -> Tensor:
    """Full-scale white noise, new on every call."""
    noise = torch.rand(case.batch, case.samples, device=device) * 2 - 1
    return (noise * 32767).round().to(torch.int16) if case.in_dtype == torch.int16 else noise.to(case.in_dtype)


def make_mel_gradient(case: Case, device: str) -> Tensor:
    """White noise in the shape of the mel spectrogram."""
    return torch.randn(case.batch, case.kwargs["n_mels"], 1 + case.samples // case.kwargs["hop_length"], device=device)


def gradient(transform: Transform, x: Tensor, mel_gradient: Tensor) -> Tensor:
    """The gradient of x by a forward and a backward pass."""
    x = x.detach().requires_grad_()  # a leaf of this stream: a graph that is captured must not meet another's
    return torch.autograd.grad(transform(x), x, mel_gradient)[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # filters without a bin: both libraries say so
        yield


def flashmel_transform(case: Case, device: str, package: Path) -> Transform:
    """``flashmel.MelSpectrogram`` of the package in folder ``package``, by the arguments that every version knows."""
    import flashmel

    if Path(flashmel.__file__).resolve().parents[1] != package.resolve():
        raise ImportError("`import flashmel` found another package than the one to measure")
    half: dict[str, Any] = {} if case.out_dtype == torch.float32 else {"dtype": case.out_dtype}
    with _quiet():
        return flashmel.MelSpectrogram(**case.kwargs, **half).to(device)


def torchaudio_transform(case: Case, device: str, dtype: torch.dtype = torch.float32) -> Transform:
    """torchaudio's transform in ``dtype``, on its float32 tables, with the conversions that the case's dtypes ask for."""
    import torchaudio

    with _quiet():
        mel = torchaudio.transforms.MelSpectrogram(**case.kwargs).to(device, dtype)
    prepare: Transform = (lambda x: x.to(dtype) / 32768) if case.in_dtype == torch.int16 else (lambda x: x.to(dtype))
    out_dtype = case.out_dtype if dtype == torch.float32 else dtype
    return lambda x: mel(prepare(x)).to(out_dtype)


def check(case: Case, transform: Transform, device: str) -> Figures:
    """Errors of the transform on fresh input, and whether it wrote every element of an output full of NaN."""
    x = make_input(case, device)
    out, reached = testing.poisoned_call(lambda: transform(x))
    float32 = torchaudio_transform(replace(case, out_dtype=torch.float32), device)(x)
    float64 = torchaudio_transform(case, device, torch.float64)(x)
    return {
        "tolerance_fraction": testing.tolerance_fraction(out, float32, case.tolerance, case.tolerance),
        "tolerance_fraction_float64": testing.tolerance_fraction(out, float64, case.tolerance, case.tolerance),
        "peak_error": testing.peak_error(out, float64),
        "written": not bool(out.isnan().any()),
        "poisoned": reached,
        "output_bytes": out.numel() * out.element_size(),
    }


def fault_of(checked: Figures) -> str | None:
    """What is wrong with the figures of :func:`check`, or None."""
    if not checked["written"]:
        return "the output has elements that are NaN: not written, or wrong"
    for key, of in (("tolerance_fraction_float64", "float64"), ("tolerance_fraction", "torchaudio")):
        if not checked[key] <= 1:
            return f"differs from {of} by {checked[key]:.3g} times the tolerance"
    return None


def measure(case: Case, transforms: dict[str, Transform], device: str, quick: bool, package: Path) -> dict[str, Figures]:
    """Time and extra memory of each transform, all on the same inputs and taking turns."""
    figures: dict[str, Figures] = {name: {} for name in transforms}
    if device == "cpu":
        x = make_input(case, device)
        times = testing.cpu_time([_bind(t, x) for t in transforms.values()], repeats=3 if quick else 15)
        with ThreadPoolExecutor() as pool:  # after the timing: here only the memory counts
            extra = list(pool.map(lambda name: worker("memory", [case], device, quick, package, impl=name)["bytes"], transforms))
        for name, time_us, extra_bytes in zip(transforms, times, extra, strict=True):
            figures[name] = {"wall_us": time_us, "extra_bytes": extra_bytes}
        return figures
    inputs = [make_input(case, device) for _ in range(input_sets(case))]
    replays = 5 if quick else 25
    for _ in range(2):  # twice, taking turns: what differs between the two is noise
        for name, transform in transforms.items():
            figures[name].setdefault("gpu_us_runs", []).append(
                testing.gpu_time([_bind(transform, x) for x in inputs], replays=replays)
            )
    for name, transform in transforms.items():
        call = _bind(transform, inputs[0])
        figures[name]["gpu_us"] = sum(figures[name]["gpu_us_runs"]) / 2
        figures[name]["gpu_warm_us"] = testing.gpu_time(call, replays=replays)
        figures[name]["host_us"] = testing.host_time(call, device, repeats=5 if quick else 15)
        figures[name]["extra_bytes"] = testing.extra_memory(call, device)
    return figures


def input_sets(case: Case) -> int:
    """How many inputs do not lie in the L2 cache together."""
    return min(64, math.ceil(3 * torch.cuda.get_device_properties(0).L2_cache_size / case.input_bytes))


def _bind(transform: Transform, x: Tensor) -> Callable[[], Tensor]:
    return lambda: transform(x)


def check_training(transform: Transform, x: Tensor, mel_gradient: Tensor, exact: Tensor, runs: int) -> Figures:
    """Error of the gradient on the first and the last row, where it should be ``exact``, and whether all runs are equal."""
    first = gradient(transform, x, mel_gradient)
    bits = first.view(torch.int32)
    return {
        "gradient_error": float((first[_ends(x)] - exact).abs().max() / exact.abs().max()),
        "bit_equal": all(torch.equal(gradient(transform, x, mel_gradient).view(torch.int32), bits) for _ in range(runs - 1)),
    }


def _ends(x: Tensor) -> list[int]:
    return sorted({0, len(x) - 1})


def exact_gradient(module: Any, x: Tensor, mel_gradient: Tensor) -> Tensor:
    """The gradient by float64 autograd of the plain path, on the module's tables."""
    from flashmel import reference

    tables = module.spectrogram.window.double(), module.mel_scale.fb.double()
    return gradient(lambda x: reference.features(x, *tables, module.spec, None), x.double(), mel_gradient.double())


def measure_training(case: Case, transforms: dict[str, Transform], entry: Figures, device: str, quick: bool, package: Path) -> None:
    """Add the error, extra memory and time of each transform's training step to the entry: a failure leaves what there is."""
    sets = 1 if device == "cpu" else input_sets(case)
    inputs = [(make_input(case, device), make_mel_gradient(case, device)) for _ in range(sets)]
    x, g = inputs[0]
    exact = exact_gradient(transforms["flashmel"], x[_ends(x)], g[_ends(x)])
    for name, transform in transforms.items():
        entry[name] |= check_training(transform, x, g, exact, entry["runs"])
    if device == "cpu":
        forward = [_bind(t, x) for t in transforms.values()]  # again: a CPU's time drifts by more than a forward pass takes
        steps = [partial(gradient, t, x, g) for t in transforms.values()]
        times = testing.cpu_time([*forward, *steps], repeats=3 if quick else 15)
        with ThreadPoolExecutor() as pool:  # after the timing, as in measure()
            extra = pool.map(
                lambda name: worker("memory", [case], device, quick, package, impl=name, training=True)["bytes"], transforms
            )
        for name, forward_us, step_us, extra_bytes in zip(transforms, times[:2], times[2:], extra, strict=True):
            entry[name] |= {"forward_us": forward_us, "step_us": step_us, "extra_bytes": extra_bytes}
        return
    for name, transform in transforms.items():
        mel_bytes = g.numel() * g.element_size()
        entry[name]["extra_bytes"] = testing.extra_memory(partial(gradient, transform, x, g), device) - mel_bytes
    for _ in range(2):  # taking turns, as in measure()
        for name, transform in transforms.items():
            steps = [partial(gradient, transform, *pair) for pair in inputs]
            times = entry[name].setdefault("step_us_runs", [])
            times.append(testing.gpu_time(steps, calls=6, replays=5 if quick else 15))
            entry[name]["step_us"] = statistics.mean(times)


def measure_host(case: Case, transforms: dict[str, Transform], quick: bool) -> dict[str, Figures]:
    """Host microseconds of a call, see :func:`visit_host`: medians of visits a second apart, for a processor has slow phases."""
    visits = []
    for visit in range(1 if quick else 7):
        time.sleep(1.0 if visit else 0.0)
        visits.append(visit_host(case, transforms, quick))
    return {who: {way: statistics.median(v[who][way] for v in visits) for way in ways} for who, ways in visits[0].items()}


def visit_host(case: Case, transforms: dict[str, Transform], quick: bool) -> dict[str, Figures]:
    """Host microseconds of a call: eager, eager with autograd recording, by replay of a CUDA graph."""
    x = make_input(case, "cuda")
    leaf = x.detach().requires_grad_() if x.is_floating_point() else None
    figures: dict[str, Figures] = {}
    for name, transform in transforms.items():
        time_of = partial(testing.host_time, device="cuda", repeats=5 if quick else 15)
        with torch.no_grad():
            figures[name] = {"eager_us": time_of(_bind(transform, x))}
        if leaf is not None:
            figures[name]["autograd_us"] = time_of(_bind(transform, leaf))
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.no_grad():
            with torch.cuda.stream(stream):  # workspaces must exist before the capture, on its stream
                transform(x)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                transform(x)
        figures[name]["replay_us"] = time_of(graph.replay)
    return figures


def measure_compiled_host(case: Case, transform: Transform, quick: bool) -> float:
    """The same of a call in a compiled graph. To be measured last: torch.compile slows down all of a process's later calls."""
    with torch.no_grad():
        call = _bind(torch.compile(transform, fullgraph=True), make_input(case, "cuda"))
        return testing.host_time(call, device="cuda", repeats=5 if quick else 15)


IN_SITU = Case("in-situ", "16 kHz, 400/160, 80 mels", _mel(16000, 400, 160, 80), 32, 160000)


def encoders() -> dict[str, torch.nn.Module]:
    """Two small models on (batch, 80, frames): convolutions alone, and a transformer behind two of them."""
    nn = torch.nn

    def convolutions(channels: int, strided: int, plain: int) -> list[torch.nn.Module]:
        sizes = [80, *[channels] * (strided + plain)]
        layers = [nn.Conv1d(a, b, 3, stride=2 if i < strided else 1, padding=1) for i, (a, b) in enumerate(pairwise(sizes))]
        return [part for layer in layers for part in (layer, nn.GELU())]

    class Transpose(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mT

    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
    return {
        "convolutional": nn.Sequential(*convolutions(256, 2, 4)),
        "transformer": nn.Sequential(
            *convolutions(256, 2, 0), Transpose(), nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        ),
    }


def in_situ_step(transform: Transform, model: torch.nn.Module, train: bool) -> Callable[[], None]:
    """A step of a model behind the transform, in bfloat16 autocast."""
    x, optimizer = make_input(IN_SITU, "cuda"), torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        with torch.no_grad(), torch.profiler.record_function("front-end"):
            features = (transform(x) + 1e-5).log()
        with torch.set_grad_enabled(train), torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(features)
        if train:
            out.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def profile_step(step: Callable[[], None], steps: int) -> Figures:
    """Wall time of a step, its kernels' time, and that of the kernels under "front-end"; all in microseconds."""

    def run(count: int) -> None:
        for _ in range(count):
            step()
        torch.cuda.synchronize()

    run(5)
    walls = []
    for _ in range(7):
        start = time.perf_counter()
        run(steps)
        walls.append((time.perf_counter() - start) / steps * 1e6)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run(steps)
    cpu, cuda = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    averages = profile.key_averages()
    gpu_us = sum(e.self_device_time_total for e in averages if e.device_type == cuda and e.key != "front-end") / steps
    (front_end,) = (e for e in averages if e.device_type == cpu and e.key == "front-end")
    return {"wall_us": statistics.median(walls), "gpu_us": gpu_us, "front_end_us": front_end.device_time_total / steps}


def measure_in_situ(transforms: dict[str, Transform], steps: int) -> list[Figures]:
    """What share of a model's GPU time the transform in front of it takes."""
    entries = []
    for model_name, model in encoders().items():
        model = model.cuda()
        for mode in ("forward", "training step"):
            entry: Figures = {"model": model_name, "mode": mode}
            for name, transform in transforms.items():
                entry[name] = profile_step(in_situ_step(transform, model, train=mode != "forward"), steps)
            entries.append(entry)
    return entries


def copy_bandwidth(device: str, quick: bool) -> float:
    """GB/s, read and written bytes together, of a copy far larger than any cache."""
    n = (1 << 32) if device == "cuda" else (1 << 26)
    source = torch.rand(n // 4, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    if device == "cuda":
        # Not by graph replay: a graph copies with the copy engine, which is slower than the kernel of an eager copy.
        times = []
        for _ in range(8):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            copy()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end))
        time_us = statistics.median(times[2:])
    else:
        (time_us,) = testing.cpu_time([copy], repeats=3 if quick else 7)
    return 2 * n / time_us * 1e-3


def peak_rss(case: Case, transform: Transform, training: bool) -> int:
    """Bytes of resident memory that one call needs at its peak beyond what the process holds, its input and its output; or that a
    training step needs beyond those, the mel spectrogram and both gradients.

    An upper bound by what importing briefly held beyond that; run it in a process of its own, since a peak never falls.
    """
    x, g = make_input(case, "cpu"), make_mel_gradient(case, "cpu") if training else None

    def call(x: Tensor) -> Tensor:
        frames = 1 + x.shape[-1] // case.kwargs["hop_length"]
        return transform(x) if g is None else gradient(transform, x, g[: len(x), :, :frames])

    call(x[:1, :16000])  # libraries, threads and plans
    before = _memory_kib("VmRSS")
    out = call(x)
    held = out.numel() * out.element_size() + (0 if g is None else g.numel() * g.element_size())
    return max(0, (_memory_kib("VmHWM") - before) * 1024 - held)


def _memory_kib(field: str) -> int:
    # VmHWM is this process's own peak; ru_maxrss may hold its parent's, whose pages the child shared until exec.
    with contextlib.suppress(OSError):
        found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        if found:
            return int(found[1])
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage // 1024 if sys.platform == "darwin" else usage


# ---- subprocesses: another package, another environment, or a peak of their own ----


def worker(
    mode: str,
    cases: Sequence[Case],
    device: str,
    quick: bool,
    package: Path,
    impl: str = "flashmel",
    training: bool = False,
    timeout: float = 400,
) -> Any:
    """Run this script's ``--worker mode`` and return the JSON it printed; RuntimeError with the end of its log."""
    names = ",".join(case.name for case in cases)
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", mode, "--impl", impl, "--cases", names]
    command += ["--device", device, "--package", str(package), *(["--quick"] if quick else [])]
    command += ["--training"] if training else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no result within {timeout:g} s") from None
    if done.returncode:
        raise RuntimeError(_no_paths(done.stderr.strip()[-1000:]) or f"exit status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def run_worker(args: argparse.Namespace, cases: Sequence[Case]) -> Any:
    """The body of a subprocess started by :func:`worker`."""
    if args.worker == "memory":
        (case,) = cases
        own = args.impl == "flashmel"
        transform = flashmel_transform(case, "cpu", args.package) if own else torchaudio_transform(case, "cpu")
        return {"bytes": peak_rss(case, transform, args.training)}

    def one(case: Case) -> Figures:
        transform = flashmel_transform(case, args.device, args.package)
        if args.worker == "warm":
            transform(make_input(replace(case, batch=1), args.device))
            return {}
        measured = measure(case, {"flashmel": transform}, args.device, args.quick, args.package)["flashmel"]
        return {**check(case, transform, args.device), **measured}

    results = {}
    for case in cases:
        try:
            results[case.name] = one(case)
        except Exception as error:  # one case's failure is a result
            results[case.name] = {"error": describe(error)}
    import flashmel

    return {"version": getattr(flashmel, "__version__", None), "cases": results}


def warm_cache(cases: Sequence[Case], device: str, package: Path) -> None:
    """Compile what another package needs into its cache, in parallel. Failures are left to the measurement, which names them."""

    def one(case: Case) -> None:
        with contextlib.suppress(Exception):
            worker("warm", [case], device, True, package, timeout=120)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(one, cases))


def compile_ahead(kernels: Sequence[tuple[Any, Any, str, str]]) -> None:
    """Compile (spec, plan, input type, output type) into our own cache, on all cores."""
    from flashmel import plan
    from flashmel.jit import driver
    from flashmel.jit.source import Specialisation

    arch = plan.architecture(*torch.cuda.get_device_capability())
    every = [Specialisation(s, p, arch, i, o, in_shared) for s, p, i, o in kernels for in_shared in (True, False)]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(driver.cubin, every, chunksize=2))


def kernel_of(case: Case) -> tuple[Any, Any, str, str]:
    """What :func:`compile_ahead` takes, for a case."""
    from flashmel import plan
    from flashmel.spec import StftSpec

    kwargs, names = case.kwargs, [str(dtype).removeprefix("torch.") for dtype in (case.in_dtype, case.out_dtype)]
    spec = StftSpec(kwargs["n_fft"], kwargs.get("win_length", kwargs["n_fft"]), kwargs["hop_length"])
    arch = plan.architecture(*torch.cuda.get_device_capability())
    return spec, plan.make_plan(spec, arch, case.in_dtype.itemsize), names[0], names[1]


def backward_kernels(cases: Sequence[Case], package: Path) -> Iterator[tuple[Any, Any, str, str]]:
    """What :func:`compile_ahead` takes, for the gradients of float32 cases; one without a kernel is left to the measurement."""
    from flashmel import plan
    from flashmel.tables import entries_per_bin

    arch = plan.architecture(*torch.cuda.get_device_capability())
    for case in cases:
        module: Any = flashmel_transform(case, "cpu", package)
        entries = entries_per_bin(module.mel_scale.fb.double().numpy())
        with contextlib.suppress(plan.UnsupportedError):
            yield module.spec, plan.make_backward_plan(module.spec, arch, module.n_mels, entries), "float32", "float32"


# ---- the record ----


def describe(error: BaseException) -> str:
    return _no_paths(f"{type(error).__name__}: {error}")[:2000]


def _no_paths(text: str) -> str:
    return text.replace(str(ROOT), ".").replace(sys.prefix, "<python>").replace(str(Path.home()), "~")


def _output_of(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _version(distribution: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def _nvrtc_version() -> str | None:
    found = _version("nvidia-cuda-nvrtc") or _version("nvidia-cuda-nvrtc-cu12")
    if found is None:
        with contextlib.suppress(Exception):
            from cuda.bindings import nvrtc

            found = ".".join(map(str, nvrtc.nvrtcVersion()[1:]))
    return found


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def describe_run(device: str, quick: bool) -> Figures:
    """Everything that identifies the run: machine, versions, date, commit, seed."""
    import flashmel

    machine: Figures = {"cpu": _cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        machine |= {
            "gpu": gpu.name,
            "sm_count": gpu.multi_processor_count,
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "l2_bytes": gpu.L2_cache_size,
            "memory_bytes": gpu.total_memory,
            "driver": driver.splitlines()[0] if driver else None,
        }
    commit = _output_of("git", "rev-parse", "--verify", "HEAD")
    changed = _output_of("git", "status", "--porcelain", "--", "flashmel")
    return {
        "schema": 1,
        "device": device,
        "quick": quick,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine,
        "versions": {
            "flashmel": flashmel.__version__,
            "commit": commit,
            "uncommitted_changes": bool(changed) if commit else None,
            "torch": torch.__version__,
            "torchaudio": _version("torchaudio"),
            "cuda": torch.version.cuda,
            "nvrtc": _nvrtc_version() if device == "cuda" else None,
            "python": platform.python_version(),
        },
        "seed": torch.seed() % 2**63,
        "fpb_override": os.environ.get("FLASHMEL_FPB"),
    }


def default_out(machine: Figures) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", machine.get("gpu", f"{machine['cpu']} {machine['cores']} cores").lower()).strip("-")
    return ROOT / "benchmarks" / f"{slug}.json"


def write_json(path: Path, record: Figures) -> None:
    """Non-finite figures become the strings "inf" and "nan", which JSON has no numbers for."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, list):
            return [plain(v) for v in value]
        if isinstance(value, float):
            return float(f"{value:.6g}") if math.isfinite(value) else str(value)
        return value

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plain(record), indent=1, allow_nan=False) + "\n")


# ---- the runs ----


def run_case(case: Case, device: str, quick: bool, package: Path, bandwidth: float) -> Figures:
    """All figures of one case; never raises for a fault of the measured code, which ends in ``error``."""
    entry: Figures = {
        "name": case.name,
        "label": case.label,
        "kwargs": case.kwargs,
        "batch": case.batch,
        "samples": case.samples,
        "in_dtype": str(case.in_dtype).removeprefix("torch."),
        "out_dtype": str(case.out_dtype).removeprefix("torch."),
        "tolerance": case.tolerance,
        "target_us": case.target_us,
        "published_us": case.published_us,
    }
    try:
        transforms = {"flashmel": flashmel_transform(case, device, package), "torchaudio": torchaudio_transform(case, device)}
        for name, transform in transforms.items():
            entry[name] = check(case, transform, device)
        entry["floor_us"] = (case.input_bytes + entry["flashmel"]["output_bytes"]) / bandwidth * 1e-3
        for name, figures in measure(case, transforms, device, quick, package).items():
            entry[name] |= figures
        if fault := fault_of(entry["flashmel"]):
            entry["error"] = fault
    except Exception as error:  # the rest of the cases must still run
        entry["error"] = describe(error)
    _empty_cache(device)
    return entry


def _empty_cache(device: str) -> None:
    if device == "cuda":
        with contextlib.suppress(RuntimeError):  # after a kernel's fault every CUDA call raises
            torch.cuda.empty_cache()


def run_training(case: Case, measured: Figures, device: str, quick: bool, package: Path) -> Figures:
    """Figures of a training step; ``measured`` are those that :func:`run_case` gave in the same run."""
    entry: Figures = {"name": case.name, "label": case.label, "batch": case.batch, "samples": case.samples}
    entry["runs"] = 5 if quick or device == "cpu" else 100
    try:
        transforms = {"flashmel": flashmel_transform(case, device, package), "torchaudio": torchaudio_transform(case, device)}
        for name in transforms:
            entry[name] = {"forward_us": measured.get(name, {}).get("gpu_us")}
        measure_training(case, transforms, entry, device, quick, package)
        for name in transforms:
            forward_us = entry[name]["forward_us"]
            entry[name]["backward_us"] = None if forward_us is None else entry[name]["step_us"] - forward_us
        own = entry["flashmel"]
        if not own["gradient_error"] <= GRADIENT_TOLERANCE:
            entry["error"] = f"the gradient differs from float64 by {own['gradient_error']:.3g} of its peak"
        elif not own["bit_equal"]:
            entry["error"] = "the gradient changes from run to run"
    except Exception as error:  # the other cases must still run
        entry["error"] = describe(error)
    _empty_cache(device)
    return entry


def benchmark(args: argparse.Namespace, cases: Sequence[Case]) -> int:
    record = describe_run(args.device, args.quick)
    out = args.out or default_out(record["machine"])
    trained = [case for case in cases if args.training and case.name in TRAINING]
    if args.device == "cuda":
        forward = [kernel_of(case) for case in [*cases, *(map(size_case, SIZES) if args.sizes else ())]]
        compile_ahead([*forward, *backward_kernels(trained, args.package)])
    if args.against:
        warm_cache(cases, args.device, args.against)
    record["copy_gb_per_s"] = copy_bandwidth(args.device, args.quick)
    record["cases"] = []
    for case in cases:
        record["cases"].append(run_case(case, args.device, args.quick, args.package, record["copy_gb_per_s"]))
        print(".", end="", file=sys.stderr, flush=True)
        write_json(out, record)  # after each case: a run stopped early leaves what it has
    print(file=sys.stderr)
    if args.against:
        try:
            other = worker("measure", cases, args.device, args.quick, args.against)
        except RuntimeError as error:
            other = {"version": None, "error": str(error), "cases": {}}
        record["against"] = {k: v for k, v in other.items() if k != "cases"}
        for entry in record["cases"]:
            entry["against"] = other["cases"].get(entry["name"], {"error": other.get("error", "no result")})
        write_json(out, record)
    if args.sizes:
        record["sizes"] = []
        for n_fft in SIZES:
            record["sizes"].append(run_size(n_fft, args.device, args.quick, args.package, record["copy_gb_per_s"]))
            print(".", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        write_json(out, record)
    if args.host:
        record["host"] = []
        for case in (CASES[name] for name in HOST):
            entry = {"name": case.name, "label": case.label, "batch": case.batch, "samples": case.samples}
            try:
                both = flashmel_transform(case, "cuda", args.package), torchaudio_transform(case, "cuda")
                entry |= measure_host(case, dict(zip(("flashmel", "torchaudio"), both, strict=True)), args.quick)
            except Exception as error:  # the other cases must still run
                entry["error"] = describe(error)
            record["host"].append(entry)
            write_json(out, record)
    if args.in_situ:
        both = flashmel_transform(IN_SITU, "cuda", args.package), torchaudio_transform(IN_SITU, "cuda")
        try:
            record["in_situ"] = measure_in_situ(dict(zip(("flashmel", "torchaudio"), both, strict=True)), steps=10)
        except Exception as error:  # what was measured before must stay
            print(f"in situ: {describe(error)}")
        write_json(out, record)
    if args.training:
        measured = {entry["name"]: entry for entry in record["cases"]}
        record["training"] = []
        for case in trained:
            record["training"].append(run_training(case, measured[case.name], args.device, args.quick, args.package))
            print(".", end="", file=sys.stderr, flush=True)
            write_json(out, record)
        print(file=sys.stderr)
    for entry in record.get("host", []):
        try:  # torchaudio's compiled transform is as slow as the eager one, and takes long to compile
            case = CASES[entry["name"]]
            transform = flashmel_transform(case, "cuda", args.package)
            entry["flashmel"]["compiled_us"] = measure_compiled_host(case, transform, args.quick)
            entry["compiled_relu_us"] = measure_compiled_host(case, torch.nn.ReLU(), args.quick)  # what is torch.compile's own
        except Exception as error:
            entry.setdefault("error", describe(error))
        write_json(out, record)
    print_results(record)
    print(f"written to {out}")
    return int(any("error" in entry for key in ("cases", "sizes", "host", "training") for entry in record.get(key, [])))


def run_size(n_fft: int, device: str, quick: bool, package: Path, bandwidth: float) -> Figures:
    """GPU time and error at one size, ours and torchaudio's."""
    case = size_case(n_fft)
    entry: Figures = {"n_fft": n_fft, "hop_length": n_fft // 4}
    try:
        transforms = {"flashmel": flashmel_transform(case, device, package), "torchaudio": torchaudio_transform(case, device)}
        inputs = [make_input(case, device) for _ in range(6)]
        for name, transform in transforms.items():
            checked = check(case, transform, device)
            calls = [_bind(transform, x) for x in inputs]
            entry[name] = {
                "gpu_us": testing.gpu_time(calls, calls=6, replays=5 if quick else 15),
                "peak_error": checked["peak_error"],
            }
            if name == "flashmel":
                entry["floor_us"] = (case.input_bytes + checked["output_bytes"]) / bandwidth * 1e-3
                if fault := fault_of(checked):
                    entry["error"] = fault
    except Exception as error:  # the other sizes must still run
        entry["error"] = describe(error)
    torch.cuda.empty_cache()
    return entry


def candidate_plans(n_fft: int) -> list[Any]:
    """Plans worth trying, the model's first: the cheapest factorisations of each kind, the two likeliest tiles of each."""
    from flashmel import plan

    spec, model, *_ = kernel_of(size_case(n_fft))
    arch, found = plan.architecture(*torch.cuda.get_device_capability()), [model]
    kinds: dict[tuple[bool, bool], list[Any]] = {}
    for factors in sorted(plan.factorisations(n_fft), key=lambda factors: factors.cost()):
        kinds.setdefault((factors.r2 > 1, factors.registers > 64), []).append(factors)
    for factors in itertools.chain.from_iterable(same[:3] for same in kinds.values()):
        tiles: dict[int, Any] = {}
        for frames in plan.FRAMES_PER_TILE:
            if layouts := plan.layouts(spec, arch, factors, frames, 4):
                tiles[frames] = max(layouts, key=plan.merit)
        found += sorted(tiles.values(), key=plan.merit)[:-3:-1]
    return list(dict.fromkeys(found))


def sweep(args: argparse.Namespace) -> int:
    """Time other plans than the model's at each size, and record those that are clearly faster as measured exceptions."""
    from flashmel import fused, plan

    plan.make_plan.cache_clear()
    with mock.patch.object(plan, "measured", lambda arch: {}):  # the model alone
        plans = {n_fft: candidate_plans(n_fft) for n_fft in SIZES}
    plan.make_plan.cache_clear()
    arch = plan.architecture(*torch.cuda.get_device_capability())
    compile_ahead([(kernel_of(size_case(n_fft))[0], p, "float32", "float32") for n_fft in SIZES for p in plans[n_fft]])
    exceptions, rows = {}, [["n_fft", "model µs", "best µs", "model", "best"]]
    inputs = [make_input(size_case(SIZES[0]), "cuda") for _ in range(4)]
    for n_fft, candidates in plans.items():
        transform = flashmel_transform(size_case(n_fft), "cuda", args.package)
        times = {}
        for candidate in candidates:
            fused._calls.clear()  # they recall the plan before
            with mock.patch.object(fused, "_plan", return_value=candidate), contextlib.suppress(fused.UnavailableError):
                times[candidate] = testing.gpu_time([_bind(transform, x) for x in inputs], calls=4, replays=5)
        model, best = candidates[0], min(times, key=lambda candidate: times[candidate])
        if times[best] < 0.98 * times[model]:
            exceptions[n_fft] = (best.r1, best.r2, best.r3, best.threads_per_frame, best.frames_per_tile)
        rows.append([str(n_fft), _number(times[model]), _number(times[best]), str(model), str(best)])
    print(_table(rows))
    out = args.out or ROOT / "flashmel" / "measured.json"
    record = json.loads(out.read_text()) if out.exists() else {}
    record[arch.name] = {**record.get(arch.name, {}), "machine": torch.cuda.get_device_name(), "plans": exceptions}
    text = json.dumps(record, indent=1)
    out.write_text(re.sub(r"\[[^\]]*\]", lambda plan: " ".join(plan[0].split()), text) + "\n")  # a plan a line
    print(f"written to {out}")
    return 0


# ---- printing ----


def _number(value: float | str | None, digits: int = 1) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.{digits}f}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first, *others = widths
    return "\n".join("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows)


def print_results(record: Figures) -> None:
    machine, gpu = record["machine"], record["device"] == "cuda"
    name, version = machine.get("gpu", machine["cpu"]), record["versions"]["flashmel"]
    print(f"{name}, copy {record['copy_gb_per_s']:.0f} GB/s; flashmel {version}; times in µs")
    header = ["case", "floor", "flashmel", "torchaudio", "ratio", "tol", "tol64", "error", "full", "MiB", "ta MiB"]
    extra = ["target", "publ.", "warm", "host", "ta host", "other"]
    rows = [[*header, *(extra if gpu else [])]]
    for entry in record["cases"]:
        own, ta, other = (entry.get(k, {}) for k in ("flashmel", "torchaudio", "against"))
        key = "gpu_us" if gpu else "wall_us"
        ratio = _number(ta[key] / own[key], 2) if key in own and key in ta else "-"
        mib = [_number(f["extra_bytes"] / 2**20, 2) if "extra_bytes" in f else "-" for f in (own, ta)]
        full = "-" if "written" not in own else "NO" if not own["written"] else "yes" if own["poisoned"] or not gpu else "?"
        row = [entry["name"], _number(entry.get("floor_us")), _number(own.get(key)), _number(ta.get(key)), ratio]
        row += [_number(own.get(k), 3) for k in ("tolerance_fraction", "tolerance_fraction_float64")]
        row += [f"{own['peak_error']:.1e}" if "peak_error" in own else "-", full, *mib]
        if gpu:
            row += [_number(entry["target_us"]), _number(entry["published_us"]), _number(own.get("gpu_warm_us"))]
            row += [_number(own.get("host_us")), _number(ta.get("host_us")), _number(other.get("gpu_us"))]
        rows.append(row)
    print(_table(rows))
    if "sizes" in record:
        sizes = [["n_fft", "floor", "flashmel", "torchaudio", "ratio", "error", "ta error"]]
        for entry in record["sizes"]:
            own, ta = entry.get("flashmel", {}), entry.get("torchaudio", {})
            ratio = _number(ta["gpu_us"] / own["gpu_us"], 2) if own and ta else "-"
            errors = [f"{f['peak_error']:.1e}" if f else "-" for f in (own, ta)]
            sizes.append(
                [
                    str(entry["n_fft"]),
                    *(_number(t) for t in (entry.get("floor_us"), own.get("gpu_us"), ta.get("gpu_us"))),
                    ratio,
                    *errors,
                ]
            )
        print(_table(sizes))
    if record.get("host"):
        print(_table(_host_rows(record["host"])))
    if record.get("in_situ"):
        print(_table(_in_situ_rows(record["in_situ"])))
    for entry in record.get("host", []):
        if "error" in entry:
            print(f"{entry['name']}, host: {entry['error']}")
    if record.get("training"):
        print(_table(_training_rows(record["training"])))
    for entry in record.get("training", []):
        if "error" in entry:
            print(f"{entry['name']}, training: {entry['error']}")
    for entry in record.get("sizes", []):
        if "error" in entry:
            print(f"n_fft {entry['n_fft']}: {entry['error']}")
    for entry in record["cases"]:
        for who, text in ((entry["name"], entry.get("error")), (f"{entry['name']}, other", entry.get("against", {}).get("error"))):
            if text:
                print(f"{who}: {text}")


def _host_rows(entries: Sequence[Figures]) -> list[list[str]]:
    ways = ("eager_us", "autograd_us", "compiled_us", "replay_us")
    rows = [["host", *(f"{who}{way.removesuffix('_us')}" for way in ways for who in ("", "ta "))]]
    for entry in entries:
        both = [entry.get(who, {}) for who in ("flashmel", "torchaudio")]
        rows.append([entry["name"], *(_number(figures.get(way)) for way in ways for figures in both)])
    return rows


def _in_situ_rows(entries: Sequence[Figures]) -> list[list[str]]:
    rows = [["in situ", *(f"{who}{what}" for what in ("front-end", "all kernels", "step") for who in ("", "ta "))]]
    for entry in entries:
        both = entry["flashmel"], entry["torchaudio"]
        rows.append(
            [f"{entry['model']}, {entry['mode']}", *(_number(f[k]) for k in ("front_end_us", "gpu_us", "wall_us") for f in both)]
        )
    return rows


def _training_rows(entries: Sequence[Figures]) -> list[list[str]]:
    header = ["training", "step", "torchaudio", "ratio", "forward", "× fwd", "backward", "MiB", "ta MiB"]
    rows = [[*header, "error", "ta error", "equal", "ta equal"]]
    for entry in entries:
        both = own, ta = entry.get("flashmel", {}), entry.get("torchaudio", {})
        step, ta_step, forward = own.get("step_us"), ta.get("step_us"), own.get("forward_us")
        row = [entry["name"], _number(step), _number(ta_step), _number(ta_step / step if step and ta_step else None, 2)]
        row += [_number(forward), _number(step / forward if step and forward else None, 2), _number(own.get("backward_us"))]
        row += [_number(f["extra_bytes"] / 2**20, 2) if "extra_bytes" in f else "-" for f in both]
        row += [f"{f['gradient_error']:.1e}" if "gradient_error" in f else "-" for f in both]
        rows.append([*row, *({True: "yes", False: "NO", None: "-"}[f.get("bit_equal")] for f in both)])
    return rows


# ---- command line ----


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    names = args.cases.split(",") if args.cases else [c.name for c in (GPU_CASES if args.device == "cuda" else CPU_CASES)]
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise SystemExit(f"unknown case {', '.join(unknown)}; known: {', '.join(CASES)}")
    for name in names:
        case = CASES[name]
        if args.quick and args.device == "cpu":
            case = replace(case, batch=max(1, case.batch // 8), samples=min(case.samples, 160000))
        yield case


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cases", metavar="A,B", help=f"of {', '.join(CASES)}; default: those of the device")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file; default: benchmarks/<device>.json")
    parser.add_argument("--sizes", action="store_true", help="also one batch at many n_fft (GPU)")
    parser.add_argument(
        "--host", action="store_true", help=f"also the host's time of a call in other ways, of {', '.join(HOST)} (GPU)"
    )
    parser.add_argument("--in-situ", action="store_true", help="also in front of two small models (GPU)")
    parser.add_argument("--training", action="store_true", help=f"also forward + backward, of the cases {', '.join(TRAINING)}")
    parser.add_argument(
        "--sweep", action="store_true", help="instead: try other plans, and write the faster to flashmel/measured.json"
    )
    parser.add_argument("--against", type=Path, metavar="DIR", help="also measure the flashmel installed in DIR (GPU)")
    parser.add_argument(
        "--quick", action="store_true", help="fewer repeats; on the CPU also an eighth of the batch, 160000 samples at most"
    )
    parser.add_argument("--package", type=Path, default=ROOT, help=argparse.SUPPRESS)  # folder that holds flashmel/
    parser.add_argument("--worker", choices=("measure", "memory", "warm"), help=argparse.SUPPRESS)
    parser.add_argument("--impl", choices=("flashmel", "torchaudio"), default="flashmel", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is available; use --device cpu")
    if args.device == "cpu" and (args.sizes or args.sweep or args.against or args.host or args.in_situ):
        parser.error("--sizes, --sweep, --host, --in-situ and --against need --device cuda")
    args.package = args.package.resolve()
    args.against = args.against and args.against.resolve()
    sys.path.insert(0, str(args.package))
    cases = list(_cases(args))
    if args.worker:
        print(json.dumps(run_worker(args, cases)))
        return 0
    return sweep(args) if args.sweep else benchmark(args, cases)


if __name__ == "__main__":
    sys.exit(main())
