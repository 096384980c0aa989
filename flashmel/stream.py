"""Front-ends over audio that arrives in chunks."""

from __future__ import annotations

import math
import numbers
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import ops, reference
from .normalize import stack_frames
from .recipes import Recipe

if TYPE_CHECKING:
    from .frontends import FrontEnd


def obstacle(recipe: Recipe) -> str | None:
    """Why features of this recipe cannot be told before the audio's end, or None if they can."""
    rule = recipe.normalization
    if rule is not None:
        what = "the loudest value" if rule.kind == "maximum" else f"the {rule.kind}"
        return f"its features depend on {what} of the whole audio"
    if recipe.spec.pad_mode == "circular" and recipe.spec.margin:
        return "its first frame holds samples of the audio's end"
    for name, fixed in (("n_samples", recipe.n_samples), ("n_frames", recipe.spec.epilogue.n_frames)):
        if fixed is not None:
            return f"it makes audio of any length into one of fixed length ({name}={fixed})"
    if recipe.min_samples:
        return f"it makes audio at least {recipe.min_samples} samples long"
    return None


class Stream:
    """Features of audio that arrives in chunks: each call returns the frames that no later sample can change.

    All that is returned, joined over frames, is what the front-end makes of all chunks joined over time. Memory is that of a few
    frames. No gradient is recorded. ``samples`` says how many samples came, ``frames`` how many frames were returned, before they
    are stacked.

    Args:
        frontend: whose features. Its tables are used as they are at each call.
        batch: how many streams go together: a number or a shape; None for one without an axis of its own.

    Raises:
        ValueError: the features cannot be told before the audio's end; the message says why.

    Example:
        >>> import torch
        >>> from flashmel import frontend
        >>> stream = frontend("vocos").stream()
        >>> audio = torch.randn(5000)
        >>> parts = [stream(chunk) for chunk in audio.split(700)] + [stream.finish()]
        >>> torch.cat(parts, -1).shape
        torch.Size([100, 20])
    """

    def __init__(self, frontend: FrontEnd, batch: int | tuple[int, ...] | None = None) -> None:
        if (reason := obstacle(frontend.recipe)) is not None:
            raise ValueError(f"front-end {frontend.name!r} cannot be streamed: {reason}")
        self.frontend = frontend
        self.batch = () if batch is None else tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        if any(isinstance(n, bool) or not isinstance(n, numbers.Integral) or n < 0 for n in self.batch):
            raise ValueError(f"batch must be a number of streams, a shape of them or None, got {batch!r}")
        spec = frontend.spec
        # Of samples that are scaled, emphasised and padded already.
        self._spec = replace(
            spec,
            margins=(0, 0),
            pad=0,
            pad_mode="constant",
            scale=1.0,
            preemphasis=spec.preemphasis if spec.emphasises_frames else 0.0,
            epilogue=replace(spec.epilogue, masked_frames=0, frame_multiple=1, n_frames=None),
        )
        # Zeros at the window's end: a frame is final though its samples under them are not known.
        self._blind = spec.n_fft - spec.win_length if frontend.recipe.right_padded else (spec.n_fft - spec.win_length) // 2
        # Samples that the padding at either end needs before it can be made: where it mirrors, a margin's and the one about which.
        pivot = {"reflect": 1, "symmetric": 0}.get(spec.pad_mode)
        self._first = 1 if pivot is None or not spec.margin else spec.margin + pivot
        self._kept = 1 if pivot is None else max(spec.right_margin, 0) + pivot
        self.reset()

    def reset(self) -> None:
        """Forget what came: the next chunk begins new audio."""
        self._tail: Tensor | None = None  # prepared samples from number _start on
        self._start = 0
        self._before: Tensor | None = None  # the last sample, scaled and before it was emphasised
        self._last: Tensor | None = None  # the last sample as it came
        self.samples = self.frames = 0

    @torch.no_grad()
    def __call__(self, chunk: Tensor) -> Tensor:
        """Features of the frames that this chunk completes, perhaps none.

        Args:
            chunk: (*batch, samples), any number of them; dtypes are the front-end's.

        Raises:
            TypeError: the chunk is not a tensor.
            ValueError: its shape, dtype or device does not fit.
        """
        self._add(chunk)
        spec, recipe = self.frontend.spec, self.frontend.recipe
        known = self.samples + spec.pad if spec.pad < 0 else self.samples  # what is cropped at the end is not known yet
        if self.samples + 2 * spec.pad < self._first or known < 1:
            return self._features(0)
        under_window = 1 + (known + spec.pad + spec.margin + self._blind - spec.n_fft) // spec.hop_length
        final = min(under_window, int(spec.valid_frames(self.samples)))
        final = max(final - final % recipe.stack, self.frames)
        features = self._features(final - self.frames)
        self._forget()
        return stack_frames(features, recipe.stack)

    @torch.no_grad()
    def finish(self) -> Tensor:
        """Features of the frames that the audio's end completes. The next chunk begins new audio, also after an error.

        Raises:
            ValueError: the audio as a whole was empty or too short.
        """
        try:
            return self._finished()
        finally:
            self.reset()

    def _finished(self) -> Tensor:
        spec, recipe = self.frontend.spec, self.frontend.recipe
        rest = -self.samples % recipe.sample_multiple
        if rest and self._last is not None:
            self._add(self._last.new_zeros((*self.batch, rest)))
        n_frames = spec.frames(self.samples)
        features = self._features(n_frames - self.frames)
        masked = min(spec.epilogue.masked_frames, features.shape[self._axis])
        features.narrow(self._axis, features.shape[self._axis] - masked, masked).fill_(spec.epilogue.pad_value)
        missing = spec.output_frames(self.samples) - n_frames
        if missing:
            shape = list(features.shape)
            shape[self._axis] = missing
            features = torch.cat((features, features.new_full(shape, spec.epilogue.pad_value)), self._axis)
        return stack_frames(features, recipe.stack)

    @property
    def _axis(self) -> int:
        return -2 if self.frontend.spec.epilogue.time_major else -1

    def _add(self, chunk: Tensor) -> None:
        """Prepare samples and keep them."""
        window, spec = self.frontend.window, self.frontend.spec
        if not isinstance(chunk, Tensor):
            raise TypeError(f"chunk must be a torch.Tensor, got {type(chunk).__name__}")
        if chunk.dim() == 0 or chunk.shape[:-1] != self.batch:
            raise ValueError(f"chunk must have shape {(*self.batch, 'samples')}, got {tuple(chunk.shape)}")
        if chunk.dtype not in ops.INPUT_DTYPES or chunk.device != window.device:
            raise ValueError(f"chunk must be real audio on {window.device}, got {chunk.dtype} on {chunk.device}")
        if chunk.shape[-1] == 0:
            return
        rows = chunk.reshape(math.prod(self.batch), chunk.shape[-1])
        prepared = reference.samples(rows, reference.compute_dtype(window), spec.scale)
        if spec.emphasises_waveform:
            before = torch.zeros_like(prepared[:, :1]) if self._before is None else self._before
            self._before = prepared[:, -1:].clone()
            prepared = prepared - spec.preemphasis * torch.cat((before, prepared[:, :-1]), -1)
        self._last = chunk[..., -1:]
        self._tail = prepared.clone() if self._tail is None else torch.cat((self._tail, prepared), -1)
        self.samples += chunk.shape[-1]

    def _features(self, count: int) -> Tensor:
        """The next so many frames, of the samples that came, as if the audio ended here."""
        spec, module = self.frontend.spec, self.frontend
        n_mels = module.recipe.bank.n_mels
        if count <= 0 or self._tail is None:
            dtype = module.dtype or reference.compute_dtype(module.window)
            shape = (0, n_mels) if spec.epilogue.time_major else (n_mels, 0)
            return torch.empty((*self.batch, *shape), dtype=dtype, device=module.window.device)
        first = self.frames * spec.hop_length
        length = (count - 1) * spec.hop_length + spec.n_fft
        begin = first - spec.margin - spec.pad
        if begin >= 0 and spec.pad >= 0 and begin + length <= self.samples:
            samples = self._tail[:, begin - self._start : begin - self._start + length]
        else:
            index, valid = (
                torch.from_numpy(array).to(self._tail.device) for array in spec.source_index(first, length, self.samples)
            )
            # Under the window's zeros any sample will do, one that is not known as well.
            samples = self._tail[:, (index - self._start).clamp(0, self._tail.shape[1] - 1)].masked_fill(~valid, 0)
        self.frames += count
        features = ops.features(samples, module.window, module.fb, self._spec, module.dtype, None, module._buffers.get("affine"))
        return features.reshape(*self.batch, *features.shape[1:])

    def _forget(self) -> None:
        """Drop samples that no later frame and no padding needs."""
        if self._tail is None:
            return
        spec = self.frontend.spec
        keep = min(self.frames * spec.hop_length - spec.margin - max(spec.pad, 0), self.samples - self._kept - 2 * abs(spec.pad))
        drop = max(0, keep - self._start)
        # Copied only once there is as much to drop as to keep: a chunk of one sample must not cost a copy of all.
        if drop > self._tail.shape[1] // 2:
            self._tail = self._tail[:, drop:].clone()
            self._start += drop
