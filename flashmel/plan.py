"""The launch plan: a pure function of what is computed and where, to every constant of the kernel."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.resources import files

from .spec import StftSpec

MAX_N_FFT = 16384
MAX_THREADS = 1024  # of a block
_MAX_TEAM_THREADS = 512
_MAX_TEAMS = 16  # named barriers of a block
_MAX_WORK = 2**31 - 2**20  # tiles or segments of a launch: a team counts past the last by less than 2**20
_REGISTERS = 16384  # of a quarter of a multiprocessor, to which every fourth warp of a block belongs
# Complex values a thread holds, and the registers that its code needs with them, without spills. Measured on an H200: half the
# registers and twice the threads win at every n_fft whose factors allow it.
_HELD_AND_REGISTERS = ((20, 64), (25, 80), (32, 96), (40, 128), (64, 200))
_HELD_AND_REGISTERS_BACK = ((10, 64), (16, 80), (20, 96), (32, 128), (64, 255))  # the same of the backward kernel


class UnsupportedError(ValueError):
    """The fused kernel does not cover this configuration; the message says why."""


@dataclass(frozen=True)
class Architecture:
    """What a plan needs to know of a GPU."""

    compute: int  # 90 for sm_90
    shared_per_block: int  # bytes

    @property
    def name(self) -> str:
        """As NVRTC calls it."""
        return f"sm_{self.compute}"


# Compute capability -> KiB of shared memory a block. (CUDA C++ Programming Guide, "Compute Capabilities".)
_SHARED = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
ARCHITECTURES = tuple(Architecture(compute, 1024 * kib) for compute, kib in _SHARED.items())


def architecture(major: int, minor: int) -> Architecture:
    """The architecture of a compute capability.

    Raises:
        UnsupportedError: older than 7.5, or unknown.
    """
    for arch in ARCHITECTURES:
        if arch.compute == 10 * major + minor:
            return arch
    known = ", ".join(f"{arch.compute // 10}.{arch.compute % 10}" for arch in ARCHITECTURES)
    raise UnsupportedError(f"compute capability {major}.{minor} is not supported by the fused kernel (it knows {known})")


@dataclass(frozen=True)
class LaunchPlan:
    """Constants of one kernel; the names are those of the generated ``Config``. An entry is 16 bytes of shared memory."""

    paired: bool  # a frame is a transform of pairs of samples: n_fft is even
    r1: int  # the transform's points are r1 * r2 * r3: see fft.cuh
    r2: int
    r3: int
    frames_per_tile: int
    threads: int  # of a team
    teams: int  # of a block; one block runs on each multiprocessor
    prefetch: bool  # a tile's samples have a place of their own, and arrive while the tile before is transformed
    factors_in_shared: bool  # window, twiddle and separation factors are copied to shared memory at the start
    chunk: int  # samples to copy at a time
    skew: int  # unused places behind every hop of samples
    sample_stride: int  # from a frame to the next: of its samples,
    row_stride: int
    frame_stride: int  # and of its spectrum in complex numbers; row_stride: from a row of it to the next
    samples_entries: int  # where a team's spectra begin
    sums_begin: int  # where, in entries, the sums of its frames' samples are, if the prologue needs them
    team_entries: int
    shared_bytes: int  # of all that, for a block
    spare_bytes: int  # what is left for the mel filters

    def __str__(self) -> str:
        factors = " x ".join(str(r) for r in (self.r1, self.r2, self.r3) if r > 1)
        points = f"{factors} points" if factors else "1 point"
        frames = "1 frame" if self.frames_per_tile == 1 else f"{self.frames_per_tile} frames"
        crew = f"{self.teams} x {self.threads} threads, {self.shared_bytes / 1024:.0f} KiB of shared memory"
        return f"{points}, {frames} a tile, {crew}"

    @property
    def points(self) -> int:
        """Length of a frame's complex transform."""
        return self.r1 * self.r2 * self.r3

    @property
    def threads_per_frame(self) -> int:
        """Threads that work on one frame's transform."""
        return self.threads // self.frames_per_tile

    @property
    def bin_slices(self) -> int:
        """Lanes over which the projection spreads the bins of a filter."""
        return _bin_slices(self.frames_per_tile)

    @property
    def bin_groups(self) -> int:
        """Lanes over which the projection spreads the frames of a tile, up to four for each."""
        return self.frames_per_tile // min(self.frames_per_tile, 4)


