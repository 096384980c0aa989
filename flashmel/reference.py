"""The transform in plain torch: the path without a GPU, the fallback on one, and the oracle of the tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .spec import Epilogue, StftSpec

# Samples of windowed frames in one piece; a piece takes some 16 bytes per sample beside the output: 8 MiB on a CPU.
# 8 x 30 s at n_fft 400 on 2 cores took 0.8 of torchaudio's time at 2**15, 0.4 at 2**17, 0.3 from 2**18 to 2**20. Larger
# pieces also mean fewer waits for a thread that another process holds up.
_PIECE_CPU = 2**19
_PIECE_DEVICE = 2**22  # 64 MiB


def features(
    waveform: Tensor,
    window: Tensor,
    fb: Tensor,
    spec: StftSpec,
    dtype: torch.dtype | None,
    lengths: Tensor | None = None,
    affine: Tensor | None = None,
) -> Tensor:
    """Features of a waveform, all that :class:`StftSpec` and its :class:`Epilogue` say, all on one device.

    Args:
        waveform: (..., time), floating point or int16 PCM (scaled by 1/32768).
        window: (win_length,); float64 here means that all is computed in float64, anything else in float32.
        fb: (n_freqs, n_mels).
        spec: framing, prologue, normalisation, power, epilogue.
        dtype: of the result; the dtype computed in if None.
        lengths: samples of each row, an integer tensor of the waveform's shape without its last axis; what lies behind is not read,
            and each row is what it would be alone, cut off there. Clamped to what the waveform has. All of it if None.
        affine: (2, n_mels), gain and bias per mel, after the epilogue's own.

    Returns:
        (..., n_mels, frames), or (..., frames, n_mels) if the epilogue is time-major, contiguous; as many frames as the waveform's
        last axis makes. Those behind ``spec.valid_frames`` of a row hold the epilogue's ``pad_value``: all, in a row too short for
        one. Differentiable (twice too) in waveform, window, fb and affine; gradients are finite, and 0 where a bin is. Without a
        gradient to record it is made in pieces: memory is the output and a few MiB, and on a CPU a row's result does not depend on
        its batch.

    Raises:
        ValueError: the waveform is empty or too short, see :meth:`StftSpec.check_length`.
    """
    return _transform(waveform, window, fb, spec, dtype, lengths, affine)


def spectrogram(waveform: Tensor, window: Tensor, spec: StftSpec) -> Tensor:
    """|X|**power of a waveform, (..., time) to (..., n_freqs, frames); see :func:`features`."""
    return _transform(waveform, window, None, spec, None)


def vector_jacobian_product(
    gradient: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    needed: Sequence[bool],
    spec: StftSpec,
    lengths: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of :func:`features` for those of (waveform, window, fb, affine) that are needed, given the gradient of its result.

    Where gradients are recorded, these are recorded too, as functions of all the tensors.
    """
    recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        if not recorded:
            pairs = zip(tensors, needed, strict=True)
            tensors = tuple(None if t is None else t.detach().requires_grad_(need) for t, need in pairs)  # type: ignore[assignment]
        waveform, window, fb, affine = tensors
        found = features(waveform, window, fb, spec, None, lengths, affine)
        inputs = [t for t, need in zip(tensors, needed, strict=True) if t is not None and need]
        return torch.autograd.grad(found, inputs, gradient.to(found.dtype), create_graph=recorded)


def features_backward(
    gradient: Tensor,
    waveform: Tensor,
    window: Tensor,
    fb: Tensor,
    spec: StftSpec,
    lengths: Tensor | None = None,
    affine: Tensor | None = None,
) -> Tensor:
    """Gradient of :func:`features` for the waveform, in its shape and dtype, given the gradient of the result."""
    if spec.is_plain and lengths is None and affine is None:
        return _plain_backward(gradient, waveform, window, fb, spec)
    with torch.no_grad():
        (found,) = vector_jacobian_product(gradient, (waveform, window, fb, affine), (True, False, False, False), spec, lengths)
    return found


