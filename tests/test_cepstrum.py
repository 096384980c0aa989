"""AmplitudeToDB and MFCC against torchaudio, and where they are meant to differ from it."""

from __future__ import annotations

import warnings

import pytest
import torch
from cases import noise, speech

from flashmel import MFCC, AmplitudeToDB

torchaudio = pytest.importorskip("torchaudio")

CASES = (
    {},
    {"log_mels": True},
    {"norm": None},
    {"n_mfcc": 13, "melkwargs": {"n_fft": 400, "hop_length": 160, "n_mels": 23, "center": False}},
    {"sample_rate": 22050, "n_mfcc": 20, "melkwargs": {"n_fft": 1024, "n_mels": 64, "norm": "slaney", "mel_scale": "slaney"}},
    {"log_mels": True, "melkwargs": {"power": 1.0, "pad_mode": "constant"}},
)


@pytest.mark.parametrize("shape", ((3, 7), (2, 3, 7), (4, 2, 3, 7), (2, 4, 2, 3, 7)))
@pytest.mark.parametrize("top_db", (None, 0.0, 30.0))
@pytest.mark.parametrize("stype", ("power", "magnitude"))
def test_decibels_are_torchaudios(shape: tuple[int, ...], top_db: float | None, stype: str):
    x = noise(*shape).square() * (10.0 ** torch.arange(shape[0]))[(slice(None),) + (None,) * (len(shape) - 1)]
    expected = torchaudio.transforms.AmplitudeToDB(stype, top_db)(x)
    ours = AmplitudeToDB(stype, top_db, scope="channels")
    torch.testing.assert_close(ours(x), expected, rtol=0, atol=2e-5)
    for name in ("multiplier", "amin", "ref_value", "db_multiplier", "stype", "top_db"):
        assert getattr(ours, name) == getattr(torchaudio.transforms.AmplitudeToDB(stype, top_db), name)
    alone = AmplitudeToDB(stype, top_db)(x).reshape(-1, *shape[-2:])
    for row, own in zip(x.reshape(-1, *shape[-2:]), alone, strict=True):  # its own maximum: torchaudio's for one spectrogram
        torch.testing.assert_close(own, torchaudio.transforms.AmplitudeToDB(stype, top_db)(row), rtol=0, atol=2e-5)
    librosa = pytest.importorskip("librosa")
    convert = librosa.power_to_db if stype == "power" else librosa.amplitude_to_db
    together = AmplitudeToDB(stype, top_db, scope="batch")(x)
    expected = torch.from_numpy(convert(x.numpy(), ref=1.0, amin=1e-10, top_db=top_db))
    torch.testing.assert_close(together, expected, rtol=0, atol=2e-4)


def test_decibels_by_position():
    assert AmplitudeToDB("magnitude", 60.0).top_db == torchaudio.transforms.AmplitudeToDB("magnitude", 60.0).top_db == 60.0


@pytest.mark.parametrize("kwargs", CASES)
def test_coefficients_are_torchaudios(kwargs: dict):
    x = speech(3, 2, 9000)
    theirs = torchaudio.transforms.MFCC(**kwargs)
    ours = MFCC(**kwargs, scope="channels")
    expected = theirs(x)
    assert ours(x).shape == expected.shape and ours(x).is_contiguous()
    torch.testing.assert_close(ours(x), expected, rtol=1e-4, atol=5e-3)
    truth = theirs.double()(x.double())
    assert (ours(x) - truth).abs().max() <= 2 * (expected - truth).abs().max() + 1e-3
    double = MFCC(**kwargs, scope="channels").double()
    double.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(double(x.double()), truth, rtol=1e-9, atol=1e-9)
    assert {n: b.shape for n, b in ours.state_dict().items()} == {n: b.shape for n, b in theirs.state_dict().items()}


def test_a_checkpoint_of_torchaudios():
    theirs = torchaudio.transforms.MFCC(16000, 13, 2, "ortho", False, {"n_mels": 40})
    ours = MFCC(16000, 13, 2, "ortho", False, {"n_mels": 40})
    changed = {name: 1.5 * value for name, value in theirs.state_dict().items()}
    theirs.load_state_dict(changed, strict=True)
    ours.load_state_dict(changed, strict=True)
    x = speech(4000)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-3)
    ours.load_state_dict({}, strict=True)
    assert torch.equal(ours.dct_mat, changed["dct_mat"])


