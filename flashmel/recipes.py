"""The front-ends as data: what each model's features are made of, where that is written down, and what it was compared with."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .filterbank import exact_filterbank, kaldi_filterbank, librosa_filterbank, mel_filterbank
from .spec import NORMALIZATION_SCOPES, Epilogue, MelBankSpec, Normalization, StftSpec, is_finite, one_of, positive_int

FLT_EPSILON = 2.0**-23
INT16 = 32768.0  # the scale of Kaldi's samples


def _hann(n: int, periodic: bool) -> Tensor:
    return torch.hann_window(n, periodic=periodic, dtype=torch.float64, device="cpu")


def _hamming(n: int, periodic: bool) -> Tensor:
    return torch.hamming_window(n, periodic=periodic, dtype=torch.float64, device="cpu")


WINDOWS: dict[str, Callable[[int], Tensor]] = {  # length to values, float64
    "hann": partial(_hann, periodic=True),
    "hann-symmetric": partial(_hann, periodic=False),
    "hamming": partial(_hamming, periodic=True),
    "hamming-symmetric": partial(_hamming, periodic=False),
    "povey": lambda n: _hann(n, periodic=False).pow(0.85),
    "blackman-symmetric": lambda n: torch.blackman_window(n, periodic=False, dtype=torch.float64, device="cpu"),
    "rectangular": lambda n: torch.ones(n, dtype=torch.float64, device="cpu"),
}
TABLES: dict[str, Callable[[MelBankSpec], Tensor]] = {  # by whose rounding
    "exact": exact_filterbank,  # float64
    "librosa": librosa_filterbank,
    "torchaudio": partial(mel_filterbank, dtype=torch.float32),
    "kaldi": kaldi_filterbank,
}


@dataclass(frozen=True)
class Recipe:
    """A front-end: features of a waveform by ``spec``, ``window`` and ``bank`` (one launch), then what needs all of a row.

    ``mean`` and ``deviation`` may come as a list, an array or a tensor too, and are tuples afterwards.

    Raises:
        ValueError: naming the field and the value received.
    """

    sample_rate: int
    spec: StftSpec  # its epilogue also says to how many frames a row is filled up
    window: str  # of WINDOWS
    bank: MelBankSpec
    table: str = "exact"  # of TABLES
    right_padded: bool = False  # the window stands at the start of its n_fft samples, not in the middle
    mean: tuple[float, ...] | None = None  # of each mel's features, which become (x - mean) / deviation
    deviation: tuple[float, ...] | None = None
    normalization: Normalization | None = None
    stack: int = 1  # so many frames make one; those that are left over are dropped
    sample_multiple: int = 1  # zeros behind a row's samples make its length a multiple of this
    min_samples: int = 0  # and at least this
    n_samples: int | None = None  # or this number, or it is cut
    source: str = ""  # where the definition is
    compared_with: str = "nothing"  # what was run beside it, with the default options unless it names others
    not_checked: str = ""  # what nobody has looked at

    def __post_init__(self) -> None:
        one_of("window", self.window, tuple(WINDOWS))
        one_of("table", self.table, tuple(TABLES))
        for name in ("sample_rate", "stack", "sample_multiple"):
            positive_int(name, getattr(self, name))
        if self.min_samples != 0:
            positive_int("min_samples", self.min_samples)
        if self.n_samples is not None:
            least = self.spec.minimum_length - 2 * self.spec.pad
            if positive_int("n_samples", self.n_samples) < least:
                raise ValueError(f"n_samples must be at least {least}, which the padding and a frame need; got {self.n_samples}")
        if self.bank.n_fft != self.spec.n_fft:
            raise ValueError(f"bank must be one for the spec's n_fft = {self.spec.n_fft}, got n_fft = {self.bank.n_fft}")
        for name in ("mean", "deviation"):
            if (values := getattr(self, name)) is not None:
                object.__setattr__(self, name, _one_for_each_mel(name, values, self.bank.n_mels))
        if self.deviation is not None and 0 in self.deviation:
            raise ValueError(f"deviation must not be 0, got 0 for mel {self.deviation.index(0)}")
        if self.stack > 1 and not self.spec.epilogue.time_major:
            raise ValueError(f"stack={self.stack} needs a time-major epilogue: frames are joined along the features")


def _one_for_each_mel(name: str, values: Any, n_mels: int) -> tuple[float, ...]:
    listed = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(listed, (tuple, list)):
        raise ValueError(f"{name} must hold n_mels = {n_mels} numbers, got {values!r}")
    if len(listed) != n_mels or not all(map(is_finite, listed)):
        raise ValueError(f"{name} must hold n_mels = {n_mels} finite numbers, got {len(listed)}: {reprlib.repr(listed)}")
    return tuple(map(float, listed))


def _bank(sample_rate: int, n_fft: int, n_mels: int, f_min: float, f_max: float | None, scale: str = "slaney") -> MelBankSpec:
    """Filters up to f_max, or to the Nyquist frequency; "slaney" has unit area, "htk" unit height."""
    norm = "slaney" if scale == "slaney" else None
    return MelBankSpec(sample_rate, n_fft, n_mels, float(f_min), sample_rate / 2 if f_max is None else float(f_max), norm, scale)


def _centred(n_fft: int, hop_length: int, drop_last: bool = False) -> tuple[int, int]:
    """Margins that centre frame t at sample t * hop_length; without the last frame, if so asked."""
    return n_fft // 2, n_fft // 2 - hop_length * drop_last


def _same(n_fft: int, hop_length: int) -> tuple[int, int]:
    """Margins with which there are time // hop_length frames (if n_fft - hop_length is even)."""
    if hop_length > n_fft:
        raise ValueError(f"hop_length must be at most n_fft = {n_fft}, got {hop_length}")
    return (n_fft - hop_length) // 2, (n_fft - hop_length) // 2


