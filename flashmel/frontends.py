"""Front-ends of known models by name: ``frontend("whisper-large-v3")``."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import fused, ops
from .buffers import Tables, table
from .jit.source import AnySpecialisation
from .normalize import stack_frames
from .plan import Architecture
from .recipes import RECIPES, TABLES, WINDOWS, Known, Recipe
from .spec import changed_fields, is_finite, is_positive_int
from .stream import Stream

__all__ = ["FrontEnd", "frontend", "names", "options", "recipe"]


def names() -> list[str]:
    """The front-ends that :func:`frontend` knows.

    Example:
        >>> from flashmel import frontends
        >>> "whisper-large-v3" in frontends.names()
        True
    """
    return sorted(RECIPES)


# By an option's annotation: what a value must be, and whether it is. What is in range is said by what is made of it.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "int": ("a positive integer", is_positive_int),
    "float": ("a finite number", is_finite),
    "str": ("a string", lambda value: isinstance(value, str)),
}


def options(name: str) -> dict[str, Any]:
    """What :func:`frontend` takes beside a name, with the values it has by default.

    Raises:
        ValueError: nothing has this name.
    """
    return {option: parameter.default for option, parameter in _parameters(name).items()}


def recipe(name: str, **chosen: Any) -> Recipe:
    """The recipe of a front-end, with these options.

    Raises:
        ValueError: nothing has this name; it has no such option; the option's value is of another type or out of range.
    """
    known, parameters = _known(name), _parameters(name)
    unknown = sorted(set(chosen) - set(parameters))
    if unknown:
        listed = ", ".join(parameters) or "none"
        raise ValueError(f"front-end {name!r} has no option {', '.join(map(repr, unknown))}; it has {listed}")
    for option, value in chosen.items():
        kind, _, none = parameters[option].annotation.partition(" | ")
        what, fits = _KINDS.get(kind, ("", lambda _: True))
        if not fits(value) and not (none and value is None):
            raise ValueError(f"front-end {name!r}: {option} must be {what}{' or None' if none else ''}, got {value!r}")
    try:
        made = known.make(**chosen)
    except ValueError as error:  # which may name what an option became, a gain or margins
        given = ", ".join(f"{option}={reprlib.repr(value)}" for option, value in chosen.items())
        raise ValueError(f"front-end {name!r} with {given}: {error}") from error
    return replace(made, source=known.source, compared_with=known.compared_with, not_checked=known.not_checked)


def frontend(name: str, *, dtype: torch.dtype | None = None, **chosen: Any) -> FrontEnd:
    """The front-end of a model.

    Args:
        name: one of :func:`names`.
        dtype: of the features: float32, float16 or bfloat16; None (default) gives float32, and float64 from a module converted by
            ``.double()``. Logarithms and normalisation are taken before the cast.
        chosen: options of this front-end, see :func:`options`.

    Raises:
        ValueError: nothing has this name; it has no such option; a value is of another type or out of range.

    Example:
        >>> import torch
        >>> from flashmel import frontends
        >>> frontends.frontend("whisper-large-v3")(torch.randn(16000)).shape
        torch.Size([128, 100])
    """
    return FrontEnd(recipe(name, **chosen), name, dtype)


def specialisations(
    module: FrontEnd, arch: Architecture, samples: torch.dtype = torch.float32, *, gradient: bool = False
) -> list[AnySpecialisation]:
    """The kernels that a front-end's calls with and without lengths compile, see :func:`flashmel.fused.specialisations`.

    Raises:
        UnsupportedError: a kernel cannot be; the message says why.
    """
    tables, output, rule = (module.window, module.fb), module.dtype or torch.float32, module.recipe.normalization
    # Rows of one length are cut or filled up to it before the launch.
    return [
        kernel
        for ragged in ((False,) if module.recipe.n_samples is not None else (False, True))
        for kernel in fused.specialisations(
            *tables,
            module.spec,
            arch,
            samples,
            output,
            rule=rule,
            gradient=gradient,
            ragged=ragged,
            affine="affine" in module._buffers,
        )
    ]


def _known(name: str) -> Known:
    if name not in RECIPES:
        raise ValueError(f"no front-end is called {name!r}; there are {', '.join(names())}")
    return RECIPES[name]


def _parameters(name: str) -> dict[str, inspect.Parameter]:
    """The options, with their defaults and annotations."""
    return {p.name: p for p in inspect.signature(_known(name).make).parameters.values() if p.default is not p.empty}


class FrontEnd(Tables):
    """A model's features of waveforms: one kernel launch on a GPU, and what needs all of a row after it.

    Args:
        recipe: what to compute.
        name: shown by ``repr``.
        dtype: of the features, see :func:`frontend`.

    Shape:
        - Input: (..., time), at :attr:`sample_rate`: floating point in [-1, 1] (float32, float64, float16 or bfloat16), or int16
          PCM, which is scaled by 1/32768.
        - Output: (..., n_features, frames) or (..., frames, n_features): :attr:`layout` says which, :attr:`length_rule` how many
          frames there are.

    The buffers ``window``, ``fb`` (n_freqs, n_mels) and, in some, ``affine`` (2, n_mels) are what is computed with. No checkpoint
    has them: the name says what they are. The arguments are attributes too, and ``spec`` is the recipe's.

    Raises:
        ValueError: the dtype is none of features.
    """

    window: Tensor
    fb: Tensor

    def __init__(self, recipe: Recipe, name: str = "custom", dtype: torch.dtype | None = None) -> None:
        ops.check_output_dtype(dtype)
        spec = recipe.spec
        window = WINDOWS[recipe.window](spec.win_length).float()
        if recipe.right_padded:
            window = torch.nn.functional.pad(window, (0, spec.n_fft - spec.win_length))
        tables = {"window": window, "fb": TABLES[recipe.table](recipe.bank).float()}
        if recipe.mean is not None or recipe.deviation is not None:
            n_mels = recipe.bank.n_mels
            mean = torch.as_tensor(recipe.mean or (0.0,) * n_mels, dtype=torch.float64, device="cpu")
            deviation = torch.as_tensor(recipe.deviation or (1.0,) * n_mels, dtype=torch.float64, device="cpu")
            tables["affine"] = torch.stack((1.0 / deviation, -mean / deviation)).float()
        super().__init__(persistent=False, **tables)
        self.recipe, self.name, self.dtype, self.spec = recipe, name, dtype, spec

    @property
    def sample_rate(self) -> int:
        """Of the audio, in Hz."""
        return self.recipe.sample_rate

    @property
    def hop_length(self) -> int:
        """Samples from one frame to the next, before ``recipe.stack`` frames are made into one."""
        return self.spec.hop_length

    @property
    def n_features(self) -> int:
        """Values of a frame of features: the number of mels, times that of the frames that are stacked."""
        return self.recipe.bank.n_mels * self.recipe.stack

    def forward(
        self,
        waveform: Tensor | Sequence[Tensor],
        lengths: Tensor | None = None,
        *,
        sampling_rate: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Features of waveforms.

        Args:
            waveform: (..., time); or a list of 1-D tensors, or a jagged nested tensor, which have their lengths with them.
            lengths: samples of each row, an integer tensor of the waveform's shape without its last axis. Each row then is what it
                would be alone, its ends included; nothing waits for a GPU.
            sampling_rate: of the waveform, in Hz, if it is to be compared with :attr:`sample_rate`. It has the name that it has in
                transformers' processors, so that keyword arguments for them pass.

        Returns:
            The features; with lengths, (features, lengths of the features in frames): behind them there is the pad value.

        Raises:
            TypeError: the waveform is neither a tensor nor a list of tensors.
            ValueError: another sampling rate; a waveform that is empty, too short, of another dtype or on another device;
                lengths that do not fit.
        """
        if sampling_rate is not None and sampling_rate != self.sample_rate:
            raise ValueError(
                f"front-end {self.name!r} needs audio at {self.sample_rate} Hz, got sampling_rate={sampling_rate}: resample"
            )
        waveform, lengths = _batched(waveform, lengths)
        if lengths is not None and isinstance(waveform, Tensor) and waveform.dim():
            lengths = ops.checked_lengths(lengths, waveform)
        own = lengths
        waveform, lengths = self._prepared(waveform, lengths)
        tables, affine, rule = (table(self, "window"), table(self, "fb")), self._buffers.get("affine"), self.recipe.normalization
        if rule is None:
            features = ops.features(waveform, *tables, self.spec, self.dtype, lengths, affine)
        else:
            features = ops.normalized_features(waveform, *tables, self.spec, rule, self.dtype, lengths, affine)
        features = self._finished(features, waveform.shape[-1] if lengths is None else lengths)
        return features if own is None else (features, self.output_lengths(own))

    def warmup(self, dtype: torch.dtype = torch.float32, *, gradient: bool = False, lengths: bool = False) -> None:
        """Make ready all that calls on the module's device need, see :meth:`flashmel.MelSpectrogram.warmup`.

        Args:
            dtype: of the waveforms to come.
            gradient: whether their gradient will be wanted.
            lengths: whether there will be calls with lengths too.

        Example:
            >>> from flashmel import frontends
            >>> frontends.frontend("whisper-large-v3").warmup(lengths=True)
        """
        frames = self.recipe.stack + self.spec.epilogue.masked_frames  # so that one is left
        n_samples = max(1, self.spec.minimum_length - 2 * self.spec.pad) + frames * self.hop_length
        ops.rehearse(self, n_samples, dtype, self.window.device, gradient)
        if lengths:
            full = torch.full((1,), n_samples, device=self.window.device)
            ops.rehearse(lambda waveform: self(waveform, full)[0], n_samples, dtype, self.window.device, gradient)

    def stream(self, batch: int | tuple[int, ...] | None = None) -> Stream:
        """The same features of audio that arrives in chunks, see :class:`flashmel.stream.Stream`.

        Args:
            batch: how many streams go together, a number or a shape; None for one without an axis of its own.

        Raises:
            ValueError: the features cannot be told before the audio's end; the message says why.
        """
        return Stream(self, batch)

    def output_lengths(self, lengths: Any) -> Any:
        """Frames of features for rows of so many samples, a number or an integer tensor."""
        recipe = self.recipe
        if recipe.n_samples is None:
            return self.spec.valid_frames(self._lengthened(lengths)) // recipe.stack
        limit = self.spec.frame_count(recipe.n_samples)
        frames = -(-lengths // self.hop_length)  # that begin before the row's end, as transformers' masks count them
        return frames.clamp(max=limit) if isinstance(frames, Tensor) else min(frames, limit)

    def _lengthened(self, lengths: Any) -> Any:
        """Samples of a row once zeros are behind it."""
        least, multiple = self.recipe.min_samples, self.recipe.sample_multiple
        if least and torch.compiler.is_compiling() and not isinstance(lengths, Tensor):
            lengths = torch.sym_max(least, lengths)  # a comparison would fix on which side of it
        elif least:
            # An empty row stays empty: it is no audio.
            lengths = lengths + (least - lengths) * (lengths < least) * (lengths > 0)
        return -(-lengths // multiple) * multiple

    def _prepared(self, waveform: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Waveform and lengths with zeros behind the rows, where the recipe wants them."""
        recipe = self.recipe
        if not isinstance(waveform, Tensor) or waveform.dim() == 0 or waveform.shape[-1] == 0:
            return waveform, lengths  # ops says what is wrong
        if recipe.n_samples is None and recipe.sample_multiple == 1 and not recipe.min_samples:
            return waveform, lengths
        n_samples = waveform.shape[-1]
        if lengths is not None:
            behind = torch.arange(n_samples, device=waveform.device) >= lengths[..., None]
            waveform = waveform.masked_fill(behind, 0)
            lengths = None if recipe.n_samples is not None else self._lengthened(lengths)
        wanted = self._lengthened(n_samples) if recipe.n_samples is None else recipe.n_samples
        if torch.compiler.is_compiling() or wanted != n_samples:  # there a comparison would fix the length
            waveform = torch.nn.functional.pad(waveform, (0, wanted - n_samples))
        return waveform, lengths

    def _finished(self, features: Tensor, lengths: Tensor | int) -> Tensor:
        """All that follows the launches. The lengths are those that they had."""
        recipe, end = self.recipe, self.spec.epilogue
        stacked = stack_frames(features, recipe.stack)
        if end.frame_multiple % recipe.stack == 0 or not isinstance(lengths, Tensor):
            return stacked
        # A frame may be stacked of a row's last ones and of what fills up the batch. Alone, the row has no such frame.
        valid = self.spec.valid_frames(lengths.to(stacked.device)) // recipe.stack
        behind = torch.arange(stacked.shape[-2], device=stacked.device) >= valid[..., None]
        return stacked.masked_fill(behind[..., None], (recipe.normalization or end).pad_value)

    @property
    def layout(self) -> str:
        """The features' axes, with their number."""
        return f"(..., frames, {self.n_features})" if self.spec.epilogue.time_major else f"(..., {self.n_features}, frames)"

    @property
    def length_rule(self) -> str:
        """Frames of a row of L samples, as a formula, and what the features are padded to."""
        spec, recipe = self.spec, self.recipe
        if recipe.n_samples is not None:
            frames = spec.frame_count(recipe.n_samples)
            return f"min(ceil(L / {spec.hop_length}), {frames}), padded to {frames}"
        samples = "L" if recipe.sample_multiple == 1 else f"ceil(L / {recipe.sample_multiple}) * {recipe.sample_multiple}"
        samples = samples if not recipe.min_samples else f"max(L, {recipe.min_samples})"
        rest = spec.margin + spec.right_margin - spec.n_fft + spec.hop_length * (1 - spec.epilogue.masked_frames)
        rule = (
            f"({samples} {'+' if rest > 0 else '-'} {abs(rest)}) // {spec.hop_length}"
            if rest
            else f"{samples} // {spec.hop_length}"
        )
        joined = "" if recipe.stack == 1 else f" // {recipe.stack}"
        end = spec.epilogue
        if end.n_frames is not None:
            return f"min({rule}{joined}, {end.n_frames}), padded to {end.n_frames}"
        padding = [f"by {end.masked_frames}"] if end.masked_frames else []
        if end.frame_multiple > 1:
            padding.append(f"to a multiple of {end.frame_multiple}{' before the last division' if joined else ''}")
        return f"{rule}{joined}" + (f", padded {' and '.join(padding)}" if padding else "")

    def extra_repr(self) -> str:
        recipe = self.recipe
        shown = {"sample_rate": self.sample_rate, "layout": self.layout, "lengths": self.length_rule}
        shown |= {"window": recipe.window, "bank": recipe.bank, "table": recipe.table, **changed_fields(self.spec)}
        if recipe.normalization is not None:
            shown["normalization"] = changed_fields(recipe.normalization)
        shown |= {"dtype": self.dtype, "path": ops.path(self.spec, self.window.device)}
        shown |= {name: value for name in ("source", "compared_with", "not_checked") if (value := getattr(recipe, name))}
        return ", ".join((repr(self.name), *(f"{name}={value!r}" for name, value in shown.items())))


def _batched(waveform: Any, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Waveform and lengths as tensors, of whatever has rows of several lengths."""
    ragged = isinstance(waveform, Tensor) and waveform.is_nested
    if (ragged or isinstance(waveform, (list, tuple))) and lengths is not None:
        raise ValueError("a list or nested tensor of waveforms has its own lengths: pass none beside it")
    if ragged:
        if waveform.layout != torch.jagged or waveform.dim() != 2:
            raise ValueError(
                "a nested tensor of waveforms must be jagged, of shape (batch, time); "
                f"got one of {waveform.dim()} axes and layout {waveform.layout}"
            )
        if waveform.lengths() is not None:
            raise ValueError("a nested tensor of waveforms must have its rows one behind the other: call its contiguous()")
        return torch.nested.to_padded_tensor(waveform, 0.0), waveform.offsets().diff()
    if isinstance(waveform, (list, tuple)):
        for row in waveform:
            if not isinstance(row, Tensor):
                raise TypeError(f"a list of waveforms must hold tensors, got {type(row).__name__}: use torch.as_tensor")
        if not waveform:
            raise ValueError("a list of waveforms must hold at least one, got an empty list")
        if any(row.dim() != 1 for row in waveform):
            shapes = ", ".join(str(tuple(row.shape)) for row in waveform)
            raise ValueError(f"a list of waveforms must hold 1-D tensors, got {len(waveform)} tensors of shapes {shapes}")
        if len(dtypes := {row.dtype for row in waveform}) > 1:
            raise ValueError(f"a list of waveforms must hold tensors of one dtype, got {', '.join(sorted(map(str, dtypes)))}")
        lengths = torch.tensor([row.shape[0] for row in waveform], device="cpu")
        return torch.nn.utils.rnn.pad_sequence(list(waveform), batch_first=True), lengths
    return waveform, lengths
