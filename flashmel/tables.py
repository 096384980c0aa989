"""What the CUDA kernel reads beside the samples, built in NumPy float64, float32 out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .plan import BackwardPlan, LaunchPlan


def padded_window(window: np.ndarray, n_fft: int) -> np.ndarray:
    """The window centred in ``n_fft`` samples, the odd sample on the right, float64."""
    left = (n_fft - len(window)) // 2
    return np.pad(window.astype(np.float64), (left, n_fft - len(window) - left))


def window_scale(window: np.ndarray, n_fft: int, normalized: str) -> float:
    """The factor by which ``normalized`` (see :class:`StftSpec`) scales every bin's magnitude."""
    if normalized == "none":
        return 1.0
    energy = n_fft if normalized == "frame_length" else np.sum(np.square(window.astype(np.float64)))
    with np.errstate(divide="ignore"):  # an all-zero window scales to inf, and the bins to NaN
        return float(1.0 / np.sqrt(np.float64(energy)))


@dataclass(frozen=True)
class KernelTables:
    """What the kernel reads beside the samples: see ``Params`` in kernel/forward.cu."""

    factors: np.ndarray  # float32 (entries, 4): factor_table
    filters: np.ndarray  # int32 (entries, 4): place of the first bin, rounds, place of the weights, row of mel; then the weights
    n_filters: int  # n_mels up to a multiple of 4


def _unit(numerator: np.ndarray, denominator: int) -> np.ndarray:
    """exp(-2 pi i numerator / denominator), exact at multiples of a quarter turn."""
    turn = numerator % denominator
    root = np.exp(-2j * np.pi * turn / denominator)
    quarter, rest = np.divmod(4 * turn, denominator)
    return np.where(rest == 0, np.array([1, -1j, -1, 1j])[quarter % 4], root)


def _by_pairs(values: np.ndarray) -> np.ndarray:
    """(slots, items) complex to (ceil(slots / 2) * items, 4): two slots of an item in one entry, items side by side."""
    slots, items = values.shape
    padded = np.zeros((slots + slots % 2, items), dtype=np.complex128)
    padded[:slots] = values
    pairs = padded.reshape(-1, 2, items)
    return np.stack([pairs[:, 0].real, pairs[:, 0].imag, pairs[:, 1].real, pairs[:, 1].imag], axis=-1).reshape(-1, 4)


