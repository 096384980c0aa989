"""The launch plan and the kernel's tables as pure functions: what fits, what does not overlap, what meets no bank conflict."""

import dataclasses

import numpy as np
import pytest

from flashmel.filterbank import mel_filterbank
from flashmel.plan import (
    ARCHITECTURES,
    MAX_N_FFT,
    MAX_THREADS,
    UnsupportedError,
    architecture,
    backward_layouts,
    backward_merit,
    factor_entries,
    factor_offsets,
    factorisations,
    launch,
    launch_backward,
    layouts,
    make_backward_plan,
    make_plan,
)
from flashmel.spec import PAD_MODES, MelBankSpec, StftSpec
from flashmel.tables import kernel_tables

HOPPER = architecture(9, 0)
TILES = (1, 2, 4, 8, 16, 32)  # frames
USUAL = [
    *((400, hop) for hop in (80, 100, 160, 200)),
    *((512, hop) for hop in (128, 160, 256)),
    *((1024, hop) for hop in (160, 256, 320, 512)),
    *((2048, hop) for hop in (240, 256, 512, 1024)),
]
# Of every kind: one factor or three, tiles of few frames, odd halves, odd.
SIZES = [2, 3, 4, 61, 64, 100, 400, 441, 882, 1024, 2205, 4096, 16384]
any_architecture = pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: arch.name)
BY_MEMORY = {arch.shared_per_block: arch for arch in reversed(ARCHITECTURES)}  # all that a plan depends on
any_memory = pytest.mark.parametrize("arch", BY_MEMORY.values(), ids=lambda arch: arch.name)
usual = pytest.mark.parametrize("n_fft,hop", USUAL)


