"""What front-ends do to features over time: a floor below the maximum, mean and variance; frames joined."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .reference import is_differentiated
from .spec import Normalization


def normalize(features: Tensor, rule: Normalization, valid: Tensor | int | None = None, *, time_major: bool = False) -> Tensor:
    """Features normalised over time, each row by its own valid frames.

    Args:
        features: (..., n_mels, frames), or (..., frames, n_mels) if ``time_major``; floating point.
        rule: what to do.
        valid: frames of each row that count, a number or an integer tensor of the batch's shape; all if None. Those behind are not
            looked at and hold ``rule.pad_value`` in the result.

    Returns:
        As ``features``, differentiable. On a CPU, where no gradient is recorded, a row's numbers do not depend on its batch, bit
        for bit (but for rows of one maximum).
    """
    if features.numel() == 0:
        return features
    rows = features if time_major else features.mT
    rows = rows.reshape(-1, *rows.shape[-2:])
    n_rows, n_frames = rows.shape[:2]
    if valid is None:
        valid = n_frames
    together = 1  # rows of one maximum
    if rule.kind == "maximum" and rule.scope != "sample":
        together = n_rows if rule.scope == "batch" else features.shape[-3] if features.dim() > 2 else 1
    plain = torch.compiler.is_compiling() or is_differentiated(features) or features.device.type != "cpu"
    if plain or together > 1:
        counts = valid.reshape(n_rows, 1, 1) if isinstance(valid, Tensor) else torch.full((n_rows, 1, 1), valid, device=rows.device)
        mask = torch.arange(n_frames, device=rows.device)[:, None] < counts
        out = _normalized(rows, rule, mask, counts, together).masked_fill(~mask, rule.pad_value)
        out = out if time_major else out.mT
    else:  # each row alone, its valid frames only: how sums round depends on shapes
        out = torch.empty_like(features.reshape(-1, *features.shape[-2:]))
        ends = valid.flatten().tolist() if isinstance(valid, Tensor) else [valid] * n_rows
        for own, row, end in zip(out if time_major else out.mT, rows, ends, strict=True):
            own[end:] = rule.pad_value
            if end:
                part = (row[:end] if time_major else row[:end].mT).contiguous()
                own[:end] = _normalized((part if time_major else part.mT)[None], rule, None, end)[0]
    return out.reshape(features.shape)


def stack_frames(features: Tensor, stack: int) -> Tensor:
    """(..., frames, n) to (..., frames // stack, stack * n); frames that are left over are dropped."""
    if stack == 1:
        return features
    count = features.shape[-2] // stack
    if torch.compiler.is_compiling():  # views of a slice would fix whether frames are left over
        whole = features.index_select(-2, torch.arange(count * stack, device=features.device))
        return whole.reshape(*features.shape[:-2], count, stack * features.shape[-1])
    return features[..., : count * stack, :].unflatten(-2, (-1, stack)).flatten(-2)


def _normalized(rows: Tensor, rule: Normalization, mask: Tensor | None, counts: Tensor | int, together: int = 1) -> Tensor:
    """All but the pad value, (rows, frames, n_mels); the counts are the mask's, (rows, 1, 1)."""
    if rule.kind == "maximum":
        known = rows if mask is None else rows.masked_fill(~mask, -math.inf)
        top = known.amax((1, 2), keepdim=True)
        if together > 1:
            top = top.reshape(-1, together).amax(1).repeat_interleave(together)[:, None, None]
        y = torch.maximum(rows, top - rule.range)
    else:

        def total(values: Tensor) -> Tensor:
            return (values if mask is None else values.masked_fill(~mask, 0)).sum(1, keepdim=True)

        def at_least_one(count: Tensor | int) -> Tensor | int:
            return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)

        y = rows - total(rows) / at_least_one(counts)
        if rule.kind == "variance":
            y = y / _deviation(total(y.square()) / at_least_one(counts - rule.ddof), rule)
    if rule.gain != 1.0:
        y = y * rule.gain
    return y + rule.bias if rule.bias else y


def _deviation(variance: Tensor, rule: Normalization) -> Tensor:
    if rule.eps_mode == "variance" and rule.eps:
        return (variance + rule.eps).sqrt()
    still = variance == 0  # where the root has no derivative, and x - mean is 0
    return (variance.masked_fill(still, 1.0).sqrt() + rule.eps).masked_fill(still, math.inf)
