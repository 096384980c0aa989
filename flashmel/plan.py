"""The launch plan: a pure function of what is computed and where, to every constant of the kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from .spec import StftSpec

MIN_N_FFT, MAX_N_FFT = 64, 16384
MAX_THREADS = 512
_REGISTERS = 65536  # of a multiprocessor
# Complex values a thread holds, and the registers that its code needs with them, without spills. Measured on an H200: half the
# registers and twice the threads win at every n_fft whose factors allow it.
_HELD_AND_REGISTERS = ((20, 64), (32, 96))


class UnsupportedError(ValueError):
    """The fused kernel does not cover this configuration; the message says why."""


@dataclass(frozen=True)
class Architecture:
    """What a plan needs to know of a GPU. ``shared_per_*`` in bytes, net of what the driver reserves."""

    compute: int  # 90 for sm_90
    shared_per_block: int
    shared_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int

    @property
    def name(self) -> str:
        """As NVRTC calls it."""
        return f"sm_{self.compute}"


_KIB = 1024
# Compute capability -> KiB of shared memory a block, an SM; threads, blocks an SM. (CUDA C++ Programming Guide, "Compute
# Capabilities".)
_LIMITS = {
    75: (64, 64, 1024, 16),
    80: (163, 164, 2048, 32),
    86: (99, 100, 1536, 16),
    87: (163, 164, 1536, 16),
    89: (99, 100, 1536, 24),
    90: (227, 228, 2048, 32),
    100: (227, 228, 2048, 32),
    103: (227, 228, 2048, 32),
    110: (227, 228, 1536, 24),
    120: (99, 100, 1536, 24),
    121: (99, 100, 1536, 24),
}


def architecture(major: int, minor: int) -> Architecture:
    """The architecture of a compute capability.

    Raises:
        UnsupportedError: older than 7.5, or unknown.
    """
    compute = 10 * major + minor
    if compute not in _LIMITS:
        known = ", ".join(f"{c // 10}.{c % 10}" for c in _LIMITS)
        raise UnsupportedError(f"compute capability {major}.{minor} is not supported by the fused kernel (it knows {known})")
    shared_per_block, shared_per_sm, threads, blocks = _LIMITS[compute]
    return Architecture(compute, shared_per_block * _KIB, shared_per_sm * _KIB, threads, blocks)


@dataclass(frozen=True)
class LaunchPlan:
    """Constants of one kernel; the names are those of the generated ``Config`` (see kernel/fft.cuh for their meaning)."""

    r1: int
    r2: int
    r3: int
    frames_per_block: int
    threads: int
    min_blocks: int
    skew: int
    sample_stride: int
    row_stride: int
    frame_stride: int
    shared_bytes: int

    @property
    def threads_per_frame(self) -> int:
        """Threads that work on one frame's transform."""
        return self.threads // self.frames_per_block

    @property
    def bin_slices(self) -> int:
        """Lanes over which the projection spreads the bins of a filter."""
        return _bin_slices(self.frames_per_block)


