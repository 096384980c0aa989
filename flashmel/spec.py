"""What is computed: the definition of the transform's parameters, its frame count and its padding."""

from __future__ import annotations

import json
import math
import numbers
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

import numpy as np

PAD_MODES = ("reflect", "constant", "replicate", "circular")  # torch's; front-ends have "symmetric" too
NORMS = (None, "slaney")
MEL_SCALES = ("htk", "slaney")
NORMALIZATIONS = ("none", "window", "frame_length")
LOGS = (None, "ln", "log10", "db")
FLOOR_MODES = ("max", "add")
PREEMPHASIS_SCOPES = ("waveform", "frame")
NORMALIZATION_KINDS = ("maximum", "mean", "variance")
NORMALIZATION_SCOPES = ("sample", "channels", "batch")
EPS_MODES = ("std", "variance")


def is_positive_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 1)


def positive_int(name: str, value: object) -> int:
    """``value`` as an int, or a ValueError that names it."""
    if not is_positive_int(value):
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return int(value)  # type: ignore[call-overload]


def is_finite(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def positive_number(name: str, value: object) -> float:
    """``value``, or a ValueError that names it."""
    if not is_finite(value) or value <= 0:  # type: ignore[operator]
        raise ValueError(f"{name} must be positive, got {value!r}")
    return value  # type: ignore[return-value]


def one_of(name: str, value: object, choices: tuple) -> None:
    """Raise ValueError, naming the field and the value received, unless it is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def normalization(normalized: bool | str) -> str:
    """``normalized`` as :class:`StftSpec` has it, from torchaudio's boolean or the name itself."""
    return ("window" if normalized else "none") if isinstance(normalized, bool) else normalized


@dataclass(frozen=True)
class Epilogue:
    """What becomes of a mel value m: ``gain * max(log(max(m, floor)), log_floor) + bias``, and how it is stored.

    Raises:
        ValueError: naming the field and the value received.
    """

    log: str | None = None  # "ln", "log10" or "db" (10 log10)
    floor: float = 0.0  # of m, where there is a log
    floor_mode: str = "max"  # or "add": log(m + floor)
    log_floor: float = -math.inf
    gain: float = 1.0
    bias: float = 0.0
    time_major: bool = False  # (frames, n_mels) instead of (n_mels, frames)
    masked_frames: int = 0  # so many frames at the end of each row hold pad_value
    frame_multiple: int = 1  # frames that hold pad_value follow, up to a multiple of this
    n_frames: int | None = None  # or up to this number, to which longer rows are cut
    pad_value: float = 0.0  # what frames hold that lie behind a row's length

    def __post_init__(self) -> None:
        one_of("log", self.log, LOGS)
        one_of("floor_mode", self.floor_mode, FLOOR_MODES)
        if not is_finite(self.floor) or self.floor < 0:
            raise ValueError(f"floor must be a finite number and not negative, got {self.floor!r}")
        if not math.isfinite(self.log_floor) and self.log_floor != -math.inf:
            raise ValueError(f"log_floor must be a finite number or -inf, got {self.log_floor!r}")
        if not is_finite(self.gain) or self.gain == 0 or not is_finite(self.bias) or not is_finite(self.pad_value):
            raise ValueError(
                f"gain (not 0), bias and pad_value must be finite, got {self.gain!r}, {self.bias!r}, {self.pad_value!r}"
            )
        if self.masked_frames != 0:
            object.__setattr__(self, "masked_frames", positive_int("masked_frames", self.masked_frames))
        object.__setattr__(self, "frame_multiple", positive_int("frame_multiple", self.frame_multiple))
        if self.n_frames is not None:
            object.__setattr__(self, "n_frames", positive_int("n_frames", self.n_frames))
        for name in ("floor", "log_floor", "gain", "bias", "pad_value"):
            object.__setattr__(self, name, float(getattr(self, name)))


@dataclass(frozen=True)
class Normalization:
    """``gain * y + bias`` of a row's valid frames, where y is by kind, over these frames,

    - "maximum": max(x, the largest x of the row - range);
    - "mean": x - mean, for each feature;
    - "variance": (x - mean) / deviation, for each feature.

    Raises:
        ValueError: naming the field and the value received.
    """

    kind: str
    range: float = 8.0
    # Of the maximum: "channels" takes one for rows along the last axis of the batch, as torchaudio does, whose channels are rows of
    # the batch where there is no axis of channels; "batch" takes one for all rows.
    scope: str = "sample"
    ddof: int = 0  # variance divides by the number of frames less this
    eps: float = 0.0  # a deviation of 0 gives 0
    eps_mode: str = "std"  # of the deviation, std + eps; or "variance": sqrt(variance + eps)
    gain: float = 1.0
    bias: float = 0.0
    pad_value: float = 0.0  # what frames behind the valid ones hold

    def __post_init__(self) -> None:
        one_of("kind", self.kind, NORMALIZATION_KINDS)
        one_of("scope", self.scope, NORMALIZATION_SCOPES)
        one_of("eps_mode", self.eps_mode, EPS_MODES)
        one_of("ddof", self.ddof, (0, 1))
        if not self.range >= 0 or not 0 <= self.eps < math.inf:
            raise ValueError(f"range and eps must not be negative, eps finite, got {self.range!r} and {self.eps!r}")


@dataclass(frozen=True)
class StftSpec:
    """What is computed between waveform and features, all but the window and the filterbank. From a bin's samples to its value:
    framing, prologue, normalisation, power; and the epilogue of a mel value.

    A front-end's samples are, in this order: multiplied by ``scale``; pre-emphasised over the waveform; padded and cut into frames;
    rid of a frame's mean; pre-emphasised in the frame; windowed. The two operations on frames see its first ``win_length`` samples,
    and with them the window is one of ``n_fft`` values that end in zeros.

    Raises:
        ValueError: naming the field and the value received.
    """

    n_fft: int
    win_length: int
    hop_length: int
    pad: int = 0
    power: float = 2.0
    normalized: str = "none"  # "none", "window" (by sqrt of the window's energy) or "frame_length" (by sqrt of n_fft)
    center: bool = True
    pad_mode: str = "reflect"
    # Samples padded on the left and right, instead of what `center` says; on the right, a negative number leaves off samples.
    margins: tuple[int, int] | None = None
    scale: float = 1.0
    preemphasis: float = 0.0  # a of x[t] - a x[t - 1]
    preemphasis_scope: str = "waveform"  # x[-1] is 0; or "frame": a frame's sample before its first is its first
    remove_dc: bool = False
    epsilon: float = 0.0  # of |X|**2, before the root
    epsilon_mode: str = "add"  # or "max": of |X|**2 and epsilon
    epilogue: Epilogue = Epilogue()
    # All that is not by default, as JSON, from which spec_of() makes it again. (No property, for torch.compile follows none.)
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("n_fft", "win_length", "hop_length"):
            object.__setattr__(self, name, positive_int(name, getattr(self, name)))  # an int, also where NumPy's came in
        if self.win_length > self.n_fft:
            raise ValueError(f"win_length must be at most n_fft = {self.n_fft}, got {self.win_length}")
        if isinstance(self.pad, bool) or not isinstance(self.pad, (int, np.integer)):
            raise ValueError(f"pad must be an integer number of samples, got {self.pad!r}")
        object.__setattr__(self, "pad", int(self.pad))
        if not is_finite(self.power) or self.power <= 0:
            raise ValueError(
                f"power must be a positive finite number (1 for magnitude, 2 for power), got {self.power!r}; "
                "a mel spectrogram of complex bins is not defined"
            )
        if not isinstance(self.center, (bool, np.bool_)):
            raise ValueError(f"center must be True or False, got {self.center!r}")
        one_of("normalized", self.normalized, NORMALIZATIONS)
        one_of("pad_mode", self.pad_mode, PAD_MODES if self.margins is None else (*PAD_MODES, "symmetric"))
        one_of("preemphasis_scope", self.preemphasis_scope, PREEMPHASIS_SCOPES)
        one_of("epsilon_mode", self.epsilon_mode, FLOOR_MODES)
        if self.margins is not None and (self.pad != 0 or self.margins[0] < 0):
            raise ValueError(f"margins must not be negative on the left and go without pad, got {self.margins!r}, pad={self.pad}")
        for name in ("scale", "preemphasis", "epsilon"):
            if not is_finite(getattr(self, name)) or getattr(self, name) < 0:
                raise ValueError(f"{name} must be a finite number and not negative, got {getattr(self, name)!r}")
        for name in ("power", "scale", "preemphasis", "epsilon"):
            object.__setattr__(self, name, float(getattr(self, name)))
        if self.margins is not None:
            object.__setattr__(self, "margins", (int(self.margins[0]), int(self.margins[1])))
        object.__setattr__(self, "text", json.dumps(changed_fields(self)))

    @property
    def is_plain(self) -> bool:
        """Whether this is a mel spectrogram of torchaudio's parameters, without anything of front-ends."""
        return _PLAIN.issuperset(changed_fields(self))

    @property
    def n_freqs(self) -> int:
        """Number of one-sided frequency bins."""
        return self.n_fft // 2 + 1

    @property
    def emphasises_waveform(self) -> bool:
        """Whether the waveform is pre-emphasised as a whole."""
        return self.preemphasis > 0 and self.preemphasis_scope == "waveform"

    @property
    def emphasises_frames(self) -> bool:
        """Whether each frame is pre-emphasised by itself."""
        return self.preemphasis > 0 and self.preemphasis_scope == "frame"

    @property
    def support(self) -> int:
        """So many of a frame's first samples matter."""
        return self.win_length if self.remove_dc or self.emphasises_frames else self.n_fft

    @property
    def margin(self) -> int:
        """Samples padded on the left, after ``pad``."""
        return self.margins[0] if self.margins is not None else self.n_fft // 2 if self.center else 0

    @property
    def right_margin(self) -> int:
        """Samples padded on the right, after ``pad``."""
        return self.margin if self.margins is None else self.margins[1]

    @property
    def padded_mode(self) -> str:
        """``pad_mode``, or "constant" where there is no margin to pad."""
        return self.pad_mode if max(self.margin, self.right_margin) > 0 else "constant"

    def frames(self, n_samples: int) -> int:
        """Number of frames of a waveform of ``n_samples`` samples.

        Raises:
            ValueError: the waveform is empty, or too short for the pad mode or for one frame.
        """
        self.check_length(n_samples)
        return self.frame_count(n_samples)

    def frame_count(self, n_samples: int) -> int:
        """The frame formula alone, without the checks of :meth:`frames` (also for symbolic lengths)."""
        return 1 + (n_samples + 2 * self.pad + self.margin + self.right_margin - self.n_fft) // self.hop_length

    def output_frames(self, n_samples: int) -> int:
        """Frames of the features, those that hold nothing but the pad value too."""
        end = self.epilogue
        return -(-self.frame_count(n_samples) // end.frame_multiple) * end.frame_multiple if end.n_frames is None else end.n_frames

    def output_shape(self, shape: tuple[int, ...], n_mels: int) -> tuple[int, ...]:
        """Of the features of a waveform of such a shape (..., time)."""
        *batch, n_samples = shape
        axes = (n_mels, self.output_frames(n_samples))
        return (*batch, *(axes[::-1] if self.epilogue.time_major else axes))

    def valid_frames(self, n_samples: Any) -> Any:
        """Frames that a row of so many samples has if it is alone: 0 if it is too short for one, and without masked ones.

        ``n_samples`` is a number or an integer tensor.
        """
        frames, most = self.frame_count(n_samples) - self.epilogue.masked_frames, self.epilogue.n_frames
        if most is not None:
            frames = frames - (frames - most) * (frames > most)
        return frames * (frames > 0) * (n_samples + 2 * self.pad >= self.minimum_length)

    def check_length(self, n_samples: int) -> None:
        """Raise ValueError for a waveform too short to transform, with its length and the remedy."""
        if n_samples < 1:
            raise ValueError("input is empty: the waveform's last axis has 0 samples")
        length = n_samples + 2 * self.pad  # what the centre padding sees
        minimum = self.minimum_length
        if length >= minimum:
            return
        if self.margins is not None:
            mode = f"margins={self.margins}, pad_mode={self.pad_mode!r}"
        else:
            mode = f"center=True, pad_mode={self.pad_mode!r}" if self.center else "center=False"
        after_pad = f" ({length} after pad={self.pad})" if self.pad else ""
        if self.margins is not None:
            remedy = "use longer audio"
        else:
            remedy = (
                "use pad_mode='constant', a smaller n_fft, or longer audio" if self.center else "use center=True or longer audio"
            )
        channels = (
            f"; a last axis of {n_samples} looks like channels: the waveform's layout is (..., channels, time)"
            if n_samples <= 8
            else ""
        )
        raise ValueError(
            f"waveform of {n_samples} samples{after_pad} is too short for n_fft={self.n_fft} with {mode}: "
            f"it needs at least {minimum}; {remedy}{channels}"
        )

    @property
    def minimum_length(self) -> int:
        """Samples, after ``pad``, that padding and the first frame need."""
        widest = max(self.margin, self.right_margin)
        padding = {"reflect": widest + 1, "circular": widest, "symmetric": widest}.get(self.pad_mode, 1) if widest > 0 else 1
        return max(1, padding, self.n_fft - self.margin - self.right_margin)

    def source_index(self, first: int, count: int, n_samples: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the samples ``first`` … ``first + count`` of the padded signal come from.

        Position 0 of the padded signal is the first sample of frame 0.

        Returns:
            (index, valid): int64 indices into the waveform and a mask that is False where the padded signal is 0
            (the index is 0 there). Twins, tested against this: ``source_index`` in load.cuh and, for lengths in tensors,
            ``reference._source_index``.
        """
        length = n_samples + 2 * self.pad
        j = np.arange(first, first + count, dtype=np.int64) - self.margin
        inside = (j >= 0) & (j < length)
        if self.pad_mode == "reflect":
            j = np.abs(j)
            j = np.where(j >= length, 2 * (length - 1) - j, j)
            inside[:] = True
        elif self.pad_mode == "symmetric":
            j = np.where(j < 0, -1 - j, j)
            j = np.where(j >= length, 2 * length - 1 - j, j)
            inside[:] = True
        elif self.pad_mode == "replicate":
            j = np.clip(j, 0, length - 1)
            inside[:] = True
        elif self.pad_mode == "circular":
            j = np.where(j < 0, j + length, np.where(j >= length, j - length, j))
            inside[:] = True
        j = j - self.pad
        valid = inside & (j >= 0) & (j < n_samples)
        return np.where(valid, j, 0), valid


_PLAIN = {"n_fft", "win_length", "hop_length", "pad", "power", "normalized", "center", "pad_mode"}


def changed_fields(instance: StftSpec | Epilogue | Normalization) -> dict[str, Any]:
    """The fields that differ from their defaults, by name; an epilogue as such a dictionary."""
    values = {part.name: (getattr(instance, part.name), part.default) for part in fields(instance) if part.init}
    return {
        name: changed_fields(value) if isinstance(value, Epilogue) else value
        for name, (value, default) in values.items()
        if value != default
    }


@lru_cache(maxsize=1024)
def spec_of(text: str) -> StftSpec:
    """The spec of :attr:`StftSpec.text`: the same object for the same text, by which calls are recalled.

    Raises:
        ValueError, TypeError: it is no such text.
    """
    values = json.loads(text)
    if "epilogue" in values:
        values["epilogue"] = Epilogue(**values["epilogue"])
    if "margins" in values:
        values["margins"] = tuple(values["margins"])
    return StftSpec(**values)


@dataclass(frozen=True)
class MelBankSpec:
    """Where the triangular mel filters lie. Frequencies are in Hz; ``f_max`` is resolved (never None).

    Raises:
        ValueError: naming the field and the value received.
    """

    sample_rate: int
    n_fft: int
    n_mels: int
    f_min: float
    f_max: float
    norm: str | None = None
    mel_scale: str = "htk"

    def __post_init__(self) -> None:
        positive_int("n_mels", self.n_mels)
        positive_number("sample_rate", self.sample_rate)
        for name in ("f_min", "f_max"):
            if not is_finite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite frequency in Hz, got {getattr(self, name)!r}")
        if self.f_min < 0:
            raise ValueError(f"f_min must not be negative, got {self.f_min!r} Hz")
        if self.f_min > self.f_max:
            raise ValueError(f"f_min must be at most f_max, got f_min={self.f_min!r} and f_max={self.f_max!r} Hz")
        one_of("norm", self.norm, NORMS)
        one_of("mel_scale", self.mel_scale, MEL_SCALES)

    @property
    def n_freqs(self) -> int:
        """Number of one-sided frequency bins."""
        return self.n_fft // 2 + 1
