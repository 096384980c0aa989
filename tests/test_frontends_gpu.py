"""Front-ends on a GPU: parity, batch independence, gradients, no wait for the device."""

from __future__ import annotations

import pytest
import torch
from test_frontends import GATES, parity

from flashmel import frontends
from flashmel.frontends import frontend

pytestmark = pytest.mark.gpu
all_names = pytest.mark.parametrize("name", frontends.names())


@pytest.mark.parametrize("case", parity.REFERENCES)
def test_parity(case: str):
    sample_rate = frontends.recipe(parity.REFERENCES[case][0]).sample_rate
    record = parity.measure(case, parity.speech_like(sample_rate), "cuda")
    for kind, gates in (("ref", GATES[case][:2]), ("f64", GATES[case][2:])):
        if kind in record:  # a little more than on a CPU: filters are summed in another order
            assert record[kind]["mean"] <= 2 * gates[0] and record[kind]["max"] <= 2 * gates[1], record


@all_names
def test_rows_do_not_depend_on_their_batch(name: str):
    module = frontend(name).cuda()
    x = parity.speech_like(module.sample_rate, 1.5).cuda()
    n = len(x)
    batch, ends = torch.stack((x, x.flip(0), 0.5 * x)), [n, n - 1234, n // 2]
    junk = batch.clone()
    for row, end in zip(junk, ends, strict=True):
        row[end:] = torch.nan
    ragged, frames = module(junk, torch.tensor(ends, device="cuda"))
    axis = -2 if module.spec.epilogue.time_major else -1
    plain = module(batch)
    for i, end in enumerate(ends):
        assert torch.equal(plain[i], module(batch[i]))
        alone = module(batch[i, :end]).narrow(axis, 0, int(frames[i]))
        own = ragged[i].narrow(axis, 0, int(frames[i]))
        # What is summed over time may be summed in another order.
        close = {"rtol": 1e-4, "atol": 1e-4} if module.recipe.normalization is not None else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(own, alone, **close)


@all_names
def test_nothing_waits_for_the_device(name: str):
    module = frontend(name).cuda()
    x = parity.speech_like(module.sample_rate, 1.0).cuda().repeat(2, 1)
    lengths = torch.tensor([x.shape[1], x.shape[1] // 2], device="cuda")
    module(x), module(x, lengths)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(x), module(x, lengths)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@all_names
def test_gradients(name: str):
    module, double = frontend(name).cuda(), frontend(name).double()
    x = parity.speech_like(module.sample_rate, 1.0)
    waveform, lengths = torch.stack((x, torch.zeros_like(x))), torch.tensor([len(x) - 777, len(x)])
    leaf = waveform.cuda().requires_grad_()
    out, _ = module(leaf, lengths.cuda())
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).masked_fill(out.detach().cpu().isinf(), 0)
    (gradient,) = torch.autograd.grad((out * weight.cuda()).masked_fill(out.isinf(), 0).sum(), leaf)
    exact = waveform.double().requires_grad_()
    truth, _ = double(exact, lengths)
    (expected,) = torch.autograd.grad((truth * weight).masked_fill(truth.isinf(), 0).sum(), exact)
    assert gradient.isfinite().all() and (gradient[0, len(x) - 777 :] == 0).all()
    error = (gradient.cpu() - expected).norm() / expected.norm()
    assert error < 1e-3, error  # 1.6e-4 at most on a CPU