def _plain_backward(mel_gradient: Tensor, waveform: Tensor, window: Tensor, fb: Tensor, spec: StftSpec) -> Tensor:
    """:func:`features_backward` of a plain mel spectrogram.

    The same as autograd's, but in pieces, from the waveform alone, and in an order that never changes; itself it cannot be
    differentiated.
    """
    n_samples, compute = waveform.shape[-1], compute_dtype(window)
    n_frames, n_rows = spec.frames(n_samples), math.prod(waveform.shape[:-1])
    with torch.no_grad(), torch.autocast(waveform.device.type, enabled=False):
        window, bank = _scaled_window(window.to(compute), spec), fb.to(compute)
        rows = waveform.reshape(n_rows, n_samples)
        mel_rows = mel_gradient.reshape(n_rows, *mel_gradient.shape[-2:])
        gradient = torch.empty((n_rows, n_samples), dtype=waveform.dtype, device=waveform.device)
        chunk, group = _piece(n_frames, rows, spec)
        if rows.device.type == "cpu":  # how a matrix product rounds depends on its shape: see _fill
            group = 1
        cuts = {first: _Cut(spec, first, min(first + chunk, n_frames), rows) for first in range(0, n_frames, chunk)}
        for row in range(0, n_rows, group):
            some = slice(row, row + group)
            padded = torch.zeros((len(rows[some]), n_samples + 2 * (spec.pad + spec.margin)), dtype=compute, device=rows.device)
            for first, cut in cuts.items():
                g = mel_rows[some, :, first : first + chunk].to(compute)
                _add_frames(
                    padded[:, first * spec.hop_length :], _frame_gradients(g, cut(rows[some], compute), window, bank, spec), spec
                )
            gradient[some] = _unpadded(padded, spec)
    return gradient.reshape(waveform.shape)


def _frame_gradients(g: Tensor, padded: Tensor, window: Tensor, bank: Tensor, spec: StftSpec) -> Tensor:
    """Gradients of the frames' samples, (rows, frames, n_fft)."""
    bins = torch.fft.rfft(padded.unfold(-1, spec.n_fft, spec.hop_length) * window)
    weight = spec.power * (g.mT @ bank.mT)
    if spec.power != 2.0:
        energy = torch.addcmul(bins.real.square(), bins.imag, bins.imag)
        weight = torch.where(energy == 0, 0.0, weight * energy.pow(spec.power / 2 - 1))
    bins = bins * weight
    bins[..., 0] *= 2  # the inverse transform counts the other bins twice
    if spec.n_fft % 2 == 0:
        bins[..., -1] *= 2
    return torch.fft.irfft(bins, spec.n_fft) * (window * (spec.n_fft / 2))


def _add_frames(out: Tensor, frames: Tensor, spec: StftSpec) -> None:
    """Add overlapping frames to the samples that they begin at the start of."""
    hop, n_frames = spec.hop_length, frames.shape[1]
    for begin in range(0, spec.n_fft, hop):
        part = frames[:, :, begin : begin + hop]  # of each frame: parts of different frames do not overlap
        out[:, begin : begin + (n_frames - 1) * hop + part.shape[-1]].unfold(1, part.shape[-1], hop).add_(part)


def _unpadded(padded: Tensor, spec: StftSpec) -> Tensor:
    """The adjoint of :func:`padded_rows`."""
    margin = spec.margin
    if margin:
        left, rows, right = padded.split((margin, padded.shape[1] - 2 * margin, margin), 1)
        if spec.pad_mode == "reflect":
            rows[:, 1 : margin + 1] += left.flip(1)
            rows[:, rows.shape[1] - 1 - margin : -1] += right.flip(1)
        elif spec.pad_mode == "replicate":
            rows[:, 0] += left.sum(1)
            rows[:, -1] += right.sum(1)
        elif spec.pad_mode == "circular":
            rows[:, rows.shape[1] - margin :] += left
            rows[:, :margin] += right
        padded = rows
    return torch.nn.functional.pad(padded, (-spec.pad, -spec.pad))


def compute_dtype(window: Tensor) -> torch.dtype:
    """The dtype of the arithmetic, and of the result unless another is asked for."""
    return torch.float64 if window.dtype == torch.float64 else torch.float32