@dataclass(frozen=True)
class BackwardPlan(LaunchPlan):
    """Constants of the kernel of the gradient: those of a transform, and what goes around it."""

    n_mels: int
    entries_per_bin: int  # of two filters: see tables.py, bin_table
    overlap: int  # frames before its own that reach into a hop
    mel_begin: int  # where a team's mel gradients begin, in entries,
    carry_begin: int  # and the sums that it carries from tile to tile


@lru_cache(maxsize=1024)
def make_plan(spec: StftSpec, arch: Architecture, sample_bytes: int = 4, frames_per_tile: int | None = None) -> LaunchPlan:
    """The plan for a transform on an architecture.

    Args:
        spec: the transform.
        arch: the GPU.
        sample_bytes: size of one sample of the waveform.
        frames_per_tile: a power of two up to 32 to use instead of the chosen one.

    Raises:
        UnsupportedError: no plan exists; the message says why.
        ValueError: ``frames_per_tile`` is not possible here.
    """
    n_fft, found = spec.n_fft, _supported(spec)
    if frames_per_tile is not None and frames_per_tile not in FRAMES_PER_TILE:
        raise ValueError(f"frames per tile must be a power of two from 1 to 32, got {frames_per_tile}")
    tiles: tuple[int, ...] = FRAMES_PER_TILE if frames_per_tile is None else (frames_per_tile,)
    choices = [(factors, tiles) for factors in found]
    if frames_per_tile is None and (exception := measured(arch.name).get(n_fft)):  # it may not fit with this hop
        choices.insert(0, (Factors.of(n_fft, *exception[:4]), exception[4:]))
    for factors, allowed in choices:
        if plans := [plan for frames in allowed for plan in layouts(spec, arch, factors, frames, sample_bytes)]:
            return max(plans, key=merit)
    if frames_per_tile is not None:
        raise ValueError(f"{frames_per_tile} frames per tile do not fit in a block of {arch.name} at n_fft = {n_fft}")
    raise _too_large(f"n_fft = {n_fft}", arch)


@lru_cache(maxsize=1024)
def make_backward_plan(
    spec: StftSpec, arch: Architecture, n_mels: int, entries_per_bin: int = 1, sample_bytes: int = 4
) -> BackwardPlan:
    """The plan for the gradient of a transform.

    Args:
        spec: the transform.
        arch: the GPU.
        n_mels: number of filters.
        entries_per_bin: half of the largest number of filters that share a bin.
        sample_bytes: size of one sample of the waveform.

    Raises:
        UnsupportedError: no plan exists; the message says why.
    """
    n_fft, found = spec.n_fft, _supported(spec)
    if spec.padded_mode == "circular" and spec.margin != spec.right_margin:  # each end would have to hold the other's margin
        raise UnsupportedError(f"the kernel of the gradient folds circular padding of equal margins, not of {spec.margins}")

    def best(factors: Factors, tiles: tuple[int, ...], threads: int | None = None) -> BackwardPlan | None:
        layouts = (backward_layouts(spec, arch, factors, frames, n_mels, entries_per_bin, sample_bytes) for frames in tiles)
        plans = (plan for plans in layouts for plan in plans if threads in (None, plan.threads_per_frame))
        return max(plans, key=backward_merit, default=None)

    exception = measured(arch.name, "backward_plans").get(n_fft)
    if exception and (plan := best(Factors.of(n_fft, *exception[:4]), exception[4:], exception[3])):
        return plan
    if exception := measured(arch.name).get(n_fft):
        found = [Factors.of(n_fft, *exception[:4]), *found]
    for factors in found:
        if plan := best(factors, FRAMES_PER_TILE):
            return plan
    raise _too_large(f"the gradient at n_fft = {n_fft} with {n_mels} filters", arch)