def _separation_bins(plan: LaunchPlan) -> np.ndarray:
    """(slots, pairs): the bin k of the s-th call of ``separate`` for row pair u, in the order of kernel/fft.cuh."""
    rows = plan.r1 * plan.r2
    slots = np.arange(plan.r3)[:, None]
    bins = np.arange((rows + 1) // 2)[None, :] + rows * slots
    from_row_0 = (plan.r3 + 1) // 2
    bins[from_row_0:, 0] = rows // 2 + rows * np.arange(plan.r3 - from_row_0)
    return bins


def kernel_tables(
    plan: LaunchPlan, n_fft: int, normalized: str, window: np.ndarray, fb: np.ndarray, sample_scale: float = 1.0
) -> KernelTables:
    """Tables of a plan, for a window (at most n_fft samples) and a filterbank (n_freqs, n_mels) of any shape of filter.

    ``sample_scale`` is what the waveform's samples are multiplied by: 1 / 32768 for 16-bit integers.
    """
    return KernelTables(factor_table(plan, n_fft, normalized, window, sample_scale), *_pack_filters(fb, plan))


def factor_table(plan: LaunchPlan, n_fft: int, normalized: str, window: np.ndarray, sample_scale: float = 1.0) -> np.ndarray:
    """Window, twiddle and separation factors, at the offsets of plan.factor_offsets."""
    columns = plan.r2 * plan.r3
    values = padded_window(window, n_fft) * (window_scale(window, n_fft, normalized) * sample_scale)
    if plan.paired:
        values = 0.5 * (values[0::2] + 1j * values[1::2])  # the separation of the half-size transform gives 2 X
    parts = [
        _by_pairs(values.reshape(plan.r1, columns)),
        _by_pairs(_unit(np.outer(np.arange(plan.r1), np.arange(columns)), plan.points)),
    ]
    if plan.r2 > 1:
        parts.append(_by_pairs(_unit(np.outer(np.arange(plan.r2), np.arange(plan.r3)), columns)))
    if plan.paired:
        parts.append(_by_pairs(_unit(_separation_bins(plan), n_fft)))
    return np.ascontiguousarray(np.concatenate(parts), dtype=np.float32)


def bin_table(fb: np.ndarray, plan: BackwardPlan, power: float) -> np.ndarray:
    """The filterbank (n_freqs, n_mels) bin by bin, times ``power``: int32 (entries_per_bin * n_freqs, 4).

    An entry is the weights of two of the bin's filters and the places, in bytes, of those filters in a tile's mel gradients; the
    i-th entries of all bins lie side by side.
    """
    n_freqs, n_mels = fb.shape
    terms = 2 * plan.entries_per_bin
    fb = np.pad(fb, ((0, 0), (0, max(0, terms - n_mels))))
    filters = np.argsort(fb == 0, axis=1, kind="stable")[:, :terms]  # those that are not 0 first, in their order
    weights = (power * np.take_along_axis(fb, filters, axis=1)).astype(np.float32)
    places = np.minimum(filters, n_mels - 1).astype(np.int32) * (4 * plan.frames_per_tile)
    by_entry = (part.reshape(n_freqs, plan.entries_per_bin, 2).transpose(1, 0, 2) for part in (weights.view(np.int32), places))
    return np.ascontiguousarray(np.concatenate([*by_entry], axis=-1).reshape(-1, 4))


def entries_per_bin(fb: np.ndarray) -> int:
    """Half of the largest number of filters that share a bin: 1 for triangles as in mel filterbanks."""
    return max(1, -(-int((fb != 0).sum(axis=1).max(initial=0)) // 2))


def _pack_filters(fb: np.ndarray, plan: LaunchPlan) -> tuple[np.ndarray, int]:
    """What project.cuh reads, and for how many filters.

    A warp takes four neighbouring filters at a time, all with as many rounds as the widest of them. In a round each of a filter's
    ``bin_slices`` lanes takes two bins, ``bin_slices`` apart: its two weights lie side by side, the lanes of the four filters one
    after another.
    """
    n_freqs, n_mels = fb.shape
    slices = plan.bin_slices
    fb = np.pad(fb, ((0, 2 * slices), (0, -n_mels % 4)))
    used = fb != 0  # NaN counts
    first = used.argmax(axis=0)
    count = np.where(used.any(axis=0), len(fb) - used[::-1].argmax(axis=0) - first, 0)
    rounds = (-(-count // (2 * slices))).reshape(-1, 4).max(axis=1, initial=1)
    first = np.minimum(first, len(fb) - 2 * slices * np.repeat(rounds, 4))  # no round past the zero bins behind the last

    filters, weights, place = [np.zeros((0, 4))], [np.zeros(0)], 0
    for group in _deal(rounds, plan.threads // 32):
        own = np.arange(4 * group, 4 * group + 4)
        bins = first[own, None] + np.arange(2 * slices * rounds[group])
        weights.append(fb[bins, own[:, None]].reshape(4, -1, 2, slices).transpose(1, 0, 3, 2).ravel())
        starts = place + slices * np.arange(4)
        filters.append(np.stack([first[own] * plan.bin_groups, np.full(4, rounds[group]), starts, own], axis=1))
        place += 4 * slices * rounds[group]
    flat = np.concatenate(weights).astype(np.float32)  # a multiple of 4
    return np.concatenate([np.concatenate(filters).astype(np.int32), flat.view(np.int32).reshape(-1, 4)]), 4 * len(rounds)


def _deal(work: np.ndarray, warps: int) -> np.ndarray:
    """The order in which warps, each taking every ``warps``-th, get much the same work."""
    order = np.argsort(-work, kind="stable")
    hands: list[list[int]] = [[] for _ in range(warps)]
    for begin in range(0, len(order), warps):  # in each turn the most work to who has least
        hands.sort(key=lambda hand: work[hand].sum())
        for hand, item in zip(hands, order[begin : begin + warps], strict=False):
            hand.append(item)
    hands.sort(key=len, reverse=True)  # who has one more comes first
    turns = range(max(map(len, hands)))
    return np.array([hand[turn] for turn in turns for hand in hands if turn < len(hand)], dtype=int)