def spec_of(n_fft, hop=None):
    return StftSpec(n_fft, n_fft, hop or max(1, n_fft // 4))


def staged(plan, p):
    """Place of sample ``p`` of a tile: load.cuh."""
    return p + p // (plan.sample_stride - plan.skew) * plan.skew


def check(plan, spec, arch, sample_bytes=4):
    """What must hold of every plan."""
    check_layout(plan, spec, arch, sample_bytes)
    # A thread holds its columns, later its pairs of rows; of the pairs one row if n_fft is odd, or where there is one row.
    row, rows = plan.r2 * plan.r3, plan.r1 * plan.r2
    columns, pairs = -(-row // plan.threads_per_frame), -(-((rows + 1) // 2) // plan.threads_per_frame)
    assert max(columns * plan.r1, plan.r2, pairs * rows_held(plan) * plan.r3) <= 64
    # Samples without a place of their own lie where the spectra will.
    assert samples_bytes(plan, spec, sample_bytes) <= 16 * (plan.samples_entries if plan.prefetch else plan.team_entries)
    assert plan.samples_entries == 0 or plan.prefetch
    spectra = 16 * (plan.team_entries - plan.samples_entries)
    assert spectra_bytes(plan) <= spectra
    assert (
        4 * plan.frames_per_tile * (spec.n_freqs + 2 * plan.bin_slices) <= spectra
    )  # the powers and the zero bins behind the last


def check_backward(plan, spec, arch, n_mels, entries_per_bin=1, sample_bytes=4):
    """What must hold of every plan of the gradient."""
    check_layout(plan, spec, arch, sample_bytes)
    assert plan.prefetch and (plan.n_mels, plan.entries_per_bin) == (n_mels, entries_per_bin)
    assert plan.overlap * spec.hop_length < spec.support <= (plan.overlap + 1) * spec.hop_length
    # A thread holds one column, or one pair of rows, at a time: two numbers a point, and what its code needs beside them.
    held = max(plan.r1, plan.r2, rows_held(plan) * plan.r3)
    assert held <= 64 and 2 * held + 40 <= registers_of(plan)
    # A team's shared memory: samples, spectra (no powers take their place), mel gradients, what is carried to the next tile.
    parts = [
        (0, samples_bytes(plan, spec, sample_bytes)),
        (plan.samples_entries, spectra_bytes(plan)),
        (plan.mel_begin, 4 * plan.frames_per_tile * n_mels),
        (plan.carry_begin, 4 * plan.overlap * spec.hop_length),
    ]
    ends = [begin for begin, _ in parts[1:]] + [plan.team_entries]
    assert all(0 <= size <= 16 * (end - begin) for (begin, size), end in zip(parts, ends, strict=True)), (parts, ends)


def check_layout(plan, spec, arch, sample_bytes):
    """What must hold of the plans of both kernels."""
    frames, row = plan.frames_per_tile, plan.r2 * plan.r3
    assert plan.paired == (spec.n_fft % 2 == 0) and plan.r1 * row * (1 + plan.paired) == spec.n_fft
    assert min(plan.r1, plan.r2, plan.r3) >= 1
    assert frames in TILES and plan.threads % 32 == 0 and plan.threads % frames == 0
    assert 1 <= plan.teams <= 16 and plan.teams * plan.threads <= MAX_THREADS  # a team has one of 16 barriers
    # Shared memory: teams, the factors. Strides: no frame's samples or spectrum reaches into the next one's.
    pitch = min(spec.hop_length, spec.n_fft)  # gaps between frames are not loaded
    assert plan.skew >= 0 and plan.sample_stride == pitch + plan.skew
    assert plan.row_stride >= row and (frames == 1 or plan.frame_stride >= exchange(plan))
    assert plan.shared_bytes == 16 * (plan.teams * plan.team_entries + plan.factors_in_shared * factor_entries(plan))
    assert plan.spare_bytes >= 0 and plan.shared_bytes + plan.spare_bytes <= arch.shared_per_block
    # A chunk is one copy, to and from multiples of its size; none reaches over the end of a hop or of a frame.
    assert plan.chunk >= 1 and 16 % (plan.chunk * sample_bytes) == 0
    for length in (spec.hop_length, pitch, plan.skew, spec.n_fft, spec.margin + spec.pad):
        assert length % plan.chunk == 0


def rows_held(plan):
    """Rows that a thread holds at a time: one and its partner, unless n_fft is odd or there is no other."""
    return 2 if plan.paired and plan.r1 * plan.r2 > 1 else 1


def exchange(plan):
    """Complex numbers from the first to the last of a frame's spectrum."""
    return (plan.r1 - 1) * plan.row_stride + plan.r2 * plan.r3


def samples_bytes(plan, spec, sample_bytes):
    pitch = min(spec.hop_length, spec.n_fft)
    return sample_bytes * (staged(plan, (plan.frames_per_tile - 1) * pitch + spec.n_fft - 1) + 1)


def spectra_bytes(plan):
    return 8 * ((plan.frames_per_tile - 1) * plan.frame_stride + exchange(plan))


def registers_of(plan):
    """What __launch_bounds__ leaves a thread: every fourth warp shares a quarter of the 65536, in units of 8 a thread."""
    return min(255, 16384 // (32 * -(-plan.teams * plan.threads // 128)) // 8 * 8)


def largest_prime(n):
    p = 2
    while p * p <= n:
        if n % p == 0:
            n //= p
        else:
            p += 1
    return n


@any_architecture
def test_every_size_has_a_plan_or_a_reason(arch):
    unsupported = []
    for n_fft in range(2, MAX_N_FFT + 1):
        spec = spec_of(n_fft)
        try:
            check(make_plan(spec, arch), spec, arch)
        except UnsupportedError as error:
            assert f"n_fft = {n_fft}" in str(error)
            unsupported.append(n_fft)
    # Without a large prime factor, all are in but some odd ones, which take twice the memory, threads and registers. So are
    # powers of two, and windows of 10 to 100 ms at usual rates.
    smooth = [n_fft for n_fft in unsupported if largest_prime(n_fft) <= 61]
    assert all(n_fft % 2 and n_fft > (8192 if arch.shared_per_block < 99 * 1024 else 9300) for n_fft in smooth)
    windows = {160, 200, 220, 320, 400, 441, 480, 600, 640, 800, 882, 960, 1200, 1764, 1920, 2205, 2400, 4410, 4800}
    assert not set(unsupported) & ({2**k for k in range(1, 15)} | windows)


@any_memory
@pytest.mark.parametrize("n_fft", SIZES)
def test_every_hop(n_fft, arch):
    around = (n_fft - 1, n_fft, n_fft + 1, 2 * n_fft, 10 * n_fft)
    for hop in [*range(1, 70), *range(70, 2 * n_fft, 1 + n_fft // 16), *around, 10**6, 2**31 - 1]:
        for sample_bytes in (4, 2):
            spec = spec_of(n_fft, hop)
            check(make_plan(spec, arch, sample_bytes), spec, arch, sample_bytes)


@pytest.mark.parametrize("sample_bytes", [4, 2])
@pytest.mark.parametrize("pad", [-350, -1, 0, 1, 2, 4, 8, 2**31 - 1])
def test_chunks_with_pad(pad, sample_bytes):
    for center in (True, False):
        for n_fft in (400, 441, 512):
            spec = StftSpec(n_fft, n_fft, 160, pad, center=center)
            check(make_plan(spec, HOPPER, sample_bytes), spec, HOPPER, sample_bytes)


@any_memory
@usual
def test_usual_copies_are_long(n_fft, hop, arch):
    """Skews are even: what keeps banks apart may cost copies of 16 bytes, but not those of 8."""
    assert make_plan(spec_of(n_fft, hop), arch).chunk >= 2


@pytest.mark.parametrize("n_fft", SIZES)
def test_every_factorisation_is_a_plan(n_fft):
    """Those that a measurement may choose (measured.json), not only the cheapest."""
    spec = spec_of(n_fft)
    assert factorisations(n_fft)
    for factors in factorisations(n_fft):
        for frames in TILES:
            for plan in layouts(spec, HOPPER, factors, frames, 4):
                assert (plan.r1, plan.r2, plan.r3) == (factors.r1, factors.r2, factors.r3)
                check(plan, spec, HOPPER)


@pytest.mark.parametrize("n_fft", [1, 16385, 16386, 32768])
def test_sizes_outside(n_fft):
    with pytest.raises(UnsupportedError, match=f"n_fft from 2 to 16384, not {n_fft}"):
        make_plan(spec_of(n_fft), HOPPER)


@pytest.mark.parametrize("n_fft", [67, 2 * 67, 2 * 8191, 16381])
def test_sizes_with_a_large_prime(n_fft):
    with pytest.raises(UnsupportedError, match=rf"n_fft = {n_fft}: {n_fft if n_fft % 2 else n_fft // 2} is not a product"):
        make_plan(spec_of(n_fft), HOPPER)


@pytest.mark.parametrize("hop,pad", [(2**31, 0), (160, 2**31), (160, -(2**31))])
def test_lengths_outside(hop, pad):
    with pytest.raises(UnsupportedError, match=rf"below 2\*\*31, not {hop} and {pad}"):
        make_plan(StftSpec(400, 400, hop, pad), HOPPER)


@pytest.mark.parametrize("capability", [(7, 0), (6, 1), (9, 9), (13, 0)])
def test_unknown_architectures(capability):
    with pytest.raises(UnsupportedError, match=r"capability {}\.{} .*9\.0".format(*capability)):
        architecture(*capability)


@pytest.mark.parametrize("frames", TILES)
@usual
def test_chosen_frames_per_tile(n_fft, hop, frames):
    spec = spec_of(n_fft, hop)
    for arch in ARCHITECTURES:
        try:
            plan = make_plan(spec, arch, frames_per_tile=frames)
        except UnsupportedError:
            raise
        except ValueError as error:
            assert f"{frames} frames per tile do not fit in a block of {arch.name} at n_fft = {n_fft}" in str(error)
            assert frames > make_plan(spec, arch).frames_per_tile
            continue
        assert plan.frames_per_tile == frames
        check(plan, spec, arch)


@pytest.mark.parametrize("frames", [-1, 0, 3, 12, 64])
def test_impossible_frames_per_tile(frames):
    with pytest.raises(ValueError, match=f"power of two from 1 to 32, got {frames}"):
        make_plan(spec_of(400), HOPPER, frames_per_tile=frames)


def test_a_plan_is_a_value():
    a, b = make_plan(spec_of(400, 160), HOPPER), make_plan(StftSpec(400, 400, 160), architecture(9, 0))
    assert a == b and hash(a) == hash(b) and eval(repr(a), {"LaunchPlan": type(a)}) == a
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.threads = 32
    # What does not decide the layout does not decide the plan.
    assert a == make_plan(StftSpec(400, 25, 160, 8, 1.0, "window", False, "constant"), HOPPER)


# --- plans of the gradient -----------------------------------------------------------------------------------------------------

N_MELS = (1, 80, 128, 512)


@any_memory
def test_every_size_has_a_gradients_plan_or_a_reason(arch):
    """At all sizes, by turns, with hops of a quarter to a tenth of a frame and with few and many filters."""
    unsupported = []
    for n_fft in range(2, MAX_N_FFT + 1, 11):
        spec, n_mels = spec_of(n_fft, max(1, n_fft // (4, 2, 3, 10)[n_fft // 4 % 4])), N_MELS[n_fft % 4]
        try:
            check_backward(make_backward_plan(spec, arch, n_mels), spec, arch, n_mels)
        except UnsupportedError as error:
            assert f"n_fft = {n_fft}" in str(error)
            unsupported.append(n_fft)
    # Beside the spectra lie samples, mel gradients and what is carried: large sizes find no room, odd ones first.
    even, odd = ([n for n in unsupported if largest_prime(n) <= 61 and n % 2 == parity] for parity in (0, 1))
    least = {64: (5300, 3900), 99: (8200, 6200), 163: (13700, 9300), 227: (MAX_N_FFT, 9300)}[arch.shared_per_block // 1024]
    assert all(n > least[0] for n in even) and all(n > least[1] for n in odd), (even[:1], odd[:1])


@any_memory
def test_usual_sizes_have_a_gradients_plan(arch):
    largest = {64: 4096, 99: 8192, 163: 8192, 227: 16384}[arch.shared_per_block // 1024]
    powers = [2**k for k in range(1, 15) if 2**k <= largest]
    windows = [(400, 160), (400, 100), (480, 120), (640, 160), (800, 200), (960, 240), (1200, 300), (1764, 441), (1920, 480)]
    windows += [(441, 110), (882, 220), (2205, 441), (2205, 551), (2400, 600)]
    for n_fft, hop in [*((n, max(1, n // part)) for n in powers for part in (2, 4, 8)), *windows, *USUAL]:
        spec = spec_of(n_fft, hop)
        for n_mels in N_MELS:
            for sample_bytes in (4, 2):
                plan = make_backward_plan(spec, arch, n_mels, 1, sample_bytes)
                check_backward(plan, spec, arch, n_mels, 1, sample_bytes)


@any_memory
@pytest.mark.parametrize("n_fft", SIZES)
def test_gradients_plans_at_every_hop(n_fft, arch):
    around = (n_fft - 1, n_fft, n_fft + 1, 2 * n_fft, 10 * n_fft)
    for hop in [*range(1, 70, 5), *range(70, 2 * n_fft, 1 + n_fft // 8), *around, 10**6, 2**31 - 1]:
        spec = spec_of(n_fft, hop)
        try:
            check_backward(make_backward_plan(spec, arch, 80, 3, 2), spec, arch, 80, 3, 2)
        except UnsupportedError as error:
            assert n_fft > 4096 and f"the gradient at n_fft = {n_fft} with 80 filters fits in no block of {arch.name}" in str(error)


@pytest.mark.parametrize("n_fft", [n for n in SIZES if n < 4096])
def test_every_factorisation_is_a_plan_of_the_gradient(n_fft):
    spec = spec_of(n_fft)
    for factors in factorisations(n_fft):
        for frames in TILES:
            for plan in backward_layouts(spec, HOPPER, factors, frames, 80, 1, 4):
                assert (plan.r1, plan.r2, plan.r3) == (factors.r1, factors.r2, factors.r3) and backward_merit(plan) > 0
                check_backward(plan, spec, HOPPER, 80)


def test_what_has_no_plan_of_the_gradient():
    for n_fft, reason in ((1, "n_fft from 2 to 16384, not 1"), (134, "n_fft = 134: 67 is not a product"), (16385, "not 16385")):
        with pytest.raises(UnsupportedError, match=reason):
            make_backward_plan(spec_of(n_fft), HOPPER, 80)
    with pytest.raises(UnsupportedError, match="the gradient at n_fft = 400 with 100000 filters fits in no block of sm_90"):
        make_backward_plan(spec_of(400), HOPPER, 100_000)
    with pytest.raises(UnsupportedError, match=r"circular padding of equal margins, not of \(32, 16\)"):
        make_backward_plan(StftSpec(64, 64, 16, margins=(32, 16), pad_mode="circular"), HOPPER, 80)
    cropped = StftSpec(64, 64, 16, pad=-20, pad_mode="constant", preemphasis=0.97)
    for make in (lambda: make_plan(cropped, HOPPER), lambda: make_backward_plan(cropped, HOPPER, 80)):
        with pytest.raises(UnsupportedError, match="padded with zeros, not cropped, .*pad=-20"):
            make()


# --- the launch: which tiles a team takes, and which of them it loads without a look at padding --------------------------------


def rows_of(grid, index):
    """``Tile::row`` of forward.cu, in the kernel's 32 bits."""
    index = np.asarray(index, np.uint64)
    high = index * np.uint64(grid.magic) >> np.uint64(32)
    assert grid.magic < 2**32 and grid.shift < 32 and (index + high < 2**32).all()
    return index + high >> np.uint64(grid.shift)


@pytest.mark.parametrize("frames,rows", [(1, 1), (1, 1000), (101, 8), (33, 77), (96, 5), (5000, 3)])
@pytest.mark.parametrize("multiprocessors", [1, 7, 132])
def test_teams_cover_every_tile_once(frames, rows, multiprocessors):
    spec = spec_of(400, 160)
    plan = make_plan(spec, HOPPER)
    n_samples = (frames - 1) * 160 + 1
    grid = launch(spec, plan, n_samples, rows, multiprocessors)
    assert (grid.tiles - 1) * plan.frames_per_tile < frames <= grid.tiles * plan.frames_per_tile
    assert 1 <= grid.blocks <= multiprocessors and grid.all_tiles == rows * grid.tiles
    teams, rest = divmod(grid.threads, plan.threads)
    assert 1 <= teams <= plan.teams and rest == 0
    assert (teams - 1) * grid.blocks < grid.all_tiles, "a team without a tile in every block"
    first = [block + grid.blocks * team for block in range(grid.blocks) for team in range(teams)]
    taken = np.sort(np.concatenate([np.arange(tile, grid.all_tiles, grid.step) for tile in first]))
    np.testing.assert_array_equal(taken, np.arange(grid.all_tiles))
    np.testing.assert_array_equal(rows_of(grid, taken), np.repeat(np.arange(rows), grid.tiles))


def test_division_by_tiles_is_exact():
    rng = np.random.default_rng(0)
    spec = spec_of(400, 1)
    plan = make_plan(spec, HOPPER, frames_per_tile=32)
    most = 2**31 - 2**20 - 1
    powers = 2 ** np.arange(31)
    counts = {*range(1, 300), *powers, *(powers - 1), *(powers + 1), most, *(2 ** rng.uniform(0, 31, 2000)).astype(int)}
    for tiles in sorted(int(n) for n in counts if 0 < n <= most):
        grid = launch(spec, plan, tiles * plan.frames_per_tile - 1, 1, 132)
        assert grid.tiles == tiles and grid.all_tiles + grid.step < 2**31
        multiples = rng.integers(0, 2**31 // tiles + 1, 100) * tiles
        index = np.concatenate([multiples, multiples - 1, multiples + 1, rng.integers(0, 2**31, 100), [0, 2**31 - 1]])
        index = index[(index >= 0) & (index < 2**31)]  # a team counts past the last of all tiles, but not so far
        np.testing.assert_array_equal(rows_of(grid, index), index // tiles)


@pytest.mark.parametrize("mode", PAD_MODES)
@pytest.mark.parametrize("pad", [-3, -1, 0, 5])
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("n_fft", [2, 5, 8])
def test_inner_tiles_touch_no_padding_and_all_others_do(n_fft, center, pad, mode):
    for hop in (1, 3, n_fft, n_fft + 3):
        spec = StftSpec(n_fft, n_fft, hop, pad, center=center, pad_mode=mode)
        for frames in (1, 2, 8):
            plan = make_plan(spec, HOPPER, frames_per_tile=frames)
            step, span = frames * hop, (frames - 1) * hop + n_fft
            for n_samples in [*range(1, 24), 60, 61, 200]:
                try:
                    spec.check_length(n_samples)
                except ValueError:
                    continue
                grid = launch(spec, plan, n_samples, 1, 1)
                assert 0 <= grid.first_inner < 2**31 and 0 <= grid.inner <= grid.tiles
                for tile in range(grid.tiles):
                    index, valid = spec.source_index(tile * step, span, n_samples)
                    as_it_lies = tile * step - spec.margin - pad + np.arange(span)
                    untouched = valid.all() and (index == as_it_lies).all()
                    assert untouched == (0 <= tile - grid.first_inner < grid.inner), (hop, frames, n_samples, tile)


@pytest.mark.parametrize("frames,rows", [(2**38, 1), (1, 2**31 - 2**20), (33, 2**30)])
def test_launch_limits(frames, rows):
    spec = spec_of(400, 160)
    plan = make_plan(spec, HOPPER, frames_per_tile=32)
    with pytest.raises(UnsupportedError, match=f"{rows} waveforms of {frames} frames"):
        launch(spec, plan, (frames - 1) * 160, rows, 132)
    assert launch(spec, plan, 0, 2**31 - 2**20 - 1, 132).blocks == 132


# --- the gradient's launch: which hops of the padded signal a team writes, and which frames it computes for them -----------------


def check_segments(spec, plan, n_samples, rows, multiprocessors):
    """Every slot, a hop of the padded signal, belongs to one segment, which computes all frames that cover it. (backward.cu)"""
    grid = launch_backward(spec, plan, n_samples, rows, multiprocessors)
    frames, per_tile, overlap = spec.frame_count(n_samples), plan.frames_per_tile, plan.overlap
    padded = n_samples + 2 * (spec.margin + spec.pad)
    slots = -(-padded // spec.hop_length)
    owners, segments = np.zeros(slots, int), []
    for k in range(grid.segments):
        start = k * grid.emitted
        computed = range(start, start + grid.tiles * per_tile)
        own = range(start + overlap if k else 0, min(start + grid.emitted + overlap, slots))
        needed = range(max(0, own[0] - overlap), min(own[-1] + 1, frames))  # frames that reach into its slots
        assert own[0] in computed and own[-1] in computed and all(t in computed for t in (*needed[:1], *needed[-1:]))
        owners[own.start : own.stop] += 1
        segments.append(own)
    assert (owners == 1).all()

    # Teams take segments as those of the other kernel take tiles.
    assert grid.all_segments == rows * grid.segments and 1 <= grid.blocks <= multiprocessors
    teams, rest = divmod(grid.threads, plan.threads)
    assert 1 <= teams <= plan.teams and rest == 0 and grid.stride == grid.blocks * teams
    assert (teams - 1) * grid.blocks < grid.all_segments, "a team without a segment in every block"
    first = [block + grid.blocks * team for block in range(grid.blocks) for team in range(teams)]
    taken = np.sort(np.concatenate([np.arange(segment, grid.all_segments, grid.stride) for segment in first]))
    np.testing.assert_array_equal(taken, np.arange(grid.all_segments))
    np.testing.assert_array_equal(rows_of(grid, taken), np.repeat(np.arange(rows), grid.segments))

    # The ends: edges.cuh keeps `side` positions of each, and teams fold those alone that lie within a segment.
    side, folds = 2 * spec.margin + 1, spec.margin > 0 and spec.pad_mode != "constant"
    q = np.arange(padded)
    assert grid.edge_length == (np.count_nonzero((q < side) | (q >= padded - side)) if folds else 0)
    if grid.fold:
        assert folds and spec.pad_mode == "reflect" and padded >= 2 * side
        assert segments[0].stop * spec.hop_length >= side and segments[-1].start * spec.hop_length <= padded - side
    return grid


PADDINGS = [
    (True, pad, mode) for pad, mode in [*((0, mode) for mode in PAD_MODES), (5, "reflect"), (70, "reflect"), (-3, "circular")]
]


@pytest.mark.parametrize("center,pad,mode", [*PADDINGS, (False, 0, "reflect"), (False, 9, "replicate")])
@pytest.mark.parametrize("n_fft,hop", [(2, 1), (5, 2), (8, 1), (8, 3), (8, 11), (64, 16), (64, 1)])
def test_every_hop_of_the_gradient_has_one_owner(n_fft, hop, center, pad, mode):
    spec = StftSpec(n_fft, n_fft, hop, pad, center=center, pad_mode=mode)
    folded = 0
    # sm_75 has tiles of fewer frames, and fewer teams; 1024 filters make both fewer still.
    for plan in {make_backward_plan(spec, arch, n_mels) for arch, n_mels in ((HOPPER, 4), (architecture(7, 5), 1024))}:
        for n_samples in (*range(1, 12), 33, 64, 65, 150, 701):
            try:
                spec.check_length(n_samples)
            except ValueError:
                continue
            for rows, multiprocessors in ((1, 1), (1, 7), (1, 132), (3, 2), (5, 7), (40, 3)):
                folded += check_segments(spec, plan, n_samples, rows, multiprocessors).fold
            # All positions that share a sample with others, or may: among those that are kept.
            index, valid = spec.source_index(0, n_samples + 2 * (spec.margin + pad), n_samples)
            q = np.arange(len(index))
            moved = q[valid & (index != q - spec.margin - pad)]
            shared = q[valid & np.isin(index, index[moved])] if len(moved) else moved
            side = 2 * spec.margin + 1
            assert ((shared < side) | (shared >= len(q) - side)).all()
    assert bool(folded) == (center and mode == "reflect"), "long rows of reflected signals are folded by their teams, and only they"


@pytest.mark.parametrize("rows", [1, 2, 31, 264, 265, 1000])
@pytest.mark.parametrize("n_samples", [1, 8000, 30_001, 480_000])
def test_owners_at_usual_sizes(n_samples, rows):
    for n_fft, hop, n_mels in ((400, 160, 128), (512, 10, 80), (1024, 256, 80), (2048, 512, 128), (2205, 2300, 80)):
        spec = StftSpec(n_fft, n_fft, hop, pad_mode="replicate" if n_samples == 1 else "reflect")
        for arch in (HOPPER, architecture(7, 5)):
            check_segments(spec, make_backward_plan(spec, arch, n_mels), n_samples, rows, 132)


@pytest.mark.parametrize("rows", [1, 3, 32, 200, 1000])
@pytest.mark.parametrize("n_fft,hop,n_mels", [(400, 160, 128), (64, 1, 20), (1024, 256, 80), (4096, 512, 128), (16384, 4096, 80)])
def test_long_rows_are_not_computed_twice(n_fft, hop, n_mels, rows):
    """A segment begins with frames of the one before: few, if it is long."""
    spec = spec_of(n_fft, hop)
    plan = make_backward_plan(spec, HOPPER, n_mels)
    workers = 132 * plan.teams
    least = 4 * (plan.overlap + plan.frames_per_tile) * max(1, workers // rows)  # frames: four times what a segment may add
    for frames in (least, 2 * least + 1, 10 * least + 77):
        grid = launch_backward(spec, plan, (frames - 1) * hop, rows, 132)
        computed = grid.segments * grid.tiles * plan.frames_per_tile
        assert computed <= 1.6 * frames
        # And the team that has most of them: as many as if they were dealt out evenly, or little more.
        most = -(-grid.all_segments // workers) * grid.tiles * plan.frames_per_tile
        assert most <= 1.6 * frames * max(1, rows / workers)


@pytest.mark.parametrize("center,pad,mode", [(True, 0, "reflect"), (True, -3, "circular"), (False, 5, "constant")])
@pytest.mark.parametrize("n_fft", [5, 8])
def test_frames_where_an_inner_tile_of_the_gradient_may_start(n_fft, center, pad, mode):
    for hop in (1, 3, n_fft, n_fft + 3):
        spec = StftSpec(n_fft, n_fft, hop, pad, center=center, pad_mode=mode)
        for plan in {make_backward_plan(spec, arch, n_mels) for arch, n_mels in ((HOPPER, 4), (architecture(7, 5), 4096))}:
            span = (plan.frames_per_tile - 1) * hop + n_fft
            for n_samples in [*range(1, 12), 60, 61, 200, 701]:
                try:
                    spec.check_length(n_samples)
                except ValueError:
                    continue
                grid = launch_backward(spec, plan, n_samples, 1, 1)
                for t in range(-(-n_samples // hop) + 2 * plan.frames_per_tile):
                    index, valid = spec.source_index(t * hop, span, n_samples)
                    untouched = valid.all() and (index == t * hop - spec.margin - pad + np.arange(span)).all()
                    assert untouched == (0 <= t - grid.first_inner < grid.inner), (hop, plan, n_samples, t)


@pytest.mark.parametrize("n_samples,rows", [(0, 2**31 - 2**20), (100, 2**31), (2**50, 2**32)])
def test_launch_limits_of_the_gradient(n_samples, rows):
    spec = spec_of(400, 160)
    plan = make_backward_plan(spec, HOPPER, 80)
    with pytest.raises(UnsupportedError, match=f"{rows} waveforms of {n_samples} samples are more than one launch can hold"):
        launch_backward(spec, plan, n_samples, rows, 132)
    assert launch_backward(spec, plan, 0, 2**31 - 2**20 - 1, 132).blocks == 132


# --- bank conflicts: the addresses of fft.cuh and project.cuh, warp by warp ----------------------------------------------------


def wavefronts(words, active, width):
    """(needed, ideal) of accesses (n, threads) of ``width`` words: 32 banks of a word serve 32 / width lanes at once."""
    lanes = 32 // width
    active = np.broadcast_to(active, words.shape).reshape(-1, lanes)
    words = words.reshape(-1, lanes)[active.any(axis=1)]
    active = active[active.any(axis=1)]
    words = np.where(active, words, words[np.arange(len(words)), active.argmax(axis=1)][:, None])
    words = np.sort((words[:, :, None] + np.arange(width)).reshape(len(words), 32))
    distinct = np.diff(words, prepend=-1) != 0  # the same word twice is a broadcast
    banks = np.zeros((len(words), 32), int)
    np.add.at(banks, (np.arange(len(words))[:, None], words % 32), distinct)
    return int(banks.max(axis=1).sum()), len(words)


def accesses(plan, spec, sample_bytes):
    """(stage, words (n, threads), active (threads,), words a thread) of the shared-memory accesses after the samples are there."""
    threads = np.arange(plan.threads)
    frame, thread = threads % plan.frames_per_tile, threads // plan.frames_per_tile
    everyone, per_frame = np.ones(plan.threads, bool), plan.threads_per_frame
    m, row = plan.points, plan.r2 * plan.r3
    samples, exchange = frame * plan.sample_stride, 2 * frame * plan.frame_stride
    groups, per_lane = plan.bin_groups, plan.frames_per_tile // plan.bin_groups
    powers = frame % groups * per_lane + frame // groups

    def shares(count):
        """(index, stored) of each of a thread's items: those without one of their own repeat the last, but do not store it."""
        for first in range(0, count, per_frame):
            yield np.minimum(first + thread, count - 1), first + thread < count

    for c, stored in shares(row):
        j = np.arange(plan.r1)[:, None]
        at = samples + staged(plan, (1 + plan.paired) * (c + row * j))
        if plan.paired and plan.sample_stride % 2 == 0:
            yield "columns, load", at * sample_bytes // 4, everyone, sample_bytes // 2
        else:
            yield from (("columns, load", (at + half) * sample_bytes // 4, everyone, 1) for half in range(1 + plan.paired))
        yield "columns, store", exchange + 2 * (c + plan.row_stride * j), stored, 2
    for item, stored in shares(m // plan.r2) if plan.r2 > 1 else ():
        at = item // plan.r3 * plan.row_stride + item % plan.r3 + plan.r3 * np.arange(plan.r2)[:, None]
        yield "middle", exchange + 2 * at, stored, 2
    rows = m // plan.r3
    for u, stored in shares((rows + 1) // 2):
        j = np.arange(plan.r3)[:, None]
        for r in (u, np.where(u == 0, rows // 2, rows - u))[: 2 if plan.paired and rows > 1 else 1]:
            yield "rows, load", exchange + 2 * (r % plan.r1 * plan.row_stride + r // plan.r1 * plan.r3 + j), everyone, 2
        k = u + rows * j
        if plan.paired:  # u = 0 takes a branch of its own
            yield from (("rows, store", powers + bins * plan.frames_per_tile, stored & (u > 0), 1) for bins in (k, m - k))
        else:
            yield "rows, store", powers + np.minimum(k, spec.n_fft - k) * plan.frames_per_tile, stored, 1
    # One filter's eight lanes: which bins a warp's other three filters read at the same time is the bank's affair.
    lane = np.arange(32)
    bins = lane // groups + np.arange(spec.n_freqs)[:, None]
    yield "project", bins * plan.frames_per_tile + lane % groups * per_lane, lane < 8, per_lane
    yield "project, weights", 2 * (lane // 8 * plan.bin_slices + lane % 8 // groups)[None], lane < 32, 2


def conflicts(plan, spec, sample_bytes=4):
    """Stage to (needed, ideal), and of all together."""
    counts = {}
    for name, words, active, width in accesses(plan, spec, sample_bytes):
        for key in (name, "all"):
            counts[key] = tuple(map(sum, zip(counts.get(key, (0, 0)), wavefronts(words, active, width), strict=True)))
    return counts


@any_memory
@pytest.mark.parametrize("sample_bytes", [4, 2])
@usual
def test_no_bank_conflicts(n_fft, hop, sample_bytes, arch):
    spec = spec_of(n_fft, hop)
    plan = make_plan(spec, arch, sample_bytes)
    counts = conflicts(plan, spec, sample_bytes)
    if plan.frames_per_tile >= 4:
        assert {name: c for name, c in counts.items() if c[0] > c[1]} == {}, plan
    else:  # neighbouring lanes are then neighbouring columns of one frame, and no stride suits all three passes
        assert counts["all"][0] < 1.5 * counts["all"][1], (counts, plan)


@any_memory
@pytest.mark.parametrize("n_fft,hop", [(256, 64), (320, 160), (480, 120), (640, 160), (800, 200), (882, 220), (960, 240)])
@pytest.mark.parametrize("frames", TILES)
def test_few_bank_conflicts_in_any_tile(n_fft, hop, frames, arch):
    """What a measurement or FLASHMEL_FPB may choose. Tiles of 16 frames and more: a half warp is 16 frames, and has none."""
    spec = spec_of(n_fft, hop)
    try:
        counts = conflicts(make_plan(spec, arch, frames_per_tile=frames), spec)
    except ValueError as error:
        pytest.skip(str(error))  # names the tile, the architecture and n_fft that do not go together
    bound = {1: 1.5, 2: 1.5, 4: 1.1, 8: 1.1}.get(frames, 1.0)
    assert counts["all"][0] <= bound * counts["all"][1], counts


@pytest.mark.parametrize("n_fft", [4096, 8192])
def test_few_bank_conflicts_in_tiles_of_one_frame(n_fft):
    """Lanes are neighbouring rows there: without a stride of its own, a power of two puts them all into one bank."""
    spec = spec_of(n_fft)
    counts = conflicts(make_plan(spec, HOPPER, frames_per_tile=1), spec)
    assert counts["all"][0] < 1.5 * counts["all"][1], counts


def test_wavefronts_counts():
    lanes, on = np.arange(32)[None], np.ones(32, bool)
    assert wavefronts(lanes, on, 1) == (1, 1) and wavefronts(2 * lanes, on, 1) == (2, 1) and wavefronts(0 * lanes, on, 1) == (1, 1)
    assert wavefronts(2 * lanes, on, 2) == (2, 2) and wavefronts(32 * lanes, on, 2) == (32, 2)
    assert wavefronts(2 * lanes, lanes[0] < 8, 2) == (1, 1)


# --- the kernel's tables -------------------------------------------------------------------------------------------------------


def tables_of(fb, n_fft=64, normalized="none", window=None, **kwargs):
    plan = make_plan(spec_of(n_fft), HOPPER)
    return kernel_tables(plan, n_fft, normalized, np.ones(n_fft) if window is None else window, fb, **kwargs)


def records(tables):
    """(n_filters, 4): place of the first bin, rounds, place of the weights, row of mel."""
    return tables.filters[: tables.n_filters]


def unpacked(tables, n_freqs, plan):
    """The bank as project.cuh reads it: in a round a lane takes two bins, ``bin_slices`` apart, their weights side by side."""
    slices = plan.bin_slices
    weights = tables.filters[tables.n_filters :].view(np.float32).reshape(-1, 2)
    fb = np.zeros((n_freqs + 2 * slices, tables.n_filters), np.float32)  # with the zero bins behind the last
    for start, rounds, place, row in records(tables):
        first = start // plan.bin_groups
        assert start % plan.bin_groups == 0 and rounds >= 1 and 0 <= first <= len(fb) - 2 * slices * rounds
        assert place >= 0 and place + 4 * slices * (rounds - 1) + slices <= len(weights)
        for r in range(rounds):
            for lane in range(slices):
                bin = first + 2 * slices * r + lane
                fb[[bin, bin + slices], row] = weights[place + 4 * slices * r + lane]
    assert not fb[n_freqs:].any()
    return fb[:n_freqs]


def sparse(density):
    rng = np.random.default_rng(0)
    return rng.standard_normal((33, 9)) * (rng.random((33, 9)) < density)


BANKS = {
    "dense": np.random.default_rng(0).standard_normal((33, 5)),
    "gaps": sparse(0.2),
    "wide-and-narrow": np.tri(33, 40, -1),
    "zero": np.zeros((33, 4)),
    "one-bin": np.eye(33)[:, [0, 32, 7]],
    "zero-column": np.stack([np.zeros(33), np.ones(33), np.zeros(33)], 1),
    "nan": np.where(np.eye(33)[:, [3, 4]] > 0, np.nan, 0.0),
    "no-filters": np.zeros((33, 0)),
}


@pytest.mark.parametrize("frames", TILES)
@pytest.mark.parametrize("name", BANKS)
def test_filters_hold_the_whole_bank(name, frames):
    fb = BANKS[name]
    plan = make_plan(spec_of(64), HOPPER, frames_per_tile=frames)
    tables = kernel_tables(plan, 64, "none", np.ones(64), fb)
    assert tables.filters.dtype == np.int32 and tables.filters.shape[1] == 4 and tables.filters.flags.c_contiguous
    assert fb.shape[1] <= tables.n_filters < fb.shape[1] + 4 and tables.n_filters % 4 == 0
    bank = unpacked(tables, 33, plan)
    np.testing.assert_array_equal(bank[:, : fb.shape[1]], fb.astype(np.float32))
    assert not bank[:, fb.shape[1] :].any()
    # A warp's four filters are neighbours and go as many rounds as the widest of them needs, and no more.
    rows, rounds = (records(tables)[:, i].reshape(-1, 4) for i in (3, 1))
    assert sorted(rows[:, 0]) == list(range(0, tables.n_filters, 4)) and (rows == rows[:, :1] + np.arange(4)).all()
    for own, taken in zip(rows, rounds, strict=True):
        used = [np.flatnonzero(bank[:, row]) for row in own]
        widest = max(int(np.ptp(bins)) + 1 if len(bins) else 1 for bins in used)
        assert (taken == -(-widest // (2 * plan.bin_slices))).all()


@any_memory
def test_warps_get_much_the_same_work(arch):
    """Filters widen with the frequency: in plain order, the last warp would have the widest of every turn."""
    found = []
    for n_fft in (400, 512, 1024, 2048):
        plan = make_plan(spec_of(n_fft), arch)
        warps = plan.threads // 32  # each takes every warps-th group
        for n_mels in (23, 40, 64, 80, 128):
            fb = mel_filterbank(MelBankSpec(16000, n_fft, n_mels, 0.0, 8000.0)).numpy()
            _, rounds, _, row = records(kernel_tables(plan, n_fft, "none", np.ones(n_fft), fb))[::4].T
            most = [max(order[warp::warps].sum() for warp in range(warps)) for order in (rounds, rounds[np.argsort(row)])]
            assert most[0] <= min(most[1], rounds.sum() / warps + rounds.max()), (n_fft, n_mels)
            found.append(most)
    dealt, plain = np.sum(found, axis=0)
    assert dealt < plain


@pytest.mark.parametrize("n_fft", [2, 3, 4, 6, 61, 64, 66, 90, 225, 400, 441, 450, 882, 1024, 2048, 2205, 8192, 16384])
def test_factors(n_fft):
    plan = make_plan(spec_of(n_fft), HOPPER)
    window = np.random.default_rng(n_fft).random(n_fft)
    tables = tables_of(np.ones((n_fft // 2 + 1, 1)), n_fft, window=window)
    offsets = factor_offsets(plan)
    assert tables.factors.dtype == np.float32 and tables.factors.flags.c_contiguous
    assert tables.factors.shape == (factor_entries(plan), 4)
    assert list(offsets.values()) == sorted(offsets.values())

    def part(name, slots, items):
        """As the kernel reads it: slot s of item i is half s % 2 of entry s // 2 * items + i."""
        entries = tables.factors[offsets[name] :][: -(-slots // 2) * items].reshape(-1, items, 2, 2)
        return entries.swapaxes(1, 2).reshape(-1, items, 2)[:slots] @ np.array([1, 1j])

    m, row = plan.points, plan.r2 * plan.r3
    points = part("window_table", plan.r1, row).ravel()
    np.testing.assert_array_equal(points.real, np.float32(0.5 * window[0::2] if plan.paired else window))
    np.testing.assert_array_equal(points.imag, np.float32(0.5 * window[1::2] if plan.paired else 0 * window))
    k, c = np.mgrid[: plan.r1, :row]
    np.testing.assert_allclose(part("column_table", plan.r1, row), np.exp(-2j * np.pi * k * c / m), atol=1e-7)
    if plan.r2 > 1:
        k, c = np.mgrid[: plan.r2, : plan.r3]
        np.testing.assert_allclose(part("middle_table", plan.r2, plan.r3), np.exp(-2j * np.pi * k * c / row), atol=1e-7)
    if not plan.paired:
        assert offsets["separation_table"] == len(tables.factors)
        return
    # The separation's factors name the bins k that the kernel visits: with m - k (and m / 2, by itself) all of them, once.
    rows = plan.r1 * plan.r2
    turn = np.angle(part("separation_table", plan.r3, (rows + 1) // 2).astype(complex)) / (-2 * np.pi) * n_fft
    bins = np.rint(turn).astype(int) % n_fft
    assert np.abs(turn - np.rint(turn)).max() < 0.01
    if rows % 2:  # row 0 has no row rows / 2 beside it: its last slots are not used
        bins = np.concatenate([bins[:, 1:].ravel(), bins[: (plan.r3 + 1) // 2, 0]])
    visited = np.concatenate([bins.ravel(), m - bins.ravel()])
    alone = [m // 2] if m % 2 == 0 else []
    assert sorted({*visited.tolist(), *alone}) == list(range(m + 1))
    assert len(visited) - len(set(visited.tolist())) <= 1, "bin m / 2, its own partner, alone may be visited twice"


@pytest.mark.parametrize("n_fft", [64, 25])
@pytest.mark.parametrize("normalized", ["none", "window", "frame_length"])
@pytest.mark.parametrize("sample_scale", [1.0, 1 / 32768])
def test_scales_are_in_the_window(n_fft, normalized, sample_scale):
    window = np.full(n_fft, 0.5)
    energy = {"none": 1, "window": 0.25 * n_fft, "frame_length": n_fft}[normalized]
    fb = np.ones((n_fft // 2 + 1, 1))
    tables = tables_of(fb, n_fft, normalized, window, sample_scale=sample_scale)
    plain = tables_of(fb, n_fft, "none", window)
    end = factor_offsets(make_plan(spec_of(n_fft), HOPPER))["column_table"]
    np.testing.assert_allclose(tables.factors[:end], sample_scale / energy**0.5 * plain.factors[:end], rtol=1e-6)
    np.testing.assert_array_equal(tables.factors[end:], plain.factors[end:])
    np.testing.assert_array_equal(tables.filters, plain.filters)


@pytest.mark.parametrize("n_fft", [64, 400, 2048])
def test_quarter_turns_are_exact(n_fft):
    end = factor_offsets(make_plan(spec_of(n_fft), HOPPER))["column_table"]
    factors = tables_of(np.ones((n_fft // 2 + 1, 1)), n_fft).factors[end:]
    assert set(factors[np.abs(factors) < 1e-6].tolist()) == {0.0} and np.abs(factors).max() == 1.0