def _transform(
    waveform: Tensor,
    window: Tensor,
    fb: Tensor | None,
    spec: StftSpec,
    dtype: torch.dtype | None,
    lengths: Tensor | None = None,
    affine: Tensor | None = None,
) -> Tensor:
    *batch, n_samples = waveform.shape
    own_frames, n_frames = spec.frames(n_samples), spec.output_frames(n_samples)
    compute = compute_dtype(window)
    n_rows, pad_value = math.prod(batch), spec.epilogue.pad_value
    with torch.autocast(waveform.device.type, enabled=False):
        rows = waveform.reshape(n_rows, n_samples)
        lengths = None if lengths is None else lengths.reshape(n_rows).to(torch.int64).clamp(0, n_samples)
        valid = spec.valid_frames(n_samples if lengths is None else lengths[:, None])
        window = _scaled_window(window.to(compute), spec)
        bank = None if fb is None else fb.to(compute)
        affine = None if affine is None else affine.to(compute)
        if n_rows and (torch.compiler.is_compiling() or is_differentiated(waveform, window, bank, affine)):
            if lengths is None:
                padded = padded_rows(_emphasised(samples(rows, compute, spec.scale), spec), spec)
            else:
                padded = _gathered(rows, compute, spec, 0, (own_frames - 1) * spec.hop_length + spec.n_fft, lengths[:, None])
            powers = raised(_energy(padded, window, spec)[:, : min(own_frames, n_frames)], spec.power)
            out = _epilogue(powers if bank is None else powers @ bank, spec.epilogue, affine)
            out = torch.nn.functional.pad(out, (0, 0, 0, n_frames - out.shape[1])) if n_frames > own_frames else out
            if lengths is not None or spec.epilogue.masked_frames or n_frames > own_frames:
                out = out.masked_fill(_is_behind(valid, n_frames, rows)[..., None], pad_value)
            out = (out if spec.epilogue.time_major else out.mT).contiguous().to(dtype or compute)
        else:
            shape = (n_frames, spec.n_freqs if bank is None else bank.shape[1])
            shape = shape if spec.epilogue.time_major else shape[::-1]
            out = torch.empty((n_rows, *shape), dtype=dtype or compute, device=waveform.device)
            by_time = out if spec.epilogue.time_major else out.mT
            with torch.no_grad():
                if lengths is None:
                    by_time[:, valid:] = pad_value
                    _fill(by_time[:, :valid], rows, None, window, bank, spec, affine)
                elif rows.device.type == "cpu":  # each row indeed alone: nothing is computed behind its length
                    for row, (length, end) in enumerate(zip(lengths.tolist(), valid.flatten().tolist(), strict=True)):
                        by_time[row, end:] = pad_value
                        _fill(by_time[row : row + 1, :end], rows[row : row + 1, :length], None, window, bank, spec, affine)
                else:
                    _fill(by_time, rows, lengths, window, bank, spec, affine)
                    by_time.masked_fill_(_is_behind(valid, n_frames, rows)[..., None], pad_value)
    return out.reshape(*batch, *out.shape[1:])


def _is_behind(valid: Tensor | int, n_frames: int, like: Tensor) -> Tensor:
    """Which frames lie behind a row's last: (rows or 1, n_frames)."""
    return torch.arange(n_frames, device=like.device).expand(1, n_frames) >= valid


def is_differentiated(*tensors: Tensor | None) -> bool:
    """Whether autograd, forward-mode AD or a torch.func transform follows these tensors, so that only plain operations will do."""
    present = [t for t in tensors if t is not None]
    return (torch.is_grad_enabled() and any(t.requires_grad for t in present)) or is_transformed(*present)


def is_transformed(*tensors: Tensor) -> bool:
    """Whether forward-mode AD or a torch.func transform follows these tensors."""
    if torch.compiler.is_compiling():  # what follows cannot be traced
        return False
    return torch._C._are_functorch_transforms_active() or any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _scaled_window(window: Tensor, spec: StftSpec) -> Tensor:
    """The window centred in n_fft samples, with the normalisation of the bins in it."""
    left = (spec.n_fft - window.shape[0]) // 2
    if spec.normalized == "frame_length":
        scaled = window * (1.0 / math.sqrt(spec.n_fft))
    elif spec.normalized == "window":
        scaled = window / window.square().sum().sqrt()
    else:
        scaled = window
    return torch.nn.functional.pad(scaled, (left, spec.n_fft - window.shape[0] - left))


def samples(waveform: Tensor, compute: torch.dtype, scale: float = 1.0) -> Tensor:
    """The waveform in the dtype of the arithmetic, integers scaled to 1."""
    converted = waveform.to(compute)
    factor = scale / 32768.0 if waveform.dtype == torch.int16 else scale
    return converted if factor == 1.0 else converted * factor


def _emphasised(rows: Tensor, spec: StftSpec) -> Tensor:
    """Rows after the pre-emphasis of waveforms."""
    if not spec.emphasises_waveform:
        return rows
    return rows - spec.preemphasis * torch.nn.functional.pad(rows[:, :-1], (1, 0))


