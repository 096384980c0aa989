"""The mel filterbank against torchaudio's and librosa's, and its degenerate cases."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from flashmel import MelSpectrogram
from flashmel.filterbank import mel_filterbank
from flashmel.spec import MelBankSpec
from flashmel.tables import padded_window, window_scale

BANKS = [
    MelBankSpec(16000, 400, 128, 0.0, 8000.0),
    MelBankSpec(16000, 512, 80, 20.0, 7600.0),
    MelBankSpec(22050, 1024, 80, 0.0, 8000.0),
    MelBankSpec(44100, 2048, 229, 30.0, 16000.0),
    MelBankSpec(48000, 16384, 512, 0.0, 24000.0),
    MelBankSpec(8000, 64, 1, 0.0, 4000.0),
    MelBankSpec(16000, 1023, 40, 0.0, 8000.0),
    MelBankSpec(16000, 400, 40, 0.0, 12000.0),
]


def _name(spec: MelBankSpec) -> str:
    return f"{spec.sample_rate}-{spec.n_fft}-{spec.n_mels}"


any_scale = pytest.mark.parametrize("norm,scale", [(n, s) for n in (None, "slaney") for s in ("htk", "slaney")])


def bank_of(spec: MelBankSpec, norm: str | None, scale: str, dtype: torch.dtype = torch.float64) -> Tensor:
    return mel_filterbank(replace(spec, norm=norm, mel_scale=scale), dtype)


@pytest.mark.parametrize("spec", BANKS, ids=_name)
@any_scale
def test_bank_matches_torchaudio(spec: MelBankSpec, norm: str | None, scale: str):
    functional = pytest.importorskip("torchaudio").functional
    theirs = functional.melscale_fbanks(
        spec.n_freqs, spec.f_min, spec.f_max, spec.n_mels, spec.sample_rate, norm=norm, mel_scale=scale
    )
    assert torch.equal(bank_of(spec, norm, scale, torch.float32), theirs)


# torchaudio spreads the bins over 0 … sample_rate // 2 whatever n_fft's parity; librosa's stop half a bin short when it is odd.
@pytest.mark.parametrize("spec", [s for s in BANKS if s.n_fft % 2 == 0], ids=_name)
@any_scale
def test_bank_matches_librosa(spec: MelBankSpec, norm: str | None, scale: str):
    librosa = pytest.importorskip("librosa")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = librosa.filters.mel(
            sr=spec.sample_rate,
            n_fft=spec.n_fft,
            n_mels=spec.n_mels,
            fmin=spec.f_min,
            fmax=spec.f_max,
            htk=scale == "htk",
            norm=norm,
            dtype=np.float64,
        )
    ours = bank_of(spec, norm, scale)
    torch.testing.assert_close(ours, torch.from_numpy(theirs.T), rtol=0, atol=1e-9 * float(ours.max()))


@any_scale
def test_dead_filters(norm: str | None, scale: str):
    bank = bank_of(BANKS[0], norm, scale)
    dead = (~bank.any(0)).nonzero().flatten().tolist()
    assert bank.isfinite().all() and (bank >= 0).all()
    if scale == "htk":
        assert dead == [0, 3, 6, 13]
    over = bank_of(MelBankSpec(16000, 512, 40, 0.0, 32000.0), norm, scale)
    assert over.isfinite().all() and not over[:, -1].any()


@pytest.mark.parametrize("edge", [0.0, 1000.0])
@any_scale
def test_band_of_no_width_is_zero(edge: float, norm: str | None, scale: str):
    bank = bank_of(MelBankSpec(16000, 400, 23, edge, edge), norm, scale)
    assert bank.shape == (201, 23) and not bank.any()


def test_warnings_say_why():
    def messages(**kwargs: object) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module = MelSpectrogram(**kwargs)
            count = len(caught)
            module(torch.randn(4000))
        assert len(caught) == count, "a call warns again"
        assert all(w.filename == __file__ for w in caught), "the warning does not point at the caller"
        return [str(w.message) for w in caught]

    assert messages(n_mels=40) == []
    (defaults,) = messages()
    assert "4 of 128" in defaults and "0, 3, 6, 13" in defaults and "201 frequency bins" in defaults
    (no_width,) = messages(f_min=500.0, f_max=500.0, n_mels=4)
    assert "4 of 4" in no_width and "both 500.0 Hz" in no_width
    (zero,) = messages(f_max=0.0, n_mels=4)
    assert "both 0.0 Hz" in zero
    (over,) = messages(f_max=32000.0, n_mels=40, n_fft=1024)
    assert "32000.0 Hz lies above the Nyquist frequency of 8000 Hz" in over
    (onesided,) = messages(n_mels=40, onesided=False)
    assert "onesided" in onesided


def test_f_max_above_nyquist_has_the_references_values():
    torchaudio = pytest.importorskip("torchaudio")
    ours = MelSpectrogram(f_max=32000.0, n_mels=40, n_fft=1024).mel_scale.fb
    theirs = torchaudio.transforms.MelSpectrogram(f_max=32000.0, n_mels=40, n_fft=1024).mel_scale.fb
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("length,n_fft,left", [(4, 4, 0), (3, 4, 0), (1, 4, 1), (3, 6, 1), (4, 7, 1)])
def test_padded_window(length: int, n_fft: int, left: int):
    padded = padded_window(np.ones(length, dtype=np.float32), n_fft)
    assert padded.dtype == np.float64 and padded.tolist() == [0.0] * left + [1.0] * length + [0.0] * (n_fft - length - left)


def test_window_scale():
    window = np.full(4, 0.5, dtype=np.float32)
    assert window_scale(window, 16, "none") == 1.0
    assert window_scale(window, 16, "window") == 1.0
    assert window_scale(window, 16, "frame_length") == 0.25
    assert window_scale(np.zeros(4), 16, "window") == np.inf
