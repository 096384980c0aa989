"""The mel filterbank against torchaudio's and librosa's, and its degenerate cases; the bank as the gradient reads it."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from flashmel import MelSpectrogram
from flashmel.filterbank import kaldi_filterbank, librosa_filterbank, mel_filterbank
from flashmel.plan import architecture, make_backward_plan
from flashmel.spec import MelBankSpec, StftSpec
from flashmel.tables import bin_table, entries_per_bin, padded_window, window_scale

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


# --- the bank bin by bin -------------------------------------------------------------------------------------------------------


def _sparse(most: int) -> np.ndarray:
    """(33, 20), up to ``most`` filters in a bin, some signed, with bins and filters of none."""
    rng = np.random.default_rng(most)
    fb = rng.standard_normal((33, 20)) * (rng.random((33, 20)).argsort(axis=1) < rng.integers(0, most + 1, (33, 1)))
    fb[:, 7] = 0
    return fb


GRADIENT_BANKS = {  # and how many entries their bins take
    "triangles": (bank_of(MelBankSpec(8000, 64, 10, 0.0, 4000.0), None, "htk").numpy(), 1),
    "slaney": (bank_of(MelBankSpec(8000, 64, 12, 100.0, 3800.0), "slaney", "slaney").numpy(), 1),
    "dead-filters": (bank_of(MelBankSpec(8000, 64, 100, 0.0, 4000.0), None, "htk").numpy(), 1),
    "dense": (np.random.default_rng(0).standard_normal((33, 7)), 4),
    "dense-even": (np.random.default_rng(0).standard_normal((33, 8)), 4),
    "one-filter": (np.random.default_rng(0).random((33, 1)), 1),
    "one-bin": (np.eye(33)[:, [32, 0, 7]], 1),
    "one-crowded-bin": (np.concatenate([np.zeros((32, 9)), np.arange(9)[None]]), 4),
    "zero": (np.zeros((33, 4)), 1),
    "zero-filter": (np.zeros((33, 1)), 1),
    **{f"up-to-{most}": (_sparse(most), -(-most // 2)) for most in (2, 3, 5)},
}


@pytest.mark.parametrize("power", [1.0, 2.0, 0.5])
@pytest.mark.parametrize("name", GRADIENT_BANKS)
def test_gradients_of_bins_are_the_banks_product(name: str, power: float):
    fb, entries = GRADIENT_BANKS[name]
    n_freqs, n_mels = fb.shape
    assert entries_per_bin(fb) == entries
    for arch in (architecture(9, 0), architecture(7, 5)):
        plan = make_backward_plan(StftSpec(64, 64, 16), arch, n_mels, entries)
        table = bin_table(fb, plan, power)
        assert table.dtype == np.int32 and table.shape == (entries * n_freqs, 4) and table.flags.c_contiguous
        weights, places = table[:, :2].view(np.float32), table[:, 2:]
        # A tile's mel gradients are float32 (n_mels, frames): every filter's, from its place in bytes on.
        filters, rest = np.divmod(places, 4 * plan.frames_per_tile)
        assert not rest.any() and (filters >= 0).all() and (filters < n_mels).all(), "a read outside the gradients"
        g = np.random.default_rng(1).standard_normal((n_mels, plan.frames_per_tile))
        found = (weights[..., None] * g[filters]).sum(1)
        found = found.reshape(entries, n_freqs, -1).sum(0)  # all bins' i-th entries lie side by side
        np.testing.assert_allclose(found, power * fb @ g, rtol=1e-6, atol=1e-6)
        # To the bit the weights are the bank's, each filter's once.
        bank = np.zeros((n_freqs, n_mels), np.float32)
        np.add.at(bank, (np.tile(np.arange(n_freqs), entries)[:, None], filters), weights)
        np.testing.assert_array_equal(bank, (power * fb).astype(np.float32))


@pytest.mark.parametrize("entries", [2, 5])
def test_more_entries_than_a_bin_needs(entries: int):
    """A plan's number of them decides: a bank that takes fewer is filled up with weights of 0."""
    fb, _ = GRADIENT_BANKS["triangles"]
    plan = make_backward_plan(StftSpec(64, 64, 16), architecture(9, 0), 10, entries)
    table = bin_table(fb, plan, 2.0)
    least = bin_table(fb, make_backward_plan(StftSpec(64, 64, 16), architecture(9, 0), 10, 1), 2.0)
    assert table.shape == (33 * entries, 4) and not table[33:, :2].any()
    np.testing.assert_array_equal(table[:33, :2], least[:, :2])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bank_that_is_not_finite(value: float):
    """It must not be lost: the plain path's gradient is not finite either."""
    fb = np.zeros((33, 6))
    fb[4, 5] = value
    plan = make_backward_plan(StftSpec(64, 64, 16), architecture(9, 0), 6)
    weights = bin_table(fb, plan, 2.0)[:, :2].view(np.float32)
    assert entries_per_bin(fb) == 1
    assert not np.isfinite(weights[4]).all() and not weights[np.arange(33) != 4].any()


@pytest.mark.parametrize("spec", BANKS, ids=_name)
@any_scale
def test_mel_filters_take_one_entry_a_bin(spec: MelBankSpec, norm: str | None, scale: str):
    assert entries_per_bin(bank_of(spec, norm, scale).numpy()) == 1


@pytest.mark.parametrize(
    "args",
    (
        (16000, 400, 80, 0, 8000),
        (16000, 400, 128, 0, 8000),
        (24000, 1920, 80, 0, 8000),
        (44100, 2048, 320, 30, 22050),
        (11025, 512, 40, 0, 5512.5),
        (22050, 1023, 40, 0, 11025),
        (16000, 401, 40, 0, 8000),
    ),
)
def test_librosas_filters_bit_for_bit(args):
    librosa = pytest.importorskip("librosa")
    sample_rate, n_fft, n_mels, f_min, f_max = args
    for norm in ("slaney", None):
        expected = librosa.filters.mel(sr=sample_rate, n_fft=n_fft, n_mels=n_mels, fmin=f_min, fmax=f_max, norm=norm)
        spec = MelBankSpec(sample_rate, n_fft, n_mels, float(f_min), float(f_max), norm, "slaney")
        assert np.array_equal(librosa_filterbank(spec).numpy(), expected.T)


@pytest.mark.parametrize("args", ((23, 20.0, 8000.0), (80, 20.0, 7600.0), (128, 20.0, 8000.0)))
def test_kaldis_filters(args):
    kaldi = pytest.importorskip("torchaudio.compliance.kaldi")
    n_mels, f_min, f_max = args
    expected, _ = kaldi.get_mel_banks(n_mels, 512, 16000.0, f_min, f_max, 100.0, -500.0, 1.0)
    bank = kaldi_filterbank(MelBankSpec(16000, 512, n_mels, f_min, f_max))
    assert bank.shape == (257, n_mels) and bank.dtype == torch.float64 and (bank[-1] == 0).all()
    torch.testing.assert_close(bank[:-1].T.float(), expected, rtol=0, atol=3e-5)  # whose arithmetic is float32
