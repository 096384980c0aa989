"""What the CUDA kernel reads beside the samples, built in NumPy float64, float32 out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .plan import LaunchPlan


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
    """What the kernel reads beside the samples: see ``Params`` in kernel/kernel.cu."""

    factors: np.ndarray  # float32 (entries, 4): window, twiddles, separation, at the offsets of factor_offsets
    filters: np.ndarray  # int32 (n_mels, 4): first bin, rounds of 2 * bin_slices bins, place of the first weight, 0
    weights: np.ndarray  # float32 (n,)


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


def factor_offsets(plan: LaunchPlan) -> dict[str, int]:
    """Where each part of ``KernelTables.factors`` starts, in entries."""
    column_entries = -(-plan.r1 // 2) * plan.r2 * plan.r3
    middle_entries = -(-plan.r2 // 2) * plan.r3 if plan.r2 > 1 else 0
    return {
        "window_table": 0,
        "column_table": column_entries,
        "middle_table": 2 * column_entries,
        "separation_table": 2 * column_entries + middle_entries,
    }


def kernel_tables(plan: LaunchPlan, n_fft: int, normalized: str, window: np.ndarray, fb: np.ndarray) -> KernelTables:
    """Tables of a plan, for a window (at most n_fft samples) and a filterbank (n_freqs, n_mels) of any shape of filter."""
    half, columns = n_fft // 2, plan.r2 * plan.r3
    # The kernel's separation of the half-size transform gives 2 X.
    pairs = padded_window(window, n_fft) * (0.5 * window_scale(window, n_fft, normalized))
    parts = [
        _by_pairs((pairs[0::2] + 1j * pairs[1::2]).reshape(plan.r1, columns)),
        _by_pairs(_unit(np.outer(np.arange(plan.r1), np.arange(columns)), half)),
    ]
    if plan.r2 > 1:
        parts.append(_by_pairs(_unit(np.outer(np.arange(plan.r2), np.arange(plan.r3)), columns)))
    parts.append(_by_pairs(_unit(_separation_bins(plan), n_fft)))

    nonzero = fb != 0  # NaN counts
    used = nonzero.any(axis=0)
    first = np.where(used, nonzero.argmax(axis=0), 0)
    count = np.where(used, fb.shape[0] - nonzero[::-1].argmax(axis=0) - first, 0)
    # In a round each of the slices' lanes takes two bins, bin_slices apart: its two weights lie side by side.
    slices = plan.bin_slices
    rounds = -(-count // (2 * slices))
    weights = []
    for m, (begin, bins) in enumerate(zip(first, count, strict=True)):
        padded = np.zeros(rounds[m] * 2 * slices)
        padded[:bins] = fb[begin : begin + bins, m]
        weights.append(padded.reshape(-1, 2, slices).swapaxes(1, 2).ravel())
    place = 2 * slices * (np.cumsum(rounds) - rounds)
    filters = np.stack([first, rounds, place, np.zeros_like(first)], axis=1)
    return KernelTables(
        np.ascontiguousarray(np.concatenate(parts), dtype=np.float32),
        np.ascontiguousarray(filters, dtype=np.int32),
        np.concatenate([*weights, np.zeros(2)]).astype(np.float32),  # never empty
    )