def _standardised(mean: float, deviation: float) -> tuple[float, float]:
    """Gain and bias that make (x - mean) / deviation of x."""
    if deviation == 0:
        raise ValueError(f"deviation must not be 0, got {deviation!r}")
    return 1.0 / deviation, -mean / deviation


# ------------------------------------------------------------------------------------------------------------ speech models


def _whisper(
    n_mels: int = 80,
    n_samples: int | None = None,
    scope: str = "sample",
    frame_multiple: int = 1,
    **fields: Any,
) -> Recipe:
    end = Epilogue("log10", 1e-10, frame_multiple=frame_multiple)
    return Recipe(
        sample_rate=16000,
        spec=StftSpec(400, 400, 160, margins=_centred(400, 160, drop_last=True), epilogue=end),
        window="hann",
        bank=_bank(16000, 400, n_mels, 0, 8000),
        table="librosa",
        normalization=Normalization("maximum", 8.0, scope, gain=0.25, bias=1.0),
        n_samples=n_samples,
        **fields,
    )


def _voxtral_realtime(n_mels: int = 128, center: bool = True) -> Recipe:
    return Recipe(
        sample_rate=16000,
        spec=StftSpec(
            400, 400, 160, margins=_centred(400, 160, drop_last=True) if center else (0, -160),
            epilogue=Epilogue("log10", 1e-10, log_floor=1.5 - 8.0, gain=0.25, bias=1.0),
        ),
        window="hann",
        bank=_bank(16000, 400, n_mels, 0, 8000),
    )  # fmt: skip


def _nemo(
    n_mels: int = 80,
    normalize: str = "per_feature",
    pad_to: int = 1,
    time_major: bool = False,
) -> Recipe:
    one_of("normalize", normalize, ("per_feature", "none"))
    return Recipe(
        sample_rate=16000,
        spec=StftSpec(
            512, 400, 160, pad_mode="constant", preemphasis=0.97,
            epilogue=Epilogue("ln", 2.0**-24, "add", masked_frames=1, frame_multiple=pad_to, time_major=time_major),
        ),
        window="hann-symmetric",
        bank=_bank(16000, 512, n_mels, 0, 8000),
        table="librosa",
        normalization=Normalization("variance", ddof=1, eps=1e-5) if normalize == "per_feature" else None,
    )  # fmt: skip


