#!/usr/bin/env python3
"""Measure flashmel against torchaudio on this machine, print a table and write every figure as JSON.

    python scripts/bench.py                          # the GPU cases -> benchmarks/<gpu>.json
    python scripts/bench.py --device cpu             # the CPU cases -> benchmarks/<cpu>.json
    python scripts/bench.py --against DIR            # also another flashmel, installed with pip install --target DIR
    python scripts/bench.py --sweep --cases whisper  # GPU time over frames per block, instead of the benchmark

GPU time is that of CUDA-graph replays (no launch gaps), the inputs rotated so that they do not lie in the L2 cache;
`warm` repeats one input. `floor` is the time a copy of as many bytes as the input and the output takes, by the copy bandwidth
measured in the same run. `tol` is the largest difference from torchaudio's float32 result as a fraction of the contract
(1e-4 + 1e-4 * |expected|; 1e-2 for a half-precision output), `tol64` the same from float64 arithmetic on the same float32 window
and filterbank, `error` the largest error against the latter relative to the frame's own peak. A case that fails, or where `tol` or
`tol64` is above 1, is recorded with the reason; the rest continue and the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
SWEEP = (1, 2, 4, 8, 16, 32)


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
)
CPU_CASES = (
    Case("cpu-batch", "8 × 30 s, 400/160, 128 mels", WHISPER, 8, 480000),
    Case("cpu-clips", "256 × 1 s, 400/160, 128 mels", WHISPER, 256, 16000),
)
CASES = {case.name: case for case in GPU_CASES + CPU_CASES}


# ---- what is measured ----


def make_input(case: Case, device: str) -> Tensor:
    """Full-scale white noise, new on every call."""
    noise = torch.rand(case.batch, case.samples, device=device) * 2 - 1
    return (noise * 32767).round().to(torch.int16) if case.in_dtype == torch.int16 else noise.to(case.in_dtype)


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
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    inputs = [make_input(case, device) for _ in range(min(64, math.ceil(3 * l2 / case.input_bytes)))]
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


def _bind(transform: Transform, x: Tensor) -> Callable[[], Tensor]:
    return lambda: transform(x)


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


def peak_rss(case: Case, transform: Transform) -> int:
    """Bytes of resident memory that one call needs at its peak beyond what the process holds, its input and its output.

    An upper bound by what importing briefly held beyond that; run it in a process of its own, since a peak never falls.
    """
    x = make_input(case, "cpu")
    transform(x[:1, :16000])  # libraries, threads and plans
    before = _memory_kib("VmRSS")
    out = transform(x)
    return max(0, (_memory_kib("VmHWM") - before) * 1024 - out.numel() * out.element_size())


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
    fpb: int | None = None,
    timeout: float = 400,
) -> Any:
    """Run this script's ``--worker mode`` and return the JSON it printed; RuntimeError with the end of its log."""
    names = ",".join(case.name for case in cases)
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", mode, "--impl", impl, "--cases", names]
    command += ["--device", device, "--package", str(package), *(["--quick"] if quick else [])]
    env = os.environ if fpb is None else {**os.environ, "FLASHMEL_FPB": str(fpb)}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
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
        return {
            "bytes": peak_rss(case, flashmel_transform(case, "cpu", args.package) if own else torchaudio_transform(case, "cpu"))
        }

    def one(case: Case) -> Figures:
        transform = flashmel_transform(case, args.device, args.package)
        if args.worker == "warm":
            transform(make_input(replace(case, batch=1), args.device))
            return {}
        measured = measure(case, {"flashmel": transform}, args.device, args.quick, args.package)["flashmel"]
        return {**check(case, transform, args.device), **measured}

    def sweep(case: Case) -> Figures:
        transform = flashmel_transform(case, args.device, args.package)
        if fault := fault_of(check(case, transform, args.device)):
            raise ArithmeticError(fault)
        x = make_input(case, args.device)
        return {"gpu_us": testing.gpu_time(_bind(transform, x), replays=5 if args.quick else 25)}

    results = {}
    for case in cases:
        try:
            results[case.name] = (sweep if args.worker == "sweep" else one)(case)
        except Exception as error:  # one case's failure is a result
            results[case.name] = {"error": describe(error)}
    import flashmel

    return {"version": getattr(flashmel, "__version__", None), "cases": results}