def padded_rows(rows: Tensor, spec: StftSpec) -> Tensor:
    """Rows with ``pad`` and the margins around them."""
    if spec.pad:
        rows = torch.nn.functional.pad(rows, (spec.pad, spec.pad))
    left, right = spec.margin, max(spec.right_margin, 0)
    if left or right:
        if spec.pad_mode == "symmetric":
            rows = torch.cat((rows[:, :left].flip(1), rows, rows[:, rows.shape[1] - right :].flip(1)), 1)
        else:
            rows = torch.nn.functional.pad(rows, (left, right), mode=spec.pad_mode)
    return rows[:, : rows.shape[1] + min(spec.right_margin, 0)]


def _gathered(
    rows: Tensor, compute: torch.dtype, spec: StftSpec, begin: int, count: int, lengths: Tensor | int | None = None
) -> Tensor:
    """Samples ``begin`` … ``begin + count`` of the padded and pre-emphasised signal, (rows, count).

    ``lengths`` are the rows' own, (rows, 1); all have the same if None.
    """
    n_samples = rows.shape[1]
    index, valid = _source_index(spec, begin, count, n_samples if lengths is None else lengths, rows.device)
    index, valid = index.clamp(0, n_samples - 1).expand(len(rows), count), valid.expand(len(rows), count)
    taken = samples(rows.gather(1, index), compute, spec.scale)
    if spec.emphasises_waveform:
        before = samples(rows.gather(1, (index - 1).clamp(min=0)), compute, spec.scale)
        taken = taken - spec.preemphasis * before.masked_fill(~valid | (index == 0), 0)
    return taken.masked_fill(~valid, 0)


def _source_index(spec: StftSpec, begin: int, count: int, n_samples: Tensor | int, device: torch.device) -> tuple[Tensor, Tensor]:
    """:meth:`StftSpec.source_index` for lengths in a tensor; where the mask is False, and in rows too short, any index."""
    length = n_samples + 2 * spec.pad
    j = torch.arange(begin - spec.margin, begin - spec.margin + count, device=device).expand(1, count)
    inside = torch.ones_like(j, dtype=torch.bool)
    if spec.pad_mode == "reflect":
        j = length - 1 - (length - 1 - j.abs()).abs()
    elif spec.pad_mode == "symmetric":
        j = torch.where(j < 0, -1 - j, j)
        j = torch.where(j >= length, 2 * length - 1 - j, j)
    elif spec.pad_mode == "replicate":
        j = torch.where(j >= length, length - 1, j.clamp(min=0))
    elif spec.pad_mode == "circular":
        j = torch.where(j < 0, j + length, torch.where(j >= length, j - length, j))
    else:
        inside = (j >= 0) & (j < length)
    j = j - spec.pad
    return j, inside & (j >= 0) & (j < n_samples)


def _energy(padded: Tensor, window: Tensor, spec: StftSpec) -> Tensor:
    """|X|**2 with its epsilon, (rows, padded time) to (rows, frames, n_freqs)."""
    frames = padded.unfold(-1, spec.n_fft, spec.hop_length)
    frames, window = frames[..., : spec.support], window[: spec.support]
    if spec.remove_dc:
        frames = frames - frames.mean(-1, keepdim=True)
    if spec.emphasises_frames:
        frames = frames - spec.preemphasis * torch.cat((frames[..., :1], frames[..., :-1]), -1)
    bins = torch.fft.rfft(frames * window, spec.n_fft)
    energy = torch.addcmul(bins.real.square(), bins.imag, bins.imag)  # faster than abs(), and its gradient at 0 is 0
    if spec.epsilon:
        energy = energy + spec.epsilon if spec.epsilon_mode == "add" else energy.clamp(min=spec.epsilon)
    return energy


def _epilogue(mel: Tensor, epilogue: Epilogue, affine: Tensor | None) -> Tensor:
    """Features from mel values, (..., n_mels), before they are cast."""
    if epilogue.log is not None:
        if epilogue.floor:
            mel = mel + epilogue.floor if epilogue.floor_mode == "add" else mel.clamp(min=epilogue.floor)
        silent = mel == 0 if not epilogue.floor else None  # as in raised()
        if silent is not None:
            mel = mel.masked_fill(silent, 1.0)
        mel = mel.log() if epilogue.log == "ln" else mel.log10()
        if silent is not None:
            mel = mel.masked_fill(silent, -math.inf)
        if epilogue.log == "db":
            mel = mel * 10.0
        if epilogue.log_floor != -math.inf:
            mel = mel.clamp(min=epilogue.log_floor)
    if epilogue.gain != 1.0:
        mel = mel * epilogue.gain
    if epilogue.bias:
        mel = mel + epilogue.bias
    return mel if affine is None else mel * affine[0] + affine[1]


