"""The functional form, and ``out=``."""

import pytest
import torch
from cases import noise

from flashmel import MelSpectrogram
from flashmel.functional import mel_spectrogram

any_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def tables(module):
    return module.spectrogram.window, module.mel_scale.fb


@any_device
@pytest.mark.parametrize(
    "kwargs", [{}, {"power": 1.0, "normalized": True}, {"pad": 7, "pad_mode": "constant"}, {"center": False}], ids=str
)
def test_is_the_module(kwargs, device):
    module = MelSpectrogram(n_fft=512, win_length=401, hop_length=160, n_mels=40, **kwargs).to(device)
    x = noise(2, 3, 4000).to(device)
    y = mel_spectrogram(x, *tables(module), 512, 160, **kwargs)
    assert torch.equal(y, module(x))
    assert mel_spectrogram(x, *tables(module), 512, 160, dtype=torch.float16, **kwargs).dtype == torch.float16


@any_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_out(dtype, device):
    module = MelSpectrogram(hop_length=160, n_mels=40).to(device)
    x = noise(2, 4000).to(device)
    expected = module(x).to(dtype)
    whole = torch.full((3, 41, 30), torch.nan, dtype=dtype, device=device)
    for out in (torch.empty_like(expected), whole[:2, 1:, :26], torch.empty(2, 26, 40, dtype=dtype, device=device).mT):
        for seed in (0, 1):  # on a GPU the second call goes straight to the kernel
            x = noise(2, 4000, seed=seed).to(device)
            assert mel_spectrogram(x, *tables(module), 400, 160, out=out) is out
            torch.testing.assert_close(out, module(x).to(dtype), rtol=1e-6 if dtype != torch.float16 else 1e-3, atol=0)
    assert whole[2].isnan().all() and whole[:, 0].isnan().all() and whole[..., 26:].isnan().all()


@any_device
def test_out_that_does_not_fit(device):
    module = MelSpectrogram(hop_length=160, n_mels=40).to(device)
    x, right = noise(2, 4000).to(device), torch.empty(2, 40, 26, device=device)
    for out in (right[:1], right[..., :25], right.long()):
        with pytest.raises(ValueError, match=r"out must be a floating-point tensor of shape \(2, 40, 26\) on "):
            mel_spectrogram(x, *tables(module), 400, 160, out=out)
    with pytest.raises(ValueError, match="records no gradient: call it under torch.no_grad"):
        mel_spectrogram(x.requires_grad_(), *tables(module), 400, 160, out=right)
    with torch.no_grad():
        mel_spectrogram(x, *tables(module), 400, 160, out=right)


@any_device
def test_gradient_and_errors(device):
    module = MelSpectrogram(hop_length=160, n_mels=40).to(device)
    x = noise(2, 4000).to(device).requires_grad_()
    actual, expected = (
        torch.autograd.grad(y.square().sum(), x)[0] for y in (mel_spectrogram(x, *tables(module), 400, 160), module(x))
    )
    assert torch.equal(actual, expected)
    with pytest.raises(ValueError, match="hop_length must be a positive integer, got 0"):
        mel_spectrogram(x, *tables(module), 400, 0)
    with pytest.raises(ValueError, match="too short for n_fft=400"):
        mel_spectrogram(x[:, :100], *tables(module), 400, 160)


def test_what_is_refused():
    module, x = MelSpectrogram(hop_length=161, n_mels=40), noise(4000)
    window, fb = tables(module)
    mel_spectrogram(x, window, fb, 400, 161)  # 400.0 == 400, but a call that was made before does not open the door to another
    for arguments, kwargs, message in (
        ((window, fb, 400.0, 161), {}, "n_fft must be a positive integer, got 400.0"),
        ((window, fb, 400, 161), {"center": "False"}, "center must be True or False, got 'False'"),
        ((window, fb, 400, 161), {"dtype": torch.int32}, "the result must have a floating dtype, got torch.int32"),
        ((window, fb, 400, 161), {"dtype": "float16"}, "the result must have a floating dtype, got 'float16'"),
        ((window, fb * 1j, 400, 161), {}, "window and filterbank must be real, got torch.float32 and torch.complex64"),
    ):
        with pytest.raises(ValueError, match=message):
            mel_spectrogram(x, *arguments, **kwargs)
    with pytest.raises(TypeError, match="fb must be a torch.Tensor, got ndarray"):
        mel_spectrogram(x, window, fb.numpy(), 400, 161)


@any_device
def test_compiled(device):
    module = MelSpectrogram(hop_length=160, n_mels=40).to(device)
    window, fb = tables(module)
    compiled = torch.compile(
        lambda x, out=None: mel_spectrogram(x, window, fb, 400, 160, out=out), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for length in (4000, 5000):
        x = noise(2, length).to(device)
        assert torch.equal(compiled(x), module(x))
        assert torch.equal(compiled(x, torch.empty_like(module(x))), module(x))
