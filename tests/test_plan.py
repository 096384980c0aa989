"""The launch plan and the kernel's tables as pure functions: what fits, what does not overlap, what meets no bank conflict."""

import dataclasses

import numpy as np
import pytest

from flashmel.plan import MAX_THREADS, UnsupportedError, architecture, launch_grid, make_plan
from flashmel.spec import StftSpec
from flashmel.tables import factor_offsets, kernel_tables

ARCHITECTURES = {compute: architecture(*divmod(compute, 10)) for compute in (75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121)}
HOPPER = ARCHITECTURES[90]
USUAL = [
    *((400, hop) for hop in (80, 100, 160, 200)),
    *((512, hop) for hop in (128, 160, 256)),
    *((1024, hop) for hop in (160, 256, 320, 512)),
    *((2048, hop) for hop in (240, 256, 512, 1024)),
]
any_architecture = pytest.mark.parametrize("compute", ARCHITECTURES)
usual = pytest.mark.parametrize("n_fft,hop", USUAL)


def spec_of(n_fft, hop=None):
    return StftSpec(n_fft, n_fft, hop or max(1, n_fft // 4))


def staged(plan, p):
    """Word of sample ``p`` of a tile: load.cuh."""
    return p + p // (plan.sample_stride - plan.skew) * plan.skew


def check(plan, spec, arch):
    """What must hold of every plan."""
    frames, row = plan.frames_per_block, plan.r2 * plan.r3
    reserved = 0 if arch.compute == 75 else 1024  # bytes a block, by the driver
    assert plan.r1 * row == spec.n_fft // 2
    assert 2 <= plan.r1 <= 32 and 1 <= plan.r2 <= 32 and 2 <= plan.r3 <= 16  # a thread holds one column, or two rows
    assert frames in (1, 2, 4, 8, 16, 32)
    assert plan.threads % 32 == 0 and 32 <= plan.threads <= min(MAX_THREADS, 1024) and plan.threads % frames == 0
    assert 1 <= plan.min_blocks <= 32 and plan.min_blocks * plan.threads <= arch.threads_per_sm
    assert plan.shared_bytes <= arch.shared_per_block and plan.min_blocks * (plan.shared_bytes + reserved) <= arch.shared_per_sm
    # Each region: nothing of it overlaps, and its last element ends within the block's shared memory.
    pitch = min(spec.hop_length, spec.n_fft)  # gaps between frames are not loaded
    assert plan.skew >= 0 and plan.sample_stride == pitch + plan.skew
    assert 4 * (staged(plan, (frames - 1) * pitch + spec.n_fft - 1) + 1) <= plan.shared_bytes
    exchange = (plan.r1 - 1) * plan.row_stride + row
    assert plan.row_stride >= row and (frames == 1 or plan.frame_stride >= exchange)
    assert 8 * ((frames - 1) * plan.frame_stride + exchange) <= plan.shared_bytes
    assert 4 * frames * (spec.n_fft // 2 + 1) <= plan.shared_bytes


@any_architecture
def test_every_size_has_a_plan_or_a_reason(compute):
    arch, unsupported = ARCHITECTURES[compute], []
    for n_fft in range(64, 16385, 2):
        spec = spec_of(n_fft)
        try:
            check(make_plan(spec, arch), spec, arch)
        except UnsupportedError as error:
            assert str(n_fft) in str(error)
            unsupported.append(n_fft)
    # Powers of two, and windows of 10 to 100 ms at usual rates, are all in.
    windows = {160, 200, 320, 400, 480, 600, 640, 800, 882, 960, 1200, 1764, 1920, 2400, 4800}
    assert not set(unsupported) & ({2**k for k in range(6, 15)} | windows)


@any_architecture
@pytest.mark.parametrize("n_fft", [64, 100, 400, 882, 1024, 4096, 16384])
def test_few_tiles_keep_the_order_of_sums(n_fft, compute):
    """A waveform's result must not depend on its batch: both plans have the same factors, tiles and slices of filters."""
    arch, spec = ARCHITECTURES[compute], spec_of(n_fft)
    many, few = make_plan(spec, arch), make_plan(spec, arch, few_tiles=True)
    for name in ("r1", "r2", "r3", "frames_per_block", "bin_slices"):
        assert getattr(many, name) == getattr(few, name)
    assert few.threads in (many.threads, 2 * many.threads) and few.threads <= 1024


@any_architecture
@pytest.mark.parametrize("n_fft", [64, 100, 400, 882, 1024, 4096, 16384])
def test_every_hop(n_fft, compute):
    arch = ARCHITECTURES[compute]
    for hop in [*range(1, 70), *range(70, 2 * n_fft, 61), n_fft - 1, n_fft, n_fft + 1, 10 * n_fft, 10**6, 2**31 - 1]:
        spec = spec_of(n_fft, hop)
        check(make_plan(spec, arch), spec, arch)


@pytest.mark.parametrize("n_fft", [2, 62, 63, 65, 399, 1023, 16383, 16386, 32768])
def test_sizes_outside(n_fft):
    with pytest.raises(UnsupportedError, match=f"even n_fft from 64 to 16384, not {n_fft}"):
        make_plan(spec_of(n_fft), HOPPER)


@pytest.mark.parametrize("n_fft", [2 * 37, 2 * 8191, 2 * 41 * 8])
def test_sizes_with_a_large_prime(n_fft):
    with pytest.raises(UnsupportedError, match=rf"n_fft = {n_fft}: {n_fft // 2} is not r1 \* r2 \* r3"):
        make_plan(spec_of(n_fft), HOPPER)


@pytest.mark.parametrize("capability", [(7, 0), (6, 1), (9, 9), (13, 0)])
def test_unknown_architectures(capability):
    with pytest.raises(UnsupportedError, match=r"capability {}\.{} .*9\.0".format(*capability)):
        architecture(*capability)


@pytest.mark.parametrize("frames", [1, 2, 4, 8, 16, 32])
@usual
def test_chosen_frames_per_block(n_fft, hop, frames):
    spec = spec_of(n_fft, hop)
    for arch in ARCHITECTURES.values():
        try:
            plan = make_plan(spec, arch, frames)
        except UnsupportedError:
            raise
        except ValueError as error:
            assert f"{frames} frames per block do not fit" in str(error) and str(arch.shared_per_block) in str(error)
            continue
        assert plan.frames_per_block == frames
        check(plan, spec, arch)


@pytest.mark.parametrize("frames", [-1, 0, 3, 12, 64])
def test_impossible_frames_per_block(frames):
    with pytest.raises(ValueError, match=f"power of two from 1 to 32, got {frames}"):
        make_plan(spec_of(400), HOPPER, frames)


def test_frames_per_block_that_do_not_fit():
    with pytest.raises(ValueError, match=r"32 frames per block do not fit: \d+ threads and \d+ bytes"):
        make_plan(spec_of(4096), HOPPER, 32)


def test_a_plan_is_a_value():
    a, b = make_plan(spec_of(400, 160), HOPPER), make_plan(StftSpec(400, 400, 160), architecture(9, 0))
    assert a == b and hash(a) == hash(b) and eval(repr(a), {"LaunchPlan": type(a)}) == a
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.threads = 32
    # What does not decide the layout does not decide the plan.
    assert a == make_plan(StftSpec(400, 25, 160, 7, 1.0, "window", False, "constant"), HOPPER)


@pytest.mark.parametrize("frames,rows", [(1, 1), (101, 8), (33, 65535), (9, 65536), (9, 70000), (2**31, 3), (5, 2**32 - 2**17 + 1)])
def test_launch_grid_covers_everything_once(frames, rows):
    plan = make_plan(spec_of(400, 160), HOPPER)
    x, y, z = launch_grid(plan, frames, rows)
    assert (x - 1) * plan.frames_per_block < frames <= x * plan.frames_per_block
    assert (z - 1) * y < rows <= y * z and 1 <= x < 2**31 and 1 <= y < 2**16 and 1 <= z < 2**16


@pytest.mark.parametrize("frames,rows", [(2**38, 1), (1, 2**32)])
def test_launch_grid_limits(frames, rows):
    with pytest.raises(UnsupportedError, match=f"{rows} waveforms of {frames} frames"):
        launch_grid(make_plan(spec_of(400, 160), HOPPER), frames, rows)


# --- bank conflicts: the addresses of fft.cuh and project.cuh, warp by warp ----------------------------------------------------


def wavefronts(words, active, width):
    """(needed, ideal) of accesses (n, threads) of ``width`` words: 32 banks of a word serve 32 / width lanes at once."""
    lanes = 32 // width
    pad = -words.shape[1] % 32
    words = np.pad(words, ((0, 0), (0, pad))).reshape(-1, lanes)
    active = np.pad(np.broadcast_to(active, (len(words) * lanes // (active.shape[-1] + pad), active.shape[-1])), ((0, 0), (0, pad)))
    needed = ideal = 0
    for group, on in zip(words, active.reshape(-1, lanes), strict=True):
        if on.any():
            distinct = np.unique((group[on][:, None] + np.arange(width)).ravel())  # the same word twice is a broadcast
            needed += np.bincount(distinct % 32).max()
            ideal += 1
    return int(needed), ideal


def accesses(plan, spec):
    """(stage, words (n, threads), active (threads,), words a thread) of the shared-memory accesses after the samples are there."""
    threads = np.arange(plan.threads)
    frame, thread = threads % plan.frames_per_block, threads // plan.frames_per_block
    m, row = spec.n_fft // 2, plan.r2 * plan.r3
    samples, exchange = frame * plan.sample_stride, 2 * frame * plan.frame_stride
    per_lane = min(4, plan.frames_per_block)
    groups = plan.frames_per_block // per_lane
    powers = frame % groups * per_lane + frame // groups
    for c in range(0, row, plan.threads_per_frame):
        c, j = c + thread, np.arange(plan.r1)[:, None]
        pair = samples + staged(plan, 2 * (c + row * j))
        if plan.sample_stride % 2 == 0:
            yield "columns, load", pair, c < row, 2
        else:
            yield from (("columns, load", pair + half, c < row, 1) for half in (0, 1))
        yield "columns, store", exchange + 2 * (c + plan.row_stride * j), c < row, 2
    for item in range(0, m // plan.r2 if plan.r2 > 1 else 0, plan.threads_per_frame):
        item = item + thread
        at = item // plan.r3 * plan.row_stride + item % plan.r3 + plan.r3 * np.arange(plan.r2)[:, None]
        yield "middle", exchange + 2 * at, item < m // plan.r2, 2
    rows = m // plan.r3
    pairs = (rows + 1) // 2
    for u in range(0, pairs, plan.threads_per_frame):
        u, j = u + thread, np.arange(plan.r3)[:, None]
        for r in (u, np.where(u == 0, rows // 2, rows - u)):
            yield "rows, load", exchange + 2 * (r % plan.r1 * plan.row_stride + r // plan.r1 * plan.r3 + j), u < pairs, 2
        for bins in (u + rows * j, m - u - rows * j):
            yield "rows, store", powers + bins * plan.frames_per_block, (u > 0) & (u < pairs), 1  # u = 0 takes a branch of its own
    # One filter's eight lanes: which bins a warp's other three filters read at the same time is the bank's affair.
    lane = np.arange(32)
    bins = lane // groups + np.arange(m - 7)[:, None]
    yield "project", bins * plan.frames_per_block + lane % groups * per_lane, lane < 8, per_lane


@pytest.mark.parametrize("compute", [75, 80, 86, 90])
@usual
def test_no_bank_conflicts(n_fft, hop, compute):
    spec = spec_of(n_fft, hop)
    plan = make_plan(spec, ARCHITECTURES[compute])
    counts = {}
    for name, words, active, width in accesses(plan, spec):
        needed, ideal = wavefronts(words, active, width)
        before = counts.get(name, (0, 0))
        counts[name] = before[0] + needed, before[1] + ideal
    if plan.frames_per_block >= 4:
        assert {name: c for name, c in counts.items() if c[0] > c[1]} == {}, plan
    else:  # neighbouring lanes are then neighbouring columns of one frame, and no stride suits all three passes
        needed, ideal = map(sum, zip(*counts.values(), strict=True))
        assert needed < 1.25 * ideal, (counts, plan)


def test_wavefronts_counts():
    lanes, on = np.arange(32)[None], np.ones(32, bool)
    assert wavefronts(lanes, on, 1) == (1, 1) and wavefronts(2 * lanes, on, 1) == (2, 1) and wavefronts(0 * lanes, on, 1) == (1, 1)
    assert wavefronts(2 * lanes, on, 2) == (2, 2) and wavefronts(32 * lanes, on, 2) == (32, 2)
    assert wavefronts(2 * lanes, lanes[0] < 8, 2) == (1, 1)


# --- the kernel's tables -------------------------------------------------------------------------------------------------------


def tables_of(fb, n_fft=64, normalized="none", window=None):
    spec = spec_of(n_fft)
    return kernel_tables(make_plan(spec, HOPPER), n_fft, normalized, np.ones(n_fft) if window is None else window, fb)


def unpacked(tables, n_freqs, plan):
    """The bank as project.cuh reads it: in a round a lane takes two bins, ``bin_slices`` apart, their weights side by side."""
    slices = plan.bin_slices
    fb = np.zeros((n_freqs - 1 + 2 * slices, len(tables.filters)), np.float32)  # with the zero bins behind the last
    for i, (first, rounds, place, _) in enumerate(tables.filters):
        assert 0 <= first < n_freqs and place >= 0 and place % 2 == 0 and place + 2 * slices * rounds <= len(tables.weights)
        for k, weight in enumerate(tables.weights[place : place + 2 * slices * rounds]):
            fb[first + k // (2 * slices) * 2 * slices + k % (2 * slices) // 2 + k % 2 * slices, i] = weight
    assert not fb[n_freqs:].any()
    return fb[:n_freqs]


def sparse(density):
    rng = np.random.default_rng(0)
    return rng.standard_normal((33, 9)) * (rng.random((33, 9)) < density)


BANKS = {
    "dense": (np.random.default_rng(0).standard_normal((33, 5)), 33 * 5),
    "gaps": (sparse(0.2), None),
    "zero": (np.zeros((33, 4)), 0),
    "one-bin": (np.eye(33)[:, [0, 32, 7]], 3),
    "zero-column": (np.stack([np.zeros(33), np.ones(33), np.zeros(33)], 1), 33),
    "nan": (np.where(np.eye(33)[:, [3, 4]] > 0, np.nan, 0.0), 2),
    "no-filters": (np.zeros((33, 0)), 0),
}


@pytest.mark.parametrize("frames", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("name", BANKS)
def test_filters_hold_the_whole_bank(name, frames):
    fb, n_weights = BANKS[name]
    plan = make_plan(spec_of(64), HOPPER, frames)
    tables = kernel_tables(plan, 64, "none", np.ones(64), fb)
    np.testing.assert_array_equal(unpacked(tables, 33, plan), fb.astype(np.float32))
    assert tables.filters.dtype == np.int32 and tables.filters.shape == (fb.shape[1], 4) and tables.filters.flags.c_contiguous
    assert tables.weights.dtype == np.float32 and len(tables.weights) >= 1, "the kernel is given an address"
    if n_weights is not None:  # zeros at a filter's ends are read only to fill its last round
        assert n_weights <= 2 * plan.bin_slices * tables.filters[:, 1].sum() <= n_weights + fb.shape[1] * (2 * plan.bin_slices - 1)


@pytest.mark.parametrize("n_fft", [64, 66, 90, 400, 450, 882, 1024, 2048, 8192, 16384])
def test_factors(n_fft):
    plan = make_plan(spec_of(n_fft), HOPPER)
    window = np.random.default_rng(n_fft).random(n_fft)
    tables = tables_of(np.ones((n_fft // 2 + 1, 1)), n_fft, window=window)
    offsets = factor_offsets(plan)
    rows = plan.r1 * plan.r2
    pairs = (rows + 1) // 2
    assert tables.factors.dtype == np.float32 and tables.factors.flags.c_contiguous
    assert tables.factors.shape == (offsets["separation_table"] + -(-plan.r3 // 2) * pairs, 4)
    assert list(offsets.values()) == sorted(offsets.values())

    def part(name, slots, items):
        """As the kernel reads it: slot s of item i is half s % 2 of entry s // 2 * items + i."""
        entries = tables.factors[offsets[name] :][: -(-slots // 2) * items].reshape(-1, items, 2, 2)
        return entries.swapaxes(1, 2).reshape(-1, items, 2)[:slots] @ np.array([1, 1j])

    m, row = n_fft // 2, plan.r2 * plan.r3
    pairs_of_samples = part("window_table", plan.r1, row).ravel()
    np.testing.assert_array_equal(pairs_of_samples.real, np.float32(0.5 * window[0::2]))
    np.testing.assert_array_equal(pairs_of_samples.imag, np.float32(0.5 * window[1::2]))
    k, c = np.mgrid[: plan.r1, :row]
    np.testing.assert_allclose(part("column_table", plan.r1, row), np.exp(-2j * np.pi * k * c / m), atol=1e-7)
    if plan.r2 > 1:
        k, c = np.mgrid[: plan.r2, : plan.r3]
        np.testing.assert_allclose(part("middle_table", plan.r2, plan.r3), np.exp(-2j * np.pi * k * c / row), atol=1e-7)
    # The separation's factors name the bins k that the kernel visits: with m - k (and m / 2, by itself) all of them, once.
    turn = np.angle(part("separation_table", plan.r3, pairs).astype(complex)) / (-2 * np.pi) * n_fft
    bins = np.rint(turn).astype(int) % n_fft
    assert np.abs(turn - np.rint(turn)).max() < 0.01
    if rows % 2:  # row 0 has no row rows / 2 beside it: its last slots are not used
        bins = np.concatenate([bins[:, 1:].ravel(), bins[: (plan.r3 + 1) // 2, 0]])
    visited = np.concatenate([bins.ravel(), m - bins.ravel()])
    alone = [m // 2] if m % 2 == 0 else []
    assert sorted({*visited.tolist(), *alone}) == list(range(m + 1))
    assert len(visited) - len(set(visited.tolist())) <= 1, "bin m / 2, its own partner, alone may be visited twice"


@pytest.mark.parametrize("normalized,scale", [("none", 1.0), ("window", 0.25), ("frame_length", 0.125)])
def test_normalisation_is_in_the_window(normalized, scale):
    window = np.full(64, 0.5)
    tables = tables_of(np.ones((33, 1)), 64, normalized, window)
    plain = tables_of(np.ones((33, 1)), 64, "none", window)
    end = factor_offsets(make_plan(spec_of(64), HOPPER))["column_table"]
    np.testing.assert_allclose(tables.factors[:end], scale * plain.factors[:end])
    np.testing.assert_array_equal(tables.factors[end:], plain.factors[end:])


def test_quarter_turns_are_exact():
    factors = tables_of(np.ones((33, 1))).factors[factor_offsets(make_plan(spec_of(64), HOPPER))["column_table"] :]
    assert set(factors[np.abs(factors) < 1e-6].tolist()) <= {0.0} and np.abs(factors).max() == 1.0