def warm_caches(jobs: Sequence[tuple[Case, Path, int | None]], device: str) -> None:
    """Compile what the cases need into the on-disk cache, in parallel. Failures are left to the measurement, which names them."""

    def one(job: tuple[Case, Path, int | None]) -> None:
        with contextlib.suppress(Exception):
            worker("warm", [job[0]], device, True, job[1], fpb=job[2], timeout=120)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(one, jobs))


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
            "mathdx": _version("nvidia-mathdx") if device == "cuda" else None,
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
    if device == "cuda":
        with contextlib.suppress(RuntimeError):  # after a kernel's fault every CUDA call raises
            torch.cuda.empty_cache()
    return entry


def benchmark(args: argparse.Namespace, cases: Sequence[Case]) -> int:
    record = describe_run(args.device, args.quick)
    out = args.out or default_out(record["machine"])
    if args.device == "cuda":
        packages = [args.package, *([args.against] if args.against else [])]
        warm_caches([(case, package, None) for case in cases for package in packages], args.device)
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
    print_results(record)
    print(f"written to {out}")
    return int(any("error" in entry for entry in record["cases"]))


def sweep(args: argparse.Namespace, cases: Sequence[Case]) -> int:
    """Warm GPU time of each case at each FLASHMEL_FPB, in a process each; a value that fails is kept as text."""
    warm_caches([(case, args.package, fpb) for fpb in SWEEP for case in cases], args.device)
    record = {**describe_run(args.device, args.quick), "sweep": {case.name: {} for case in cases}}
    for fpb in SWEEP:
        try:
            results = worker("sweep", cases, args.device, args.quick, args.package, fpb=fpb)["cases"]
        except RuntimeError as error:
            results = {case.name: {"error": str(error)} for case in cases}
        for name, result in results.items():
            record["sweep"][name][str(fpb)] = result
    if args.out:
        write_json(args.out, record)
    rows = []
    for case in cases:
        results = record["sweep"][case.name]
        timed = {fpb: r["gpu_us"] for fpb, r in results.items() if "gpu_us" in r}
        best = min(timed, key=lambda fpb: timed[fpb]) if timed else "-"
        rows.append([case.name, *(_number(r.get("gpu_us")) for r in results.values()), best, _number(case.target_us)])
    print(_table([["GPU µs at frames/block", *map(str, SWEEP), "best", "target"], *rows]))
    failures = [(case.name, fpb, r["error"]) for case in cases for fpb, r in record["sweep"][case.name].items() if "error" in r]
    for name, fpb, text in failures:
        print(f"{name} at {fpb}: {text.splitlines()[-1] if text else text}")
    # A value that does not fit is an answer; anything else is a fault.
    return int(any(not text.startswith("ValueError") for _, _, text in failures))


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
    for entry in record["cases"]:
        for who, text in ((entry["name"], entry.get("error")), (f"{entry['name']}, other", entry.get("against", {}).get("error"))):
            if text:
                print(f"{who}: {text}")


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
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file; default: benchmarks/<device>.json (--sweep: none)")
    parser.add_argument("--sweep", action="store_true", help="time FLASHMEL_FPB = " + ", ".join(map(str, SWEEP)) + " instead")
    parser.add_argument("--against", type=Path, metavar="DIR", help="also measure the flashmel installed in DIR (GPU)")
    parser.add_argument(
        "--quick", action="store_true", help="fewer repeats; on the CPU also an eighth of the batch, 160000 samples at most"
    )
    parser.add_argument("--package", type=Path, default=ROOT, help=argparse.SUPPRESS)  # folder that holds flashmel/
    parser.add_argument("--worker", choices=("measure", "memory", "sweep", "warm"), help=argparse.SUPPRESS)
    parser.add_argument("--impl", choices=("flashmel", "torchaudio"), default="flashmel", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is available; use --device cpu")
    if args.device == "cpu" and (args.sweep or args.against):
        parser.error("--sweep and --against need --device cuda")
    args.package = args.package.resolve()
    args.against = args.against and args.against.resolve()
    sys.path.insert(0, str(args.package))
    cases = list(_cases(args))
    if args.worker:
        print(json.dumps(run_worker(args, cases)))
        return 0
    return sweep(args, cases) if args.sweep else benchmark(args, cases)


if __name__ == "__main__":
    sys.exit(main())
