"""Error metrics and timing helpers of the tests and the benchmark. Imports torch alone, so that it can judge any package."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]


def _difference(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both in float64 on one device, and |actual - expected|: 0 where NaN meets NaN or Inf its like, inf where only one is."""
    if actual.shape != expected.shape:
        raise AssertionError(f"shapes differ: actual {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    a = actual.detach().double()
    e = expected.detach().to(a.device).double()
    same = (a == e) | (a.isnan() & e.isnan())
    return a, e, torch.where(same, 0.0, (a - e).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _tolerances(e: Tensor, difference: Tensor, atol: float, rtol: float) -> Tensor:
    # 0/0 (exact, no tolerance) is 0; inf/inf (a finite value where inf was expected) is inf.
    excess = (difference / (atol + rtol * e.abs())).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return torch.where(difference == 0, 0.0, excess)


def tolerance_fraction(actual: Tensor, expected: Tensor, atol: float = 1e-4, rtol: float = 1e-4) -> float:
    """Largest ``|actual - expected| / (atol + rtol * |expected|)``: :func:`assert_close` passes at 1 or less."""
    _, e, difference = _difference(actual, expected)
    return float(_tolerances(e, difference, atol, rtol).max()) if e.numel() else 0.0


def assert_close(actual: Tensor, expected: Tensor, atol: float = 1e-4, rtol: float = 1e-4) -> None:
    """Assert ``|actual - expected| <= atol + rtol * |expected|``; NaN must meet NaN, and Inf the same Inf.

    Dtypes and devices may differ: the comparison is in float64 on the device of ``actual``.

    Raises:
        AssertionError: with the number of violations, the worst coordinate and both values there; or the two shapes.
    """
    a, e, difference = _difference(actual, expected)
    if e.numel() == 0:
        return
    excess = _tolerances(e, difference, atol, rtol)
    violations = int((excess > 1).sum())
    if violations == 0:
        return
    worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    raise AssertionError(
        f"{violations} of {e.numel()} values differ by more than atol={atol:g} + rtol={rtol:g} * |expected|; "
        f"worst at {worst}: actual {a[worst].item():.9g}, expected {e[worst].item():.9g}, "
        f"{excess[worst].item():.3g} times the tolerance"
    )


def peak_error(actual: Tensor, expected: Tensor) -> float:
    """Largest error of any frame, relative to that frame's own peak; a loud neighbour cannot hide a quiet frame's error.

    A frame whose peak is 0 must be exactly 0, else the result is inf; so it is where NaN or Inf does not meet its like.

    Shape:
        - actual, expected: (..., n_mels, frames).
    """
    _, e, difference = _difference(actual, expected)
    if e.numel() == 0:
        return 0.0
    peak = torch.where(e.isfinite(), e.abs(), 0.0).amax(dim=-2)
    error = difference.amax(dim=-2)
    return float(torch.where(error == 0, 0.0, error / peak).max())


def poisoned_call(fn: Callable[[], Tensor]) -> tuple[Tensor, bool]:
    """Call ``fn`` so that its output lies in memory full of NaN; an element that it does not write shows as NaN.

    Returns:
        (output, reached): ``reached`` is whether the allocator gave the output a poisoned block (it does on CUDA when ``fn``
        allocates its output first; on the CPU it may not).
    """
    like = fn()
    poison = [torch.full_like(like, torch.nan, memory_format=torch.contiguous_format) for _ in range(4)]
    blocks = {block.data_ptr() for block in poison} | {like.data_ptr()}
    like.fill_(torch.nan)
    del like, poison  # freed on the stream that fn allocates from: the next call gets them back
    out = fn()
    return out, out.data_ptr() in blocks


def gpu_time(fn: Call | Sequence[Call], *, calls: int = 20, replays: int = 25) -> float:
    """GPU microseconds per call, without the host's launch gaps: the median over replays of a CUDA graph of ``calls`` calls.

    Args:
        fn: what to time; or several callables, captured in turn (all of them, also when more than ``calls``). Give one
            per input set, more bytes together than the L2 cache holds, when one set would stay in the cache.
        calls: calls in the graph, rounded up to a multiple of the number of callables.
        replays: timed replays.

    Outputs are dropped within the capture, so that each call may reuse the block of the one before.
    """
    fns: list[Call] = [fn] if callable(fn) else list(fn)
    calls = -(-calls // len(fns)) * len(fns)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, plans and workspaces must exist before the capture, on its stream
        for f in fns:
            f()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            fns[i % len(fns)]()
    warm_until = time.perf_counter() + 0.03  # an idle GPU needs milliseconds to raise its clocks
    while time.perf_counter() < warm_until:
        graph.replay()
        torch.cuda.synchronize()
    # All replays are queued at once: the GPU runs them back to back, and the first one's launch latency is one interval
    # of many, which the median leaves out.
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)) * 1e3 / calls


def host_time(fn: Call, device: torch.device | str, *, calls: int = 20, repeats: int = 15) -> float:
    """Host microseconds per eager call: how long ``fn`` keeps the caller, its GPU work left running. Median over repeats.

    ``calls`` times the launches of one call must stay below the launch queue's depth (about 1000 on CUDA): a full queue
    blocks the host, and the GPU's time would be measured. On the CPU it is the wall time of the call.
    """
    synchronize = torch.cuda.synchronize if torch.device(device).type == "cuda" else (lambda: None)
    for _ in range(3):
        fn()
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        times.append((time.perf_counter() - start) / calls * 1e6)
    synchronize()
    return statistics.median(times)


def cpu_time(fns: Sequence[Call], *, repeats: int = 7) -> list[float]:
    """Wall microseconds per call of each callable, the median over rounds in which all take turns.

    Interleaved, so that a busy neighbour or a changing clock meets all of them; the order turns round every time.
    """
    times: list[list[float]] = [[] for _ in fns]
    for f in fns:
        f()
    order = list(range(len(fns)))
    for _ in range(repeats):
        for i in order:
            start = time.perf_counter()
            fns[i]()
            times[i].append((time.perf_counter() - start) * 1e6)
        order.reverse()
    return [statistics.median(t) for t in times]


def extra_memory(fn: Callable[[], Tensor], device: torch.device | str = "cuda") -> int:
    """Bytes that a warm call of ``fn`` requests from torch's CUDA allocator at its peak, beyond what was held before it and
    beyond the bytes of its output: 0 for a call that allocates its output alone.

    Counts requested bytes, not the allocator's rounding; memory taken past the allocator (contexts, code, local memory) and
    what only the first call allocates (plans, tables) are not seen.
    """
    fn()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    out = fn()
    torch.cuda.synchronize(device)
    peak = torch.cuda.memory_stats(device)["requested_bytes.all.peak"]
    return int(peak - before - out.numel() * out.element_size())