def backward_merit(plan: BackwardPlan) -> float:
    """:func:`merit` of the backward kernel: wide tiles, and 16 warps or more to hide latencies. Fitted like that one."""
    warps = min(16, plan.teams * plan.threads // 32)
    return math.sqrt(plan.frames_per_tile * warps) * (1.1 if plan.factors_in_shared else 1.0)


def _supported(spec: StftSpec) -> list[Factors]:
    """The factorisations of a transform that the kernels cover."""
    n_fft = spec.n_fft
    if not 2 <= n_fft <= MAX_N_FFT:
        raise UnsupportedError(f"the fused kernel covers n_fft from 2 to {MAX_N_FFT}, not {n_fft}")
    if max(spec.hop_length, abs(spec.pad)) >= 2**31:
        raise UnsupportedError(f"the fused kernel takes hop_length and pad below 2**31, not {spec.hop_length} and {spec.pad}")
    if spec.emphasises_waveform and (spec.remove_dc or spec.padded_mode != "constant" or spec.pad < 0):
        raise UnsupportedError(
            "the fused kernel pre-emphasises a waveform that is padded with zeros, not cropped, and whose frames keep their mean, "
            f"not with pad_mode={spec.padded_mode!r}, pad={spec.pad}, remove_dc={spec.remove_dc}"
        )
    found = _by_preference(n_fft)
    if not found:
        raise UnsupportedError(f"n_fft = {n_fft}: {n_fft if n_fft % 2 else n_fft // 2} is not a product of three numbers up to 64")
    return found


def _too_large(what: str, arch: Architecture) -> UnsupportedError:
    return UnsupportedError(
        f"{what} fits in no block of {arch.name}: {MAX_THREADS} threads, {4 * _REGISTERS} registers, "
        f"{arch.shared_per_block} bytes of shared memory"
    )


def merit(plan: LaunchPlan) -> float:
    """How fast a plan is next to others of the same factors: fitted to measurements on an H200 (PROJECT.md, kernel log).

    Frames in flight hide latencies; a wide tile reads the tables for more frames at once; factors in shared memory spare the L1
    cache; loading ahead hides the load, but with the factors in L1 the memory is worth more as cache.
    """
    in_shared = 1.12 if plan.factors_in_shared else 1.0
    ahead = 1.04 if plan.prefetch and plan.factors_in_shared else 0.99 if plan.prefetch else 1.0
    return math.sqrt(plan.teams * plan.frames_per_tile) * plan.frames_per_tile**0.2 * in_shared * ahead


FRAMES_PER_TILE = (32, 16, 8, 4, 2, 1)


@cache
def measured(arch: str, kind: str = "plans") -> dict[int, tuple[int, ...]]:
    """Plans that were measured to be faster than the model's: n_fft -> r1, r2, r3, threads per frame, frames per tile.

    ``scripts/bench.py --sweep`` writes them, with the machine. The few "backward_plans" were found by hand (PROJECT.md).
    """
    table = json.loads(files(__package__).joinpath("measured.json").read_text("utf-8"))
    return {int(n_fft): tuple(plan) for n_fft, plan in table.get(arch, {}).get(kind, {}).items()}


@dataclass(frozen=True)
class Launch:
    """The grid of a launch, and what teams need to know of its tiles."""

    blocks: int
    threads: int  # of a block
    tiles: int  # of a row
    all_tiles: int
    magic: int  # for a division by `tiles`
    shift: int
    step: int  # from a team's tile to its next one
    first_inner: int  # tiles of a row that touch no padding: the first, how many
    inner: int


def launch(spec: StftSpec, plan: LaunchPlan, n_samples: int, rows: int, multiprocessors: int) -> Launch:
    """The launch for ``rows`` waveforms of ``n_samples`` samples each.

    Raises:
        UnsupportedError: more tiles than the kernel counts.
    """
    frames = spec.output_frames(n_samples)
    tiles = -(-frames // plan.frames_per_tile)
    all_tiles = tiles * rows
    if all_tiles >= _MAX_WORK:
        raise UnsupportedError(f"{rows} waveforms of {frames} frames are more than one launch can hold")
    first, last = _unpadded(spec, plan, n_samples, plan.frames_per_tile * spec.hop_length)
    first = max(0, first)
    inner = max(0, min(last, tiles - 1) - first + 1)
    blocks, teams = _crew(plan, all_tiles, multiprocessors)
    magic, shift = division(tiles)
    return Launch(
        blocks=blocks,
        threads=teams * plan.threads,
        tiles=tiles,
        all_tiles=all_tiles,
        magic=magic,
        shift=shift,
        step=blocks * teams,
        first_inner=first,
        inner=inner,
    )


def _unpadded(spec: StftSpec, plan: LaunchPlan, n_samples: int, step: int) -> tuple[int, int]:
    """The first and the last t for which a tile that starts at sample t * step of the padded signal touches no padding."""
    # It takes the samples from t * step - before on, `span` of them; with a negative pad, only those inside `crop` count.
    before, crop = spec.margin + spec.pad, max(0, -spec.pad)
    span = (plan.frames_per_tile - 1) * spec.hop_length + spec.n_fft
    return -(-(before + crop) // step), (n_samples - crop - span + before) // step


def _crew(plan: LaunchPlan, work: int, multiprocessors: int) -> tuple[int, int]:
    """Blocks, and teams of a block, for so many pieces of work: on all multiprocessors before a second team on any."""
    blocks = min(work, multiprocessors)
    return blocks, min(plan.teams, -(-work // blocks))


def division(divisor: int) -> tuple[int, int]:
    """magic and shift: n // divisor == (n * magic // 2**32 + n) >> shift, for n below 2**31. (Granlund and Montgomery, 1994.)"""
    shift = (divisor - 1).bit_length()
    return 2**32 * (2**shift - divisor) // divisor + 1, shift


@dataclass(frozen=True)
class BackwardLaunch:
    """The grid of a launch of the gradient's kernel, and what teams need to know of their segments."""

    blocks: int
    threads: int  # of a block
    segments: int  # of a row
    all_segments: int
    magic: int  # for a division by `segments`
    shift: int
    stride: int  # from a team's segment to its next one
    tiles: int  # of a segment
    emitted: int  # hops from a segment to the next
    first_inner: int  # frames at which a tile may start that touches no padding: the first, how many
    inner: int
    edge_length: int  # positions at the ends of a row, see edges.cuh; 0 where the padding folds nothing
    fold: bool  # whether the teams fold them; else another kernel has to, after this one


def launch_backward(
    spec: StftSpec, plan: BackwardPlan, n_samples: int, rows: int, multiprocessors: int, ragged: bool = False
) -> BackwardLaunch:
    """The launch for the gradient of ``rows`` waveforms of ``n_samples`` samples each, or ``ragged``: of up to so many.

    Raises:
        UnsupportedError: more segments than the kernel counts.
    """
    frames, hop = plan.frames_per_tile, spec.hop_length
    padded = n_samples + 2 * spec.pad + spec.margin + max(0, spec.right_margin)
    slots = -(-padded // hop)
    # A segment begins with the frames that reach into it: few long ones do less twice, many use all teams to the end.
    overlap, workers = plan.overlap, multiprocessors * plan.teams

    def tiles_of(segments: int) -> int:
        return -(-(-(-max(1, slots - overlap) // segments) + overlap) // frames)

    rounds = range(max(1, rows // workers), rows // workers + 9)
    choices = {min(slots, max(1, n * workers // rows)) for n in rounds}
    tiles = tiles_of(min(choices, key=lambda segments: (-(-segments * rows // workers) * tiles_of(segments), segments)))
    segments = -(-max(1, slots - overlap) // (tiles * frames - overlap))
    emitted = -(-max(1, slots - overlap) // segments)
    if segments * rows >= _MAX_WORK:
        raise UnsupportedError(f"{rows} waveforms of {n_samples} samples are more than one launch can hold")
    first, last = _unpadded(spec, plan, n_samples, hop)
    blocks, teams = _crew(plan, segments * rows, multiprocessors)
    folds, right = spec.padded_mode != "constant", max(0, spec.right_margin)
    sides = 2 * spec.margin + 1, 2 * right + 1
    # The ends of a row are folded by the teams that computed them if each lies within a segment; but long ones better by many
    # blocks (n_fft 16384: 253 µs, 282 by the teams).
    shortest = min(emitted, slots - overlap - (segments - 1) * emitted) - 1  # in whole hops
    alone = padded >= sum(sides) and (segments == 1 or shortest * hop >= max(sides))
    few = max(spec.margin, right) <= 4 * plan.threads
    fold = folds and spec.pad_mode in ("reflect", "symmetric") and alone and few and not ragged
    magic, shift = division(segments)
    return BackwardLaunch(
        blocks=blocks,
        threads=teams * plan.threads,
        segments=segments,
        all_segments=segments * rows,
        magic=magic,
        shift=shift,
        stride=blocks * teams,
        tiles=tiles,
        emitted=emitted,
        first_inner=first,
        inner=max(0, last - first + 1),
        edge_length=min(padded, sum(sides)) if folds else 0,
        fold=fold,
    )


@dataclass(frozen=True)
class Factors:
    """The points of a frame's transform as r1 * r2 * r3 (r2 = 1 is a transform of two passes), and what a thread then has to do."""

    r1: int
    r2: int
    r3: int
    rows_held: int  # by a thread at a time
    threads_per_frame: int
    registers: int

    @classmethod
    def of(cls, n_fft: int, r1: int, r2: int, r3: int, threads_per_frame: int) -> Factors:
        """With the registers that so many threads need."""
        rows_held, columns, pairs = _work(n_fft, r1, r2, r3)
        most = max(r1 * -(-columns // threads_per_frame), r2, rows_held * r3 * -(-pairs // threads_per_frame))
        registers = next((registers for held, registers in _HELD_AND_REGISTERS if most <= held), 255)
        return cls(r1, r2, r3, rows_held, threads_per_frame, registers)

    def cost(self) -> float:
        """Thread time of one frame in arbitrary units: idle threads count, and so does a pass through shared memory."""

        def passes(items: int, radix: int, times: int = 1) -> float:
            return -(-items // self.threads_per_frame) * (times * radix * (2 * math.log2(radix) + 8) + 40)

        m = self.r1 * self.r2 * self.r3
        middle = passes(m // self.r2, self.r2) if self.r2 > 1 else 0.0
        return self.threads_per_frame * (
            passes(m // self.r1, self.r1) + middle + passes((m // self.r3 + 1) // 2, self.r3, times=self.rows_held)
        )


def _work(n_fft: int, r1: int, r2: int, r3: int) -> tuple[int, int, int]:
    """Rows that a thread holds at a time: a row and its partner, where there is one; columns of a frame; pairs of rows."""
    return 1 if n_fft % 2 or r1 * r2 == 1 else 2, r2 * r3, (r1 * r2 + 1) // 2


@cache
def factorisations(n_fft: int) -> list[Factors]:
    """All ways to transform a frame, for each the fewest threads that hold it."""
    m = n_fft if n_fft % 2 else n_fft // 2
    largest, _ = _HELD_AND_REGISTERS[-1]
    found = []
    for r3 in (r for r in range(1, largest + 1) if m % r == 0):
        for r2 in (r for r in range(1, largest + 1) if m // r3 % r == 0):
            r1 = m // (r2 * r3)
            rows_held, columns, pairs = _work(n_fft, r1, r2, r3)
            held = next((held for held, _ in _HELD_AND_REGISTERS if max(r1, r2, rows_held * r3) <= held), None)
            if held is None:
                continue
            threads = max(-(-columns // (held // r1)), -(-pairs // (held // (rows_held * r3))))
            found.append(Factors.of(n_fft, r1, r2, r3, threads))
    return found


@cache
def _by_preference(n_fft: int) -> list[Factors]:
    """All factorisations: first those of two passes with up to 96 registers, then by registers and cost."""

    def rank(factors: Factors) -> tuple[bool, bool, bool, float]:
        many, more = factors.registers > 64, factors.registers > 96
        return factors.r2 > 1 or more, many, more, factors.cost()

    return sorted(factorisations(n_fft), key=rank)


def _bin_slices(frames: int) -> int:
    """Eight lanes project a filter, each up to four of the tile's frames; the rest of them divide its bins."""
    return 8 * min(frames, 4) // frames


def _odd_multiple(at_least: int, unit: int) -> int:
    """The smallest odd multiple of ``unit`` (a power of two) that is at least ``at_least``."""
    multiple = -(-at_least // unit)
    return unit * (multiple + 1 - multiple % 2)


def _entries(size: int) -> int:
    """Bytes in units of 16."""
    return -(-size // 16)


def layouts(
    spec: StftSpec,
    arch: Architecture,
    factors: Factors,
    frames: int,
    sample_bytes: int,
    behind: int | None = None,
) -> list[LaunchPlan]:
    """The plans for tiles of ``frames`` frames that fit: with and without prefetch, with and without factors in shared memory.

    With ``behind``, for the backward kernel: so many entries of a team lie behind its spectra, no powers take their place, and
    all plans prefetch.

    Strides keep a warp's shared-memory accesses in different banks. A warp is ``frames`` frames by 32 / frames threads of each.
    Accesses of 8 bytes are served by half warps from 16 banks of 8 bytes: with n threads a frame side by side, the frames'
    stride must be an odd multiple of n.
    """
    r1, r2, r3 = factors.r1, factors.r2, factors.r3
    hop, n_fft = spec.hop_length, spec.n_fft
    pitch = min(hop, n_fft)  # of frames in shared memory: gaps between them are not loaded
    side_by_side = max(1, 128 // (2 * sample_bytes) // frames)  # pairs of samples
    # Odd hops need none. Odd n_fft reads sample by sample: to find each behind a skew cost more than the conflicts (98 µs, 79).
    skew = 0 if pitch % 2 or n_fft % 2 or frames == 1 else 2 * _odd_multiple(pitch // 2, side_by_side) - pitch
    sample_stride = pitch + skew
    samples = _entries(sample_bytes * ((frames - 1) * sample_stride + n_fft + (n_fft - 1) // pitch * skew))
    chunk = math.gcd(16 // sample_bytes, hop, pitch, skew, n_fft, spec.margin + spec.pad)

    row, side_by_side = r2 * r3, max(1, 16 // frames)
    row_stride = row + 1 - row % 2 if frames < 16 else row

    def exchange(row_stride: int) -> int:
        size = (r1 - 1) * row_stride + row
        return size if frames == 1 else _odd_multiple(size, side_by_side)

    if 8 * frames * exchange(row_stride) > arch.shared_per_block:
        row_stride = row  # bank conflicts, but it fits (n_fft 16384 in 64 KiB)
    spectra = _entries(8 * frames * exchange(row_stride))
    if behind is None:
        spectra = max(spectra, _entries(4 * frames * (spec.n_freqs + 2 * _bin_slices(frames))))

    plans = []
    threads = -(-factors.threads_per_frame * frames // 32) * 32
    sums = _entries(4 * threads) if spec.remove_dc else 0
    for prefetch in (True, False) if behind is None else (True,):
        samples_entries, sums_begin = (samples, samples + spectra) if prefetch else (0, max(samples, spectra))
        team_entries = sums_begin + sums + (behind or 0)
        teams = min(
            _MAX_TEAMS,
            MAX_THREADS // threads if threads <= _MAX_TEAM_THREADS else 0,
            4 * (_REGISTERS // (32 * factors.registers)) // (threads // 32),
            arch.shared_per_block // (16 * team_entries),
        )
        if teams == 0:
            continue
        plan = LaunchPlan(
            paired=n_fft % 2 == 0,
            r1=r1,
            r2=r2,
            r3=r3,
            frames_per_tile=frames,
            threads=threads,
            teams=teams,
            prefetch=prefetch,
            factors_in_shared=False,
            chunk=chunk,
            skew=skew,
            sample_stride=sample_stride,
            row_stride=row_stride,
            frame_stride=exchange(row_stride),
            samples_entries=samples_entries,
            sums_begin=sums_begin,
            team_entries=team_entries,
            shared_bytes=16 * teams * team_entries,
            spare_bytes=arch.shared_per_block - 16 * teams * team_entries,
        )
        plans.append(plan)
        factor_bytes = 16 * factor_entries(plan)
        if factor_bytes <= plan.spare_bytes:
            plans.append(
                replace(
                    plan,
                    factors_in_shared=True,
                    shared_bytes=plan.shared_bytes + factor_bytes,
                    spare_bytes=plan.spare_bytes - factor_bytes,
                )
            )
    return plans


def backward_layouts(
    spec: StftSpec, arch: Architecture, factors: Factors, frames: int, n_mels: int, entries_per_bin: int, sample_bytes: int
) -> list[BackwardPlan]:
    """The plans of the backward kernel for tiles of ``frames`` frames that fit.

    Its threads hold one column or one pair of rows at a time: there may be fewer of them, or more, than in the forward kernel.
    """
    overlap = (spec.support - 1) // spec.hop_length
    mel, carry = _entries(4 * frames * n_mels), _entries(4 * overlap * spec.hop_length)
    most = max(factors.r1, factors.r2, factors.rows_held * factors.r3)
    registers = next(registers for held, registers in _HELD_AND_REGISTERS_BACK if most <= held)
    t = factors.threads_per_frame
    return [
        BackwardPlan(
            **vars(plan),
            n_mels=n_mels,
            entries_per_bin=entries_per_bin,
            overlap=overlap,
            mel_begin=plan.team_entries - mel - carry,
            carry_begin=plan.team_entries - carry,
        )
        for threads in dict.fromkeys((t, 2 * t, -(-t // 2), -(-t // 4)))
        for plan in layouts(
            spec, arch, replace(factors, threads_per_frame=threads, registers=registers), frames, sample_bytes, mel + carry
        )
    ]


def factor_offsets(plan: LaunchPlan) -> dict[str, int]:
    """Where each part of the table of factors (tables.py) starts, in entries of two complex numbers."""
    column_entries = -(-plan.r1 // 2) * plan.r2 * plan.r3
    middle_entries = -(-plan.r2 // 2) * plan.r3 if plan.r2 > 1 else 0
    return {
        "window_table": 0,
        "column_table": column_entries,
        "middle_table": 2 * column_entries,
        "separation_table": 2 * column_entries + middle_entries,
    }


def factor_entries(plan: LaunchPlan) -> int:
    """Length of the table of factors."""
    separations = -(-plan.r3 // 2) * ((plan.r1 * plan.r2 + 1) // 2) if plan.paired else 0
    return factor_offsets(plan)["separation_table"] + separations