def _kaldi(
    sample_rate: int = 16000,
    n_mels: int = 23,
    f_min: float = 20.0,
    f_max: float = 0.0,
    window: str = "povey",
    scale: float = 1.0,
    frame_length: float = 25.0,
    frame_shift: float = 10.0,
    snip_edges: bool = True,
    preemphasis: float = 0.97,
    remove_dc: bool = True,
    power: float = 2.0,
    log: bool = True,
    floor: float = FLT_EPSILON,
    gain: float = 1.0,
    bias: float = 0.0,
    pad_value: float = 0.0,
    n_frames: int | None = None,
    frame_multiple: int = 1,
    **fields: Any,
) -> Recipe:
    win_length, hop_length = int(sample_rate * frame_length * 0.001), int(sample_rate * frame_shift * 0.001)
    for name, milliseconds, samples in (("frame_length", frame_length, win_length), ("frame_shift", frame_shift, hop_length)):
        if samples < 1:
            raise ValueError(f"{name} must be at least one sample long, got {milliseconds!r} ms at {sample_rate} Hz")
    n_fft = 1 << (win_length - 1).bit_length()
    left = 0 if snip_edges else win_length // 2 - hop_length // 2
    if left < 0:
        raise ValueError(f"frame_shift must be at most frame_length = {frame_length!r} ms without snip_edges, got {frame_shift!r}")
    right = n_fft - win_length if snip_edges else n_fft - hop_length + hop_length // 2 - left
    return Recipe(
        sample_rate=sample_rate,
        spec=StftSpec(
            n_fft, win_length, hop_length, power=power, margins=(left, right), pad_mode="constant" if snip_edges else "symmetric",
            scale=scale, preemphasis=preemphasis, preemphasis_scope="frame", remove_dc=remove_dc,
            epilogue=Epilogue(
                "ln" if log else None, floor, gain=gain, bias=bias, time_major=True, frame_multiple=frame_multiple,
                n_frames=n_frames, pad_value=pad_value,
            ),
        ),
        window=window,
        bank=MelBankSpec(sample_rate, n_fft, n_mels, f_min, f_max + sample_rate / 2 if f_max <= 0 else f_max),
        table="kaldi",
        right_padded=True,
        **fields,
    )  # fmt: skip


def _seamless(pad_value: float = 0.0) -> Recipe:
    rule = Normalization("variance", ddof=1, eps=1e-7, eps_mode="variance", pad_value=pad_value)
    return _kaldi(n_mels=80, scale=INT16, normalization=rule, stack=2, frame_multiple=2)


def _ast(mean: float = -4.2677393, deviation: float = 4.5689974, n_frames: int | None = 1024) -> Recipe:
    """Frames that pad are 0 before the affine: after it they are its bias. Waveforms need not be rid of their mean: frames are."""
    gain, bias = _standardised(mean, 2 * deviation)
    return _kaldi(n_mels=128, window="hann-symmetric", gain=gain, bias=bias, pad_value=bias, n_frames=n_frames)


def _phi4() -> Recipe:
    return Recipe(
        sample_rate=16000,
        spec=StftSpec(
            512, 400, 160, margins=(0, 112), pad_mode="constant", scale=INT16, preemphasis=0.97, preemphasis_scope="frame",
            epilogue=Epilogue("ln", 1.0, time_major=True),
        ),
        window="hamming-symmetric",
        bank=MelBankSpec(16000, 512, 80, 0.0, 7690.0),
        table="kaldi",
        right_padded=True,
    )  # fmt: skip


def _gemma3n(mean: tuple[float, ...] | None = None, deviation: tuple[float, ...] | None = None) -> Recipe:
    return Recipe(
        sample_rate=16000,
        spec=StftSpec(
            1024, 512, 160, margins=(0, 511), pad_mode="constant", power=1.0, preemphasis=0.97, preemphasis_scope="frame",
            epilogue=Epilogue("ln", 1e-5, time_major=True),
        ),
        window="hann",
        bank=_bank(16000, 1024, 128, 125, 7600, "htk"),
        right_padded=True,
        mean=mean,
        deviation=deviation,
        sample_multiple=128,
    )  # fmt: skip


def _gemma4(mean: tuple[float, ...] | None = None, deviation: tuple[float, ...] | None = None) -> Recipe:
    return Recipe(
        sample_rate=16000,
        # A frame of 320 samples takes 321 to fit: hence 191 on the right, not 192.
        spec=StftSpec(
            512, 320, 160, margins=(160, 191), pad_mode="constant", power=1.0, epilogue=Epilogue("ln", 1e-3, "add", time_major=True)
        ),
        window="hann",
        bank=_bank(16000, 512, 128, 0, 8000, "htk"),
        right_padded=True,
        mean=mean,
        deviation=deviation,
    )


