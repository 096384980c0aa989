"""The front-ends as data: what each model's features are made of, and where that is written down."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .filterbank import kaldi_filterbank, librosa_filterbank, mel_filterbank
from .spec import Epilogue, MelBankSpec, Normalization, StftSpec, one_of

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
    "exact": mel_filterbank,  # float64
    "librosa": librosa_filterbank,
    "torchaudio": partial(mel_filterbank, dtype=torch.float32),
    "kaldi": kaldi_filterbank,
}


@dataclass(frozen=True)
class Recipe:
    """A front-end: features of a waveform by ``spec``, ``window`` and ``bank`` (one launch), then what needs all of a row.

    Raises:
        ValueError: naming the field and the value received.
    """

    source: str  # where the definition is, what was compared with it, and what could not be
    sample_rate: int
    spec: StftSpec
    window: str  # of WINDOWS
    bank: MelBankSpec
    table: str = "exact"  # of TABLES
    right_padded: bool = False  # the window stands at the start of its n_fft samples, not in the middle
    mean: tuple[float, ...] | None = None  # of each mel's features, which become (x - mean) / deviation
    deviation: tuple[float, ...] | None = None
    normalization: Normalization | None = None
    stack: int = 1  # so many frames make one; those that are left over are dropped
    frame_multiple: int = 1  # before that, frames are filled up with the pad value to a multiple of this
    n_frames: int | None = None  # or to this number, or cut
    sample_multiple: int = 1  # zeros behind a row's samples make its length a multiple of this
    min_samples: int = 0  # and at least this
    n_samples: int | None = None  # or this number, or it is cut

    def __post_init__(self) -> None:
        one_of("window", self.window, tuple(WINDOWS))
        one_of("table", self.table, tuple(TABLES))
        if self.stack > 1 and not self.spec.epilogue.time_major:
            raise ValueError(f"stack={self.stack} needs a time-major epilogue: frames are joined along the features")


def _bank(sample_rate: int, n_fft: int, n_mels: int, f_min: float, f_max: float | None, scale: str = "slaney") -> MelBankSpec:
    """Filters up to f_max, or to the Nyquist frequency; "slaney" has unit area, "htk" unit height."""
    norm = "slaney" if scale == "slaney" else None
    return MelBankSpec(sample_rate, n_fft, n_mels, float(f_min), sample_rate / 2 if f_max is None else float(f_max), norm, scale)


def _centred(n_fft: int, hop_length: int, drop_last: bool = False) -> tuple[int, int]:
    """Margins that centre frame t at sample t * hop_length; without the last frame, if so asked."""
    return n_fft // 2, n_fft // 2 - hop_length * drop_last


# ------------------------------------------------------------------------------------------------------------ speech models


def _whisper(
    n_mels: int = 80,
    n_samples: int | None = None,
    scope: str = "sample",
    source: str = "openai-whisper log_mel_spectrogram; n_samples=480000 is transformers.WhisperFeatureExtractor",
    **fields: Any,
) -> Recipe:
    return Recipe(
        source=source,
        sample_rate=16000,
        spec=StftSpec(400, 400, 160, margins=_centred(400, 160, drop_last=True), epilogue=Epilogue("log10", 1e-10)),
        window="hann",
        bank=_bank(16000, 400, n_mels, 0, 8000),
        table="librosa",
        normalization=Normalization("maximum", 8.0, scope, gain=0.25, bias=1.0),
        n_samples=n_samples,
        **fields,
    )


def _voxtral_realtime(n_mels: int = 128, center: bool = True) -> Recipe:
    return Recipe(
        source="transformers.VoxtralRealtimeFeatureExtractor with its default global_log_mel_max of 1.5; its attention mask counts "
        "frames that fit into the row, fewer than there are",
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
    source: str = "nemo_toolkit FilterbankFeatures in evaluation, as ASR configurations have it (window 25 ms, n_fft 512)",
) -> Recipe:
    one_of("normalize", normalize, ("per_feature", "none"))
    return Recipe(
        source=source,
        sample_rate=16000,
        spec=StftSpec(
            512, 400, 160, pad_mode="constant", preemphasis=0.97,
            epilogue=Epilogue("ln", 2.0**-24, "add", masked_frames=1, time_major=time_major),
        ),
        window="hann-symmetric",
        bank=_bank(16000, 512, n_mels, 0, 8000),
        table="librosa",
        normalization=Normalization("variance", ddof=1, eps=1e-5) if normalize == "per_feature" else None,
        frame_multiple=pad_to,
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
    source: str = "torchaudio.compliance.kaldi.fbank and kaldi-native-fbank, without dither and energy; frame_length and "
    "frame_shift are in ms, f_max up to 0 counts from the Nyquist frequency, scale is of the samples (32768 for Kaldi's own)",
    **fields: Any,
) -> Recipe:
    win_length, hop_length = int(sample_rate * frame_length * 0.001), int(sample_rate * frame_shift * 0.001)
    n_fft = 1 << (win_length - 1).bit_length()
    left = 0 if snip_edges else win_length // 2 - hop_length // 2
    right = n_fft - win_length if snip_edges else n_fft - hop_length + hop_length // 2 - left
    return Recipe(
        source=source,
        sample_rate=sample_rate,
        spec=StftSpec(
            n_fft, win_length, hop_length, power=power, margins=(left, right), pad_mode="constant" if snip_edges else "symmetric",
            scale=scale, preemphasis=preemphasis, preemphasis_scope="frame", remove_dc=remove_dc,
            epilogue=Epilogue("ln" if log else None, floor, gain=gain, bias=bias, time_major=True, pad_value=pad_value),
        ),
        window=window,
        bank=MelBankSpec(sample_rate, n_fft, n_mels, f_min, f_max + sample_rate / 2 if f_max <= 0 else f_max),
        table="kaldi",
        right_padded=True,
        **fields,
    )  # fmt: skip


def _seamless(pad_value: float = 0.0, source: str = "") -> Recipe:
    rule = Normalization("variance", ddof=1, eps=1e-7, eps_mode="variance", pad_value=pad_value)
    return _kaldi(n_mels=80, scale=INT16, normalization=rule, stack=2, frame_multiple=2, source=source)


def _ast(mean: float = -4.2677393, deviation: float = 4.5689974, n_frames: int | None = 1024, source: str = "") -> Recipe:
    """Frames that pad are 0 before the affine: after it they are its bias. Waveforms need not be rid of their mean: frames are."""
    gain, bias = 0.5 / deviation, -0.5 * mean / deviation
    return _kaldi(
        n_mels=128, window="hann-symmetric", gain=gain, bias=bias, pad_value=bias, n_frames=n_frames,
        source=source or "transformers.ASTFeatureExtractor (AudioSet's mean and deviation by default)",
    )  # fmt: skip


def _phi4() -> Recipe:
    return Recipe(
        source="transformers.Phi4MultimodalFeatureExtractor, whose filters differ in one weight from the original speechlib_mel",
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
        source="transformers.Gemma3nAudioFeatureExtractor, whose mask also counts frames that reach behind the row",
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
        source="transformers.Gemma4AudioFeatureExtractor; lengths are of its mask; zeros that fill up a row give no frames",
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
        source="transformers.LasrFeatureExtractor",
        sample_rate=16000,
        spec=StftSpec(512, 400, 160, margins=(0, 112), pad_mode="constant", epilogue=Epilogue("ln", 1e-5, time_major=True)),
        window="hann-symmetric",
        bank=MelBankSpec(16000, 512, 128, 125.0, 7500.0),
        table="kaldi",
        right_padded=True,
    )


def _granite_speech() -> Recipe:
    return Recipe(
        source="transformers.GraniteSpeechFeatureExtractor",
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
    source: str = "jik876/hifi-gan mel_spectrogram with config v1 to v3",
) -> Recipe:
    margin = (n_fft - hop_length) // 2
    return Recipe(
        source=source,
        sample_rate=sample_rate,
        spec=StftSpec(
            n_fft, n_fft, hop_length, margins=(margin, margin), power=1.0, epsilon=epsilon,
            epilogue=Epilogue("ln", 1e-5, gain=1.0 / deviation, bias=-mean / deviation, time_major=time_major),
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
    source: str = "vocos MelSpectrogramFeatures",
) -> Recipe:
    one_of("padding", padding, ("center", "same"))
    same = (n_fft - hop_length) // 2
    return Recipe(
        source=source,
        sample_rate=sample_rate,
        spec=StftSpec(
            n_fft, n_fft, hop_length, margins=(same, same) if padding == "same" else None, power=1.0, epilogue=Epilogue("ln", floor)
        ),
        window="hann",
        bank=_bank(sample_rate, n_fft, n_mels, 0, None, "htk"),
        table="torchaudio",
    )


def _tacotron2() -> Recipe:
    return Recipe(
        source="NVIDIA/tacotron2 TacotronSTFT.mel_spectrogram, whose Fourier transform is a convolution in float32",
        sample_rate=22050,
        spec=StftSpec(1024, 1024, 256, power=1.0, epilogue=Epilogue("ln", 1e-5)),
        window="hann",
        bank=_bank(22050, 1024, 80, 0, 8000),
        table="librosa",
    )


def _univnet(normalize: bool = False) -> Recipe:
    low, high = math.log(1e-5), 2.3143386840820312
    recipe = partial(_hifigan, 24000, 1024, 256, 100, None, time_major=True, source="transformers.UnivNetFeatureExtractor")
    return recipe(mean=(low + high) / 2, deviation=(high - low) / 2) if normalize else recipe()


def _speecht5() -> Recipe:
    return Recipe(
        source="transformers.SpeechT5FeatureExtractor, audio_target",
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
    scale: str = "slaney",
    table: str = "librosa",
    time_major: bool = True,
    pad_mode: str = "reflect",
    log: bool = True,
    top_db: float | None = None,
    scope: str = "sample",
    source: str = "",
) -> Recipe:
    return Recipe(
        source=source,
        sample_rate=sample_rate,
        spec=StftSpec(
            n_fft, n_fft, hop_length, pad_mode=pad_mode, epilogue=Epilogue("db" if log else None, 1e-10, time_major=time_major)
        ),
        window="hann",
        bank=_bank(sample_rate, n_fft, n_mels, f_min, f_max, scale),
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
    source: str = "librosa.feature.melspectrogram",
) -> Recipe:
    return _decibels(
        sample_rate, n_fft, hop_length, n_mels, 0.0, None, time_major=False, pad_mode="constant",
        log=log, top_db=top_db, scope=scope, source=source,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ losses


def _loss_dac(window_length: int = 2048, n_mels: int = 320, sample_rate: int = 44100) -> Recipe:
    return Recipe(
        source="one scale of descript-audiotools MelSpectrogramLoss as DAC's configurations have it (log10 of pow 1); see "
        "flashmel.losses for the whole",
        sample_rate=sample_rate,
        spec=StftSpec(window_length, window_length, window_length // 4, power=1.0, epilogue=Epilogue("log10", 1e-5)),
        window="hann",
        bank=_bank(sample_rate, window_length, n_mels, 0, None),
        table="librosa",
    )


def _loss_encodec(n_fft: int = 1024, n_mels: int = 64, sample_rate: int = 24000) -> Recipe:
    hop_length = n_fft // 4
    margin = (n_fft - hop_length) // 2
    return Recipe(
        source="one scale of audiocraft's multi-scale mel loss, the logarithm (read; compared with its formula); audiocraft fills "
        "up a partial last frame with zeros, which is left off here",
        sample_rate=sample_rate,
        spec=StftSpec(
            n_fft, n_fft, hop_length, margins=(margin, margin), normalized="window", epilogue=Epilogue("log10", 1e-5, "add")
        ),
        window="hann",
        bank=_bank(sample_rate, n_fft, n_mels, 64, None, "htk"),
        table="torchaudio",
    )


def _loss_auraloss(sample_rate: int = 44100, n_fft: int = 1024, hop_length: int = 256, n_mels: int = 128) -> Recipe:
    return Recipe(
        source="auraloss.freq.MelSTFTLoss, the logarithm of its magnitudes",
        sample_rate=sample_rate,
        spec=StftSpec(n_fft, n_fft, hop_length, power=1.0, epsilon=1e-8, epsilon_mode="max", epilogue=Epilogue("ln")),
        window="hann",
        bank=_bank(sample_rate, n_fft, n_mels, 0, None),
        table="librosa",
    )


RECIPES: dict[str, Callable[..., Recipe]] = {
    "whisper": _whisper,
    "whisper-large-v3": partial(_whisper, n_mels=128),
    "voxtral-realtime": _voxtral_realtime,
    "qwen2-audio": partial(
        _whisper, n_mels=128, n_samples=480000,
        source="transformers.WhisperFeatureExtractor(feature_size=128) over 30 s; the checkpoint's configuration was not read",
    ),
    "qwen3-asr": partial(
        _whisper, n_mels=128, min_samples=8000, frame_multiple=100,
        source="transformers.Qwen3ASRFeatureExtractor with padding=True: at least 8000 samples, frames filled up with zeros to a "
        "multiple of 100 (the checkpoint's configuration was not read)",
    ),
    "nemo": _nemo,
    "nemo-128": partial(_nemo, n_mels=128),
    "nemo-none": partial(_nemo, normalize="none"),
    "parakeet": partial(_nemo, time_major=True, source="transformers.ParakeetFeatureExtractor (feature_size=n_mels)"),
    "parakeet-128": partial(_nemo, n_mels=128, time_major=True, source="transformers.ParakeetFeatureExtractor(feature_size=128)"),
    "kaldi-fbank": _kaldi,
    "seamless-m4t": partial(_seamless, source="transformers.SeamlessM4TFeatureExtractor"),
    "w2v-bert": partial(
        _seamless, pad_value=1.0,
        source="transformers.SeamlessM4TFeatureExtractor(padding_value=1.0); that checkpoints have 1.0 was not read",
    ),
    "speech-to-text": partial(
        _kaldi, n_mels=80, scale=INT16, normalization=Normalization("variance"), source="transformers.Speech2TextFeatureExtractor"
    ),
    "ast": _ast,
    "audio-mae": partial(
        _ast, source="facebookresearch/AudioMAE dataset.py with AudioSet's mean and deviation (read; compared with its formula)"
    ),
    "beats": partial(
        _kaldi, n_mels=128, scale=INT16, gain=0.5 / 6.55582, bias=-0.5 * 15.41663 / 6.55582,
        source="microsoft/unilm BEATs.preprocess (read; compared with its formula over torchaudio)",
    ),
    "icefall": partial(
        _kaldi, n_mels=80, f_max=-400.0, snip_edges=False,
        source="lhotse Fbank, kaldifeat in icefall's decoding scripts (read; compared with torchaudio)",
    ),
    "wenet": partial(
        _kaldi, n_mels=80, scale=INT16,
        source="wenet compute_fbank without dither, before the model's own CMVN (read; compared with torchaudio)",
    ),
    "wespeaker": partial(
        _kaldi, n_mels=80, window="hamming-symmetric", scale=INT16, normalization=Normalization("mean"),
        source="pyannote.audio's WeSpeaker models (read; compared with its formula over torchaudio)",
    ),
    "campplus": partial(
        _kaldi, n_mels=80, normalization=Normalization("mean"),
        source="CosyVoice's speaker embedding (read; compared with its formula over torchaudio)",
    ),
    "phi-4-multimodal": _phi4,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "granite-speech": _granite_speech,
    "lasr": _lasr,
    "hifigan": _hifigan,
    "bigvgan-22k": partial(_hifigan, source="NVIDIA/BigVGAN mel_spectrogram, 22 kHz 80 bands (f_max=None for fmax null)"),
    "bigvgan-24k": partial(
        _hifigan, sample_rate=24000, n_mels=100, f_max=12000.0, source="NVIDIA/BigVGAN mel_spectrogram, 24 kHz 100 bands"
    ),
    "bigvgan-44k": partial(
        _hifigan, sample_rate=44100, n_mels=128, f_max=None,
        source="NVIDIA/BigVGAN mel_spectrogram, v2 44 kHz 128 bands (n_fft=2048, hop_length=512 for 512x)",
    ),
    "cosyvoice2": partial(
        _hifigan, sample_rate=24000, n_fft=1920, hop_length=480,
        source="CosyVoice 2 and 3, Matcha-TTS' mel_spectrogram (f_max=None for version 3)",
    ),
    "matcha": partial(
        _hifigan, mean=-5.536622, deviation=2.116101, source="Matcha-TTS mel_spectrogram, then LJSpeech's mean and deviation"
    ),
    "vocos": _vocos,
    "f5-tts": partial(_vocos, floor=1e-5, source="f5-tts get_vocos_mel_spectrogram (read; compared with its formula)"),
    "tacotron2": _tacotron2,
    "univnet": _univnet,
    "speecht5": _speecht5,
    "clap-fusion": partial(
        _decibels, sample_rate=48000, hop_length=480, scale="htk", table="exact",
        source="transformers.ClapFeatureExtractor, truncation fusion, of the whole clip (f_min 50 as in LAION's code, not the "
        "class's 0; checkpoints not read)",
    ),
    "clap-unfused": partial(
        _decibels, sample_rate=48000, hop_length=480, table="exact",
        source="transformers.ClapFeatureExtractor, truncation rand_trunc, of the whole clip (f_min 50 as in LAION's code, not the "
        "class's 0; checkpoints not read)",
    ),
    "panns": partial(_decibels, source="PANNs Cnn14 by torchlibrosa Spectrogram and LogmelFilterBank"),
    "librosa": _librosa,
    "librosa-db": partial(
        _librosa, log=True, top_db=80.0,
        source='librosa.power_to_db of melspectrogram; librosa takes one maximum for a batch, which is scope="batch"',
    ),
    "loss-hifigan": partial(_hifigan, f_max=None, source="jik876/hifi-gan mel_spectrogram with fmax_for_loss null"),
    "loss-vocos": partial(_vocos, source="vocos MelSpecReconstructionLoss, the features that it compares"),
    "loss-dac": _loss_dac,
    "loss-encodec": _loss_encodec,
    "loss-auraloss": _loss_auraloss,
}  # fmt: skip
