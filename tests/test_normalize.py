"""Normalisation over time against its definition in NumPy float64; rows alone; gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import noise
from torch import Tensor

from flashmel.normalize import Normalization, normalize

RULES = {
    "maximum": Normalization("maximum", 1.5, gain=0.25, bias=1.0),
    "maximum-batch": Normalization("maximum", 1.5, "batch", pad_value=-1.0),
    "mean": Normalization("mean", pad_value=7.0),
    "variance": Normalization("variance"),
    "variance-std": Normalization("variance", ddof=1, eps=0.1, bias=2.0),
    "variance-inside": Normalization("variance", ddof=1, eps=0.1, eps_mode="variance", gain=-3.0),
}
all_rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
layouts = pytest.mark.parametrize("time_major", (False, True))


def oracle(rows: np.ndarray, rule: Normalization, valid: list[int]) -> np.ndarray:
    """(rows, frames, n_mels), by the definition."""
    out = np.full_like(rows, rule.pad_value)
    top = max(row[:n].max() for row, n in zip(rows, valid, strict=True) if n)
    for row, own, n in zip(rows, out, valid, strict=True):
        x = row[:n]
        if n == 0:
            continue
        largest = top if rule.scope == "batch" else x.max()
        y = np.maximum(x, largest - rule.range) if rule.kind == "maximum" else x - x.mean(0)
        if rule.kind == "variance":
            v = (y**2).sum(0) / max(n - rule.ddof, 1)
            s = np.sqrt(v + rule.eps) if rule.eps_mode == "variance" else np.sqrt(v) + rule.eps
            y = np.divide(y, s, out=np.zeros_like(y), where=v > 0)
        own[:n] = rule.gain * y + rule.bias
    return out


@all_rules
@layouts
def test_is_its_definition(rule: Normalization, time_major: bool):
    rows = 10 * noise(6, 50, 7, dtype=torch.float64) + 3
    rows[4] = 2.0  # no variance
    valid = [50, 31, 1, 0, 50, 2]
    for given in (None, 33, torch.tensor(valid)):
        counts = valid if isinstance(given, Tensor) else [50 if given is None else given] * 6
        expected = torch.from_numpy(oracle(rows.numpy(), rule, counts))
        x = rows if time_major else rows.mT.contiguous()
        for recorded in (False, True):
            got = normalize(x.clone().requires_grad_(recorded), rule, given, time_major=time_major).detach()
            torch.testing.assert_close(got if time_major else got.mT, expected, rtol=1e-9, atol=1e-9)
    batched = normalize(x.reshape(2, 3, *x.shape[1:]), rule, torch.tensor(valid).reshape(2, 3), time_major=time_major)
    assert torch.equal(batched.flatten(0, 1), normalize(x, rule, torch.tensor(valid), time_major=time_major))


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.scope != "batch"])
@layouts
def test_rows_do_not_depend_on_their_batch(name: str, time_major: bool):
    rule = RULES[name]
    rows, valid = noise(4, 501, 80), torch.tensor([501, 500, 37, 1])
    junk = rows.masked_fill(torch.arange(501)[:, None] >= valid[:, None, None], torch.nan)
    x = junk if time_major else junk.mT.contiguous()
    got = normalize(x, rule, valid, time_major=time_major)
    assert got.isfinite().all()
    for i, n in enumerate(valid.tolist()):
        alone = rows[i, :n].contiguous() if time_major else rows[i, :n].mT.contiguous()
        expected = normalize(alone, rule, time_major=time_major)
        assert torch.equal(got[i].narrow(0 if time_major else 1, 0, n), expected)


@all_rules
def test_gradients(rule: Normalization):
    x = noise(3, 5, 9, dtype=torch.float64).requires_grad_()
    valid = torch.tensor([9, 6, 0])
    assert torch.autograd.gradcheck(lambda x: normalize(x, rule, valid), x, fast_mode=True)
    if rule.kind != "maximum":  # which has kinks
        assert torch.autograd.gradgradcheck(lambda x: normalize(x, rule, valid), x, fast_mode=True)
    still = torch.ones(2, 5, 9).requires_grad_()
    (gradient,) = torch.autograd.grad((normalize(still, rule) * noise(2, 5, 9)).sum(), still)
    assert gradient.isfinite().all()


def test_what_is_refused():
    for fields, message in (
        ({"kind": "median"}, "kind must be one of"),
        ({"kind": "maximum", "scope": "channel"}, "scope must be one of"),
        ({"kind": "variance", "eps_mode": "none"}, "eps_mode must be one of"),
        ({"kind": "variance", "ddof": 2}, "ddof must be one of"),
        ({"kind": "variance", "eps": -1.0}, "must not be negative"),
        ({"kind": "maximum", "range": -1.0}, "must not be negative"),
    ):
        with pytest.raises(ValueError, match=message):
            Normalization(**fields)