@lru_cache(maxsize=1024)
def make_plan(spec: StftSpec, arch: Architecture, frames_per_block: int | None = None, few_tiles: bool = False) -> LaunchPlan:
    """The plan for a transform on an architecture.

    Args:
        spec: the transform.
        arch: the GPU.
        frames_per_block: a power of two up to 32 to use instead of the chosen one.
        few_tiles: plan for the time of one block, not of many: for launches that leave multiprocessors idle.

    Raises:
        UnsupportedError: no plan exists; the message says why.
        ValueError: ``frames_per_block`` is not possible here.
    """
    n_fft = spec.n_fft
    if n_fft % 2 or not MIN_N_FFT <= n_fft <= MAX_N_FFT:
        raise UnsupportedError(f"the fused kernel covers even n_fft from {MIN_N_FFT} to {MAX_N_FFT}, not {n_fft}")
    if max(spec.hop_length, abs(spec.pad)) >= 2**31:
        raise UnsupportedError(f"the fused kernel takes hop_length and pad below 2**31, not {spec.hop_length} and {spec.pad}")
    factors = _factorise(n_fft // 2)
    if factors is None:
        largest, _ = _HELD_AND_REGISTERS[-1]
        raise UnsupportedError(
            f"n_fft = {n_fft}: {n_fft // 2} is not r1 * r2 * r3 with r1, r2 up to {largest} and r3 up to {largest // 2}"
        )
    if frames_per_block is not None:
        if frames_per_block not in _FRAMES_PER_BLOCK:
            raise ValueError(f"frames per block must be a power of two from 1 to 32, got {frames_per_block}")
        plan = _lay_out(spec, arch, factors, frames_per_block)
        if not _fits(plan, arch):
            raise ValueError(
                f"{frames_per_block} frames per block do not fit: {plan.threads} threads and {plan.shared_bytes} bytes of shared "
                f"memory, of {MAX_THREADS} and {arch.shared_per_block}"
            )
        return plan
    plans = [_lay_out(spec, arch, factors, frames) for frames in _FRAMES_PER_BLOCK]
    fitting = [plan for plan in plans if _fits(plan, arch)]
    if not fitting:
        raise UnsupportedError(
            f"n_fft = {n_fft} needs {plans[-1].shared_bytes} bytes of shared memory, {arch.name} has {arch.shared_per_block}"
        )
    # As many frames in flight on an SM as possible; of equals the largest tile, which loads the fewest samples twice.
    plan = max(fitting, key=lambda plan: (plan.min_blocks * plan.frames_per_block, plan.frames_per_block))
    if few_tiles and 2 * plan.threads * factors.registers <= _REGISTERS:
        # Twice the threads halve the time of all but the transform. The tile stays, and with it the order of every sum: a
        # waveform's result is the same bit for bit in any batch.
        doubled = replace(factors, threads_per_frame=2 * factors.threads_per_frame)
        return replace(_lay_out(spec, arch, doubled, plan.frames_per_block), min_blocks=1)
    return plan


_FRAMES_PER_BLOCK = (32, 16, 8, 4, 2, 1)
_MAX_GRID_X, _MAX_GRID_YZ = 2**31 - 1, 2**16 - 1


def launch_grid(plan: LaunchPlan, frames: int, rows: int) -> tuple[int, int, int]:
    """The grid for ``rows`` waveforms of ``frames`` frames each.

    Raises:
        UnsupportedError: more blocks than a grid has.
    """
    tiles = -(-frames // plan.frames_per_block)
    y = min(rows, _MAX_GRID_YZ)
    z = -(-rows // y)
    if tiles > _MAX_GRID_X or z > _MAX_GRID_YZ:
        raise UnsupportedError(f"{rows} waveforms of {frames} frames are more than one launch can hold")
    return tiles, y, z


def _fits(plan: LaunchPlan, arch: Architecture) -> bool:
    return plan.shared_bytes <= arch.shared_per_block and plan.threads <= MAX_THREADS


@dataclass(frozen=True)
class _Factors:
    """n_fft / 2 as r1 * r2 * r3 (r2 = 1 is a transform of two passes), and what a thread then has to do."""

    r1: int
    r2: int
    r3: int
    threads_per_frame: int
    registers: int

    def cost(self) -> float:
        """Thread time of one frame in arbitrary units: idle threads count, and so does a pass through shared memory."""

        def passes(items: int, radix: int, times: int = 1) -> float:
            return -(-items // self.threads_per_frame) * (times * radix * (2 * math.log2(radix) + 8) + 40)

        m = self.r1 * self.r2 * self.r3
        middle = passes(m // self.r2, self.r2) if self.r2 > 1 else 0.0
        return self.threads_per_frame * (passes(m // self.r1, self.r1) + middle + passes((m // self.r3 + 1) // 2, self.r3, times=2))


@lru_cache(maxsize=1024)
def _factorise(m: int) -> _Factors | None:
    """The cheapest factorisation of ``m`` among those that need the fewest registers."""
    for held, registers in _HELD_AND_REGISTERS:
        found = [
            _Factors(r1, r2, r3, _threads_per_frame(m, r1, r3, held), registers)
            for r3 in range(2, held // 2 + 1)  # a thread holds two rows
            for r2 in range(1, held + 1)
            for r1 in [m // (r2 * r3)]
            if r1 * r2 * r3 == m and 2 <= r1 <= held
        ]
        if found:
            return min(found, key=_Factors.cost)
    return None


def _threads_per_frame(m: int, r1: int, r3: int, held: int) -> int:
    """As few as hold the columns of a frame, then its row pairs."""
    columns, pairs = m // r1, (m // r3 + 1) // 2
    return max(-(-columns // (held // r1)), -(-pairs // (held // (2 * r3))))


def _bin_slices(frames: int) -> int:
    """Eight lanes project a filter, each up to four of the tile's frames; the rest of them divide its bins."""
    return 8 * min(frames, 4) // frames


def _odd_multiple(at_least: int, unit: int) -> int:
    """The smallest odd multiple of ``unit`` (a power of two) that is at least ``at_least``."""
    multiple = -(-at_least // unit)
    return unit * (multiple + 1 - multiple % 2)


def _lay_out(spec: StftSpec, arch: Architecture, factors: _Factors, frames: int) -> LaunchPlan:
    """Strides that keep a warp's shared-memory accesses in different banks, and what they add up to.

    A warp is ``frames`` frames by 32 / frames threads of each. Accesses of 8 bytes are served by half warps from 16 banks
    of 8 bytes: with n threads a frame side by side, the frames' stride must be an odd multiple of n.
    """
    r1, r2, r3 = factors.r1, factors.r2, factors.r3
    hop, m = spec.hop_length, spec.n_fft // 2
    side_by_side = max(1, 16 // frames)
    pitch = min(hop, spec.n_fft)  # of frames in shared memory: gaps between them are not loaded
    skew = 0 if pitch % 2 or frames == 1 else 2 * _odd_multiple(pitch // 2, side_by_side) - pitch
    sample_stride = pitch + skew
    samples = 4 * ((frames - 1) * sample_stride + spec.n_fft + (spec.n_fft - 1) // pitch * skew)

    row = r2 * r3

    def exchange(row_stride: int) -> int:
        size = (r1 - 1) * row_stride + row
        return size if frames == 1 else _odd_multiple(size, side_by_side)

    row_stride = row + 1 - row % 2
    if 8 * frames * exchange(row_stride) > arch.shared_per_block:
        row_stride = row  # bank conflicts, but it fits (n_fft 16384 in 64 KiB)
    shared_bytes = max(samples, 8 * frames * exchange(row_stride), 4 * frames * (m + 2 * _bin_slices(frames)))

    threads = -(-factors.threads_per_frame * frames // 32) * 32
    min_blocks = min(
        _REGISTERS // (threads * factors.registers),
        arch.shared_per_sm // (shared_bytes + _KIB),
        arch.threads_per_sm // threads,
        arch.blocks_per_sm,
    )
    return LaunchPlan(
        r1=r1,
        r2=r2,
        r3=r3,
        frames_per_block=frames,
        threads=threads,
        min_blocks=max(1, min_blocks),
        skew=skew,
        sample_stride=sample_stride,
        row_stride=row_stride,
        frame_stride=exchange(row_stride),
        shared_bytes=shared_bytes,
    )