def _lasr() -> Recipe:
    return Recipe(
        sample_rate=16000,
        spec=StftSpec(512, 400, 160, margins=(0, 112), pad_mode="constant", epilogue=Epilogue("ln", 1e-5, time_major=True)),
        window="hann-symmetric",
        bank=MelBankSpec(16000, 512, 128, 125.0, 7500.0),
        table="kaldi",
        right_padded=True,
    )


def _granite_speech() -> Recipe:
    return Recipe(
        sample_rate=16000,
        spec=StftSpec(512, 400, 160, epilogue=Epilogue("log10", 1e-10, time_major=True)),
        window="hann",
        bank=_bank(16000, 512, 80, 0, 8000, "htk"),
        table="torchaudio",
        normalization=Normalization("maximum", 8.0, gain=0.25, bias=1.0),
        stack=2,
    )


# ------------------------------------------------------------------------------------------------------------ speech synthesis


def _hifigan(
    sample_rate: int = 22050,
    n_fft: int = 1024,
    hop_length: int = 256,
    n_mels: int = 80,
    f_max: float | None = 8000.0,
    mean: float = 0.0,
    deviation: float = 1.0,
    epsilon: float = 1e-9,
    time_major: bool = False,
) -> Recipe:
    gain, bias = _standardised(mean, deviation)
    return Recipe(
        sample_rate=sample_rate,
        spec=StftSpec(
            n_fft, n_fft, hop_length, margins=_same(n_fft, hop_length), power=1.0, epsilon=epsilon,
            epilogue=Epilogue("ln", 1e-5, gain=gain, bias=bias, time_major=time_major),
        ),
        window="hann",
        bank=_bank(sample_rate, n_fft, n_mels, 0, f_max),
        table="librosa",
    )  # fmt: skip