def test_a_row_does_not_depend_on_its_batch():
    mfcc = MFCC()
    x = speech(5, 9000) * torch.tensor([1.0, 1e-3, 0.1, 0.0, 10.0])[:, None]
    batch = mfcc(x)
    assert all(torch.equal(own, mfcc(row)) for row, own in zip(x, batch, strict=True))
    assert (batch[1] - MFCC(scope="channels")(x)[1]).abs().max() > 1  # torchaudio's floor of this row is another row's


def test_coefficients_have_gradients():
    x = speech(2, 3000).requires_grad_()
    theirs = torchaudio.transforms.MFCC(log_mels=True)(x)
    ours = MFCC(log_mels=True)(x)
    weight = noise(*ours.shape)
    (expected,), (got,) = (torch.autograd.grad((out * weight).sum(), x) for out in (theirs, ours))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    silence = torch.zeros(2, 3000).requires_grad_()
    (gradient,) = torch.autograd.grad(MFCC()(silence).sum(), silence)
    assert (gradient == 0).all()


@pytest.mark.parametrize("log_mels", [False, True])
def test_warmup(log_mels):
    mfcc = MFCC(melkwargs={"n_mels": 40, "pad": -3}, log_mels=log_mels)
    with torch.no_grad():
        mfcc.warmup(gradient=True)  # also here
    mfcc.warmup(torch.int16)


def test_module_behaviour():
    mfcc = MFCC(16000, 20)
    x = speech(4000)
    expected = mfcc(x)
    assert torch.equal(mfcc.half()(x), expected) and mfcc.dct_mat.dtype == torch.float32
    assert MFCC(dtype=torch.bfloat16)(x).dtype == MFCC(melkwargs={"dtype": torch.bfloat16})(x).dtype == torch.bfloat16
    assert mfcc(x[None][:0]).shape == (0, *expected.shape)
    assert "n_mfcc=20" in repr(mfcc) and "scope='sample'" in repr(mfcc)
    with pytest.warns(UserWarning, match="mel filters are zero everywhere"):
        MFCC(melkwargs={"n_fft": 64, "n_mels": 80})


def test_the_floor_can_be_set_and_left_out():
    for top_db in (20.0, None):
        ours, theirs = MFCC(scope="channels"), torchaudio.transforms.MFCC()
        ours.amplitude_to_DB.top_db = theirs.amplitude_to_DB.top_db = top_db
        torch.testing.assert_close(ours(speech(4000)), theirs(speech(4000)), rtol=1e-4, atol=1e-3)


def test_built_on_meta():
    with torch.device("meta"):
        mfcc = MFCC(16000, 20)
    assert torch.equal(mfcc.to_empty(device="cpu")(speech(4000)), MFCC(16000, 20)(speech(4000)))


def test_decibels_of_nothing():
    assert AmplitudeToDB(top_db=80.0)(torch.ones(2, 80, 0)).shape == (2, 80, 0)


def test_what_is_refused():
    for make, message in (
        (lambda: MFCC(dct_type=3), "dct_type must be one of"),
        (lambda: MFCC(norm="slaney"), "norm must be one of"),
        (lambda: MFCC(n_mfcc=41, melkwargs={"n_mels": 40}), "n_mfcc must be at most n_mels = 40, got 41"),
        (lambda: MFCC(n_mfcc=0), "n_mfcc must be a positive integer"),
        (lambda: MFCC(scope="row"), "scope must be one of"),
        (lambda: AmplitudeToDB("energy"), "stype must be one of"),
        (lambda: AmplitudeToDB(top_db=-1.0), "top_db must be"),
        (lambda: AmplitudeToDB(top_db="80"), "top_db must be a number of decibels .*got '80'"),
        (lambda: AmplitudeToDB()(torch.ones(3)), r"must have shape \(..., freq, time\), got \(3,\)"),
    ):
        with warnings.catch_warnings(), pytest.raises(ValueError, match=message):
            warnings.simplefilter("ignore")
            make()