def raised(energy: Tensor, power: float) -> Tensor:
    """|X|**power from |X|**2, with gradients of 0 where that is 0."""
    if power == 2.0:
        return energy
    # The derivatives of pow at 0 are infinite below an exponent of 1 (and the second below 2): silence takes no part in it.
    silent = energy == 0
    return energy.masked_fill(silent, 1.0).pow(power / 2).masked_fill(silent, 0.0)


def _fill(
    out: Tensor,
    rows: Tensor,
    lengths: Tensor | None,
    window: Tensor,
    bank: Tensor | None,
    spec: StftSpec,
    affine: Tensor | None,
) -> None:
    """Write features into ``out``, (rows, frames, features), piece by piece: several short rows, or a part of one."""
    (n_rows, n_samples), n_frames = rows.shape, out.shape[1]
    if n_frames == 0:
        return
    on_cpu = rows.device.type == "cpu"
    chunk, group = _piece(n_frames, rows, spec)

    def result(padded: Tensor) -> Tensor:
        energy = _energy(padded, window, spec)[:, :chunk]
        # On a CPU row by row: how products, roots and logarithms round depends on shapes, and a row must not depend on its batch.
        return torch.stack([values(row) for row in energy]) if on_cpu else values(energy)

    def values(energy: Tensor) -> Tensor:
        powers = raised(energy, spec.power)
        return _epilogue(powers if bank is None else powers @ bank, spec.epilogue, affine)

    if lengths is None and chunk == n_frames and n_samples <= n_frames * spec.n_fft:
        for row in range(0, n_rows, group):  # a row is one piece: padding all of it takes fewer calls
            emphasised = _emphasised(samples(rows[row : row + group], window.dtype, spec.scale), spec)
            out[row : row + group] = result(padded_rows(emphasised, spec))
        return
    for first in range(0, n_frames, chunk):
        last = min(first + chunk, n_frames)
        begin, count = first * spec.hop_length, (last - 1 - first) * spec.hop_length + spec.n_fft
        by_index = lengths is not None or spec.emphasises_waveform
        cut = None if by_index else _Cut(spec, first, last, rows)
        for row in range(0, n_rows, group):
            some = slice(row, row + group)
            if cut is None:
                own = None if lengths is None else lengths[some, None]
                padded = _gathered(rows[some], window.dtype, spec, begin, count, own)
            else:
                padded = cut(rows[some], window.dtype)
            out[some, first:last] = result(padded)


def _piece(n_frames: int, rows: Tensor, spec: StftSpec) -> tuple[int, int]:
    """Frames of a row to do at a time, and how many rows."""
    budget = max(1, (_PIECE_CPU if rows.device.type == "cpu" else _PIECE_DEVICE) // spec.n_fft)  # in frames
    chunk = min(n_frames, budget)
    return chunk, budget // chunk


class _Cut:
    """Cuts the samples of frames ``first`` … ``last`` of the padded signal out of rows: a view, with the ends gathered where it has
    them.
    """

    def __init__(self, spec: StftSpec, first: int, last: int, like: Tensor) -> None:
        n_samples = like.shape[-1]
        begin, end = first * spec.hop_length, (last - 1) * spec.hop_length + spec.n_fft
        # Between low and high, position p is sample p + shift; padding lies on both sides of it.
        shift = -spec.margin - spec.pad
        low = min(max(begin, spec.margin + max(spec.pad, 0)), end)
        high = max(min(end, n_samples - shift + min(spec.pad, 0)), low)
        self._middle, self._scale = slice(low + shift, high + shift), spec.scale
        self._ends = [self._gather(spec, *span, like) for span in ((begin, low), (high, end))]

    @staticmethod
    def _gather(spec: StftSpec, begin: int, end: int, like: Tensor) -> tuple[Tensor, Tensor] | None:
        if begin == end:
            return None
        index, valid = spec.source_index(begin, end - begin, like.shape[-1])
        return torch.from_numpy(index).to(like.device), torch.from_numpy(~valid).to(like.device)

    def __call__(self, rows: Tensor, compute: torch.dtype) -> Tensor:
        left, right = (rows[:, :0] if end is None else rows.index_select(1, end[0]).masked_fill_(end[1], 0) for end in self._ends)
        middle = rows[:, self._middle]
        if left.numel() or right.numel():
            middle = torch.cat((left, middle, right), 1)
        return samples(middle, compute, self._scale)