def _vocos(
    floor: float = 1e-7,
    padding: str = "center",
    sample_rate: int = 24000,
    n_fft: int = 1024,
    hop_length: int = 256,
    n_mels: int = 100,
) -> Recipe:
    one_of("padding", padding, ("center", "same"))
    return Recipe(
        sample_rate=sample_rate,
        spec=StftSpec(
            n_fft,
            n_fft,
            hop_length,
            margins=_same(n_fft, hop_length) if padding == "same" else None,
            power=1.0,
            epilogue=Epilogue("ln", floor),
        ),
        window="hann",
        bank=_bank(sample_rate, n_fft, n_mels, 0, sample_rate // 2, "htk"),
        table="torchaudio",
    )


def _tacotron2() -> Recipe:
    return Recipe(
        sample_rate=22050,
        spec=StftSpec(1024, 1024, 256, power=1.0, epilogue=Epilogue("ln", 1e-5)),
        window="hann",
        bank=_bank(22050, 1024, 80, 0, 8000),
        table="librosa",
    )


def _univnet(normalize: bool = False) -> Recipe:
    low, high = math.log(1e-5), 2.3143386840820312
    recipe = partial(_hifigan, 24000, 1024, 256, 100, None, time_major=True)
    return recipe(mean=(low + high) / 2, deviation=(high - low) / 2) if normalize else recipe()


def _speecht5() -> Recipe:
    return Recipe(
        sample_rate=16000,
        spec=StftSpec(1024, 1024, 256, power=1.0, epilogue=Epilogue("log10", 1e-10, time_major=True)),
        window="hann",
        bank=_bank(16000, 1024, 80, 80, 7600),
    )


# ------------------------------------------------------------------------------------------------------------ sounds, libraries


def _decibels(
    sample_rate: int = 32000,
    n_fft: int = 1024,
    hop_length: int = 320,
    n_mels: int = 64,
    f_min: float = 50.0,
    f_max: float | None = 14000.0,
    mel_scale: str = "slaney",
    table: str = "librosa",
    time_major: bool = True,
    pad_mode: str = "reflect",
    log: bool = True,
    top_db: float | None = None,
    scope: str = "sample",
) -> Recipe:
    one_of("scope", scope, NORMALIZATION_SCOPES)  # without top_db too
    if top_db is not None and top_db < 0:
        raise ValueError(f"top_db must not be negative, got {top_db!r}")
    return Recipe(
        sample_rate=sample_rate,
        spec=StftSpec(
            n_fft, n_fft, hop_length, pad_mode=pad_mode, epilogue=Epilogue("db" if log else None, 1e-10, time_major=time_major)
        ),
        window="hann",
        bank=_bank(sample_rate, n_fft, n_mels, f_min, f_max, mel_scale),
        table=table,
        normalization=None if top_db is None else Normalization("maximum", top_db, scope),
    )


def _librosa(
    sample_rate: int = 22050,
    n_fft: int = 2048,
    hop_length: int = 512,
    n_mels: int = 128,
    log: bool = False,
    top_db: float | None = None,
    scope: str = "sample",
) -> Recipe:
    return _decibels(
        sample_rate, n_fft, hop_length, n_mels, 0.0, None, time_major=False, pad_mode="constant",
        log=log, top_db=top_db, scope=scope,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ losses


def _loss_dac(window_length: int = 2048, n_mels: int = 320, sample_rate: int = 44100) -> Recipe:
    return Recipe(
        sample_rate=sample_rate,
        spec=StftSpec(window_length, window_length, window_length // 4, power=1.0, epilogue=Epilogue("log10", 1e-5)),
        window="hann",
        bank=_bank(sample_rate, window_length, n_mels, 0, None),
        table="librosa",
    )


def _loss_encodec(n_fft: int = 1024, n_mels: int = 64, sample_rate: int = 24000) -> Recipe:
    hop_length = n_fft // 4
    return Recipe(
        sample_rate=sample_rate,
        spec=StftSpec(
            n_fft,
            n_fft,
            hop_length,
            margins=_same(n_fft, hop_length),
            normalized="window",
            epilogue=Epilogue("log10", 1e-5, "add"),
        ),
        window="hann",
        bank=_bank(sample_rate, n_fft, n_mels, 64, sample_rate // 2, "htk"),
        table="torchaudio",
    )


def _loss_auraloss(sample_rate: int = 44100, n_fft: int = 1024, hop_length: int = 256, n_mels: int = 128) -> Recipe:
    return Recipe(
        sample_rate=sample_rate,
        spec=StftSpec(n_fft, n_fft, hop_length, power=1.0, epsilon=1e-8, epsilon_mode="max", epilogue=Epilogue("ln")),
        window="hann",
        bank=_bank(sample_rate, n_fft, n_mels, 0, None),
        table="librosa",
    )


# ------------------------------------------------------------------------------------------------------------ by name


class Known(NamedTuple):
    """A front-end that has a name, with the last three fields of its recipes."""

    make: Callable[..., Recipe]  # of options: its parameters, by whose annotations their values are checked
    source: str
    compared_with: str
    not_checked: str = ""


SOURCE = "the source itself"
STFT = "its formula over torch.stft and librosa's filters"
KALDI = "its formula over torchaudio.compliance.kaldi.fbank"
READ = "its own code, which was read and not run beside it"

RECIPES: dict[str, Known] = {
    "whisper": Known(
        _whisper,
        "openai-whisper log_mel_spectrogram; with n_samples=480000 transformers.WhisperFeatureExtractor",
        'both; openai-whisper with scope="batch" too',
    ),
    "whisper-large-v3": Known(partial(_whisper, n_mels=128), "openai-whisper log_mel_spectrogram(n_mels=128)", SOURCE),
    "voxtral-realtime": Known(
        _voxtral_realtime,
        "transformers.VoxtralRealtimeFeatureExtractor with its default global_log_mel_max of 1.5",
        f"{SOURCE}, with center=False too; its attention mask counts fewer frames than there are, those that fit into the row",
    ),
    "qwen2-audio": Known(
        partial(_whisper, n_mels=128, n_samples=480000),
        "transformers.WhisperFeatureExtractor(feature_size=128) over 30 s",
        SOURCE,
        "the checkpoint's configuration",
    ),
    "qwen3-asr": Known(
        partial(_whisper, n_mels=128, min_samples=8000, frame_multiple=100),
        "transformers.Qwen3ASRFeatureExtractor with padding=True: at least 8000 samples, frames filled up with zeros to a multiple "
        "of 100",
        SOURCE,
        "the checkpoint's configuration",
    ),
    "nemo": Known(
        _nemo,
        "nemo_toolkit FilterbankFeatures in evaluation, as ASR configurations have it (window 25 ms, n_fft 512)",
        "transformers.ParakeetFeatureExtractor, which was found to be NeMo's to the bit",
        f"pad_to; {READ}",
    ),
    "nemo-128": Known(
        partial(_nemo, n_mels=128),
        "nemo_toolkit FilterbankFeatures in evaluation, as ASR configurations have it (window 25 ms, n_fft 512)",
        "transformers.ParakeetFeatureExtractor(feature_size=128), which was found to be NeMo's to the bit",
        f"pad_to; {READ}",
    ),
    "nemo-none": Known(
        partial(_nemo, normalize="none"),
        "nemo_toolkit FilterbankFeatures in evaluation, as ASR configurations have it, with normalize none",
        STFT,
        f"pad_to; {READ}",
    ),
    "parakeet": Known(partial(_nemo, time_major=True), "transformers.ParakeetFeatureExtractor (feature_size=n_mels)", SOURCE),
    "parakeet-128": Known(
        partial(_nemo, n_mels=128, time_major=True), "transformers.ParakeetFeatureExtractor(feature_size=128)", SOURCE
    ),
    "kaldi-fbank": Known(
        _kaldi,
        "torchaudio.compliance.kaldi.fbank and kaldi-native-fbank, without dither and energy; frame_length and frame_shift are in "
        "ms, f_max up to 0 counts from the Nyquist frequency, scale is of the samples (32768 for Kaldi's own)",
        "both; torchaudio with every option that it has too",
    ),
    "seamless-m4t": Known(_seamless, "transformers.SeamlessM4TFeatureExtractor", SOURCE),
    "w2v-bert": Known(
        partial(_seamless, pad_value=1.0),
        "transformers.SeamlessM4TFeatureExtractor(padding_value=1.0)",
        SOURCE,
        "that checkpoints have this padding_value",
    ),
    "speech-to-text": Known(
        partial(_kaldi, n_mels=80, scale=INT16, normalization=Normalization("variance")),
        "transformers.Speech2TextFeatureExtractor",
        SOURCE,
    ),
    "ast": Known(_ast, "transformers.ASTFeatureExtractor (AudioSet's mean and deviation by default)", SOURCE),
    "audio-mae": Known(_ast, "facebookresearch/AudioMAE dataset.py with AudioSet's mean and deviation", KALDI, READ),
    "beats": Known(
        partial(_kaldi, n_mels=128, scale=INT16, gain=0.5 / 6.55582, bias=-0.5 * 15.41663 / 6.55582),
        "microsoft/unilm BEATs.preprocess",
        KALDI,
        READ,
    ),
    "icefall": Known(
        partial(_kaldi, n_mels=80, f_max=-400.0, snip_edges=False),
        "lhotse Fbank, kaldifeat in icefall's decoding scripts",
        "torchaudio.compliance.kaldi.fbank",
        READ,
    ),
    "wenet": Known(
        partial(_kaldi, n_mels=80, scale=INT16),
        "wenet compute_fbank without dither, before the model's own CMVN",
        "torchaudio.compliance.kaldi.fbank",
        READ,
    ),
    "wespeaker": Known(
        partial(_kaldi, n_mels=80, window="hamming-symmetric", scale=INT16, normalization=Normalization("mean")),
        "pyannote.audio's WeSpeaker models",
        KALDI,
        READ,
    ),
    "campplus": Known(
        partial(_kaldi, n_mels=80, normalization=Normalization("mean")), "CosyVoice's speaker embedding", KALDI, READ
    ),
    "phi-4-multimodal": Known(
        _phi4,
        "transformers.Phi4MultimodalFeatureExtractor, whose filters differ in one weight from the original speechlib_mel",
        SOURCE,
    ),
    "gemma3n": Known(
        _gemma3n,
        "transformers.Gemma3nAudioFeatureExtractor",
        f"{SOURCE}, with mean and deviation too; its mask also counts frames that reach behind the row",
    ),
    "gemma4": Known(
        _gemma4,
        "transformers.Gemma4AudioFeatureExtractor",
        f"{SOURCE}, with mean and deviation too, in the frames of its mask; it has more, of zeros that fill up a row",
    ),
    "granite-speech": Known(_granite_speech, "transformers.GraniteSpeechFeatureExtractor", SOURCE),
    "lasr": Known(_lasr, "transformers.LasrFeatureExtractor", SOURCE),
    "hifigan": Known(_hifigan, "jik876/hifi-gan mel_spectrogram with config v1 to v3", STFT, READ),
    "bigvgan-22k": Known(_hifigan, "NVIDIA/BigVGAN mel_spectrogram, 22 kHz 80 bands (f_max=None for fmax null)", STFT, READ),
    "bigvgan-24k": Known(
        partial(_hifigan, sample_rate=24000, n_mels=100, f_max=12000.0),
        "NVIDIA/BigVGAN mel_spectrogram, 24 kHz 100 bands",
        STFT,
        READ,
    ),
    "bigvgan-44k": Known(
        partial(_hifigan, sample_rate=44100, n_mels=128, f_max=None),
        "NVIDIA/BigVGAN mel_spectrogram, v2 44 kHz 128 bands (n_fft=2048, hop_length=512 for 512x)",
        STFT,
        READ,
    ),
    "cosyvoice2": Known(
        partial(_hifigan, sample_rate=24000, n_fft=1920, hop_length=480),
        "CosyVoice 2 and 3, Matcha-TTS' mel_spectrogram (f_max=None for version 3)",
        STFT,
        READ,
    ),
    "matcha": Known(
        partial(_hifigan, mean=-5.536622, deviation=2.116101),
        "Matcha-TTS mel_spectrogram, then LJSpeech's mean and deviation",
        STFT,
        READ,
    ),
    "vocos": Known(_vocos, "vocos MelSpectrogramFeatures", f'{SOURCE}, with padding="same" too'),
    "f5-tts": Known(
        partial(_vocos, floor=1e-5), "f5-tts get_vocos_mel_spectrogram", "its formula over vocos' mel spectrogram", READ
    ),
    "tacotron2": Known(
        _tacotron2,
        "NVIDIA/tacotron2 TacotronSTFT.mel_spectrogram, whose Fourier transform is a convolution in float32",
        STFT,
        READ,
    ),
    "univnet": Known(_univnet, "transformers.UnivNetFeatureExtractor", f"{SOURCE}, with normalize=True too"),
    "speecht5": Known(_speecht5, "transformers.SpeechT5FeatureExtractor, audio_target", SOURCE),
    "clap-fusion": Known(
        partial(_decibels, sample_rate=48000, hop_length=480, mel_scale="htk", table="exact"),
        "transformers.ClapFeatureExtractor, truncation fusion, of the whole clip, with LAION's f_min of 50 (the class's is 0)",
        f"{SOURCE} (frequency_min=50)",
        "the checkpoints' configurations",
    ),
    "clap-unfused": Known(
        partial(_decibels, sample_rate=48000, hop_length=480, table="exact"),
        "transformers.ClapFeatureExtractor, truncation rand_trunc, of the whole clip, with LAION's f_min of 50 (the class's is 0)",
        f"{SOURCE} (frequency_min=50)",
        "the checkpoints' configurations",
    ),
    "panns": Known(
        _decibels,
        "PANNs Cnn14 by torchlibrosa's Spectrogram and LogmelFilterBank",
        "torchlibrosa with these parameters",
        "PANNs' own code, which was not run beside it",
    ),
    "librosa": Known(_librosa, "librosa.feature.melspectrogram", SOURCE),
    "librosa-db": Known(
        partial(_librosa, log=True, top_db=80.0),
        'librosa.power_to_db of melspectrogram; librosa takes one maximum for a batch, which is scope="batch"',
        f'{SOURCE}, with scope="batch" too',
    ),
    "loss-hifigan": Known(partial(_hifigan, f_max=None), "jik876/hifi-gan mel_spectrogram with fmax_for_loss null", STFT, READ),
    "loss-vocos": Known(
        _vocos, "vocos MelSpecReconstructionLoss, the features that it compares", "vocos MelSpectrogramFeatures", READ
    ),
    "loss-dac": Known(
        _loss_dac,
        "one scale of descript-audiotools MelSpectrogramLoss as DAC's configurations have it (log10 of pow 1); see flashmel.losses "
        "for the whole",
        STFT,
        READ,
    ),
    "loss-encodec": Known(
        _loss_encodec,
        "one scale of audiocraft's multi-scale mel loss, the logarithm; audiocraft fills up a partial last frame with zeros, which "
        "is left off here",
        "its formula over torch.stft and torchaudio's filters",
        READ,
    ),
    "loss-auraloss": Known(_loss_auraloss, "auraloss.freq.MelSTFTLoss, the logarithm of its magnitudes", SOURCE),
}
