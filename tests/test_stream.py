"""Chunks of any size give what the whole gives, or a reason why they cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import noise, speech

from flashmel import frontends
from flashmel.frontends import FrontEnd, frontend
from flashmel.normalize import Normalization
from flashmel.recipes import Recipe
from flashmel.stream import Stream, obstacle

# Those that are streamed only with an option; the others as they are.
OPTIONS = {"ast": {"n_frames": None}, "audio-mae": {"n_frames": None}}
REASONS = {
    "whisper": "the loudest value of the whole", "whisper-large-v3": "the loudest value", "granite-speech": "the loudest value",
    "qwen2-audio": "the loudest value", "qwen3-asr": "the loudest value", "librosa-db": "the loudest value",
    "nemo": "the variance of the whole", "nemo-128": "the variance", "parakeet": "the variance", "parakeet-128": "the variance",
    "seamless-m4t": "the variance", "w2v-bert": "the variance", "speech-to-text": "the variance",
    "wespeaker": "the mean of the whole", "campplus": "the mean",
    "ast": "n_frames=1024", "audio-mae": "n_frames=1024",
}  # fmt: skip
STREAMED = [name for name in frontends.names() if name not in REASONS or name in OPTIONS]


def streamed(module: FrontEnd, x: torch.Tensor, sizes: list[int], batch: int | None = None) -> torch.Tensor:
    stream = module.stream(batch)
    parts, begin = [], 0
    while begin < x.shape[-1]:
        size = sizes[len(parts) % len(sizes)]
        parts.append(stream(x[..., begin : begin + size]))
        begin += size
    parts.append(stream.finish())
    return torch.cat(parts, -2 if module.spec.epilogue.time_major else -1)


def check(module: FrontEnd, x: torch.Tensor, sizes: list[int], batch: int | None = None) -> None:
    expected = module(x)
    got = streamed(module, x, sizes, batch)
    assert got.shape == expected.shape and got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-3)
    assert (got - expected).abs().mean() <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("name", STREAMED)
def test_chunks_are_the_whole(name: str):
    module = frontend(name, **OPTIONS.get(name, {}))
    for n in (9000, 9001, 4 * module.spec.n_fft - 37):
        x = speech(n, sample_rate=module.sample_rate)
        check(module, x, [1111])
        check(module, x, [1, 3000, 0, 17, 160, 5])
    check(module, speech(3, 9000), [700], 3)
    check(module, (speech(9000) * 32767).short(), [1500])
    check(module, speech(2 * module.spec.n_fft), [10**6])


@pytest.mark.parametrize("name", ("voxtral-realtime", "icefall", "nemo-none", "gemma3n"))
def test_one_sample_at_a_time(name: str):
    check(frontend(name), speech(2600), [1])


@pytest.mark.parametrize("name", STREAMED)
def test_frames_come_as_soon_as_they_are_final(name: str):
    """What is behind a sample does not matter to frames that were returned, and those that could have been were."""
    module = frontend(name, **OPTIONS.get(name, {}))
    axis = -2 if module.spec.epilogue.time_major else -1
    n = 6 * module.spec.n_fft
    x = speech(n, sample_rate=module.sample_rate)
    early = module.stream()(x)
    longer = module(torch.cat((x, torch.ones(3 * module.spec.n_fft))))
    known = early.shape[axis]
    torch.testing.assert_close(early, longer.narrow(axis, 0, known), rtol=1e-4, atol=2e-3)
    more = module(torch.cat((x, -torch.ones(3 * module.spec.n_fft))))
    masked = module.spec.epilogue.masked_frames
    assert not torch.allclose(more.narrow(axis, known + masked, 1), longer.narrow(axis, known + masked, 1), rtol=0, atol=1e-6)


def test_memory_does_not_grow():
    stream = frontend("vocos").stream(2)
    held = []
    for _ in range(200):
        stream(torch.randn(2, 500))
        held.append(stream._tail.shape[1])
    assert max(held[100:]) <= 6 * 1024 and stream.samples == 100_000


@pytest.mark.parametrize(
    ("frame_multiple", "fields"),
    (
        (1, {"stack": 3}),
        (3, {"stack": 3}),
        (8, {}),
        (1, {"mean": (1.0,) * 80, "deviation": (2.0,) * 80}),
    ),
)
def test_recipes_of_ones_own(frame_multiple: int, fields: dict):
    recipe: Recipe = replace(frontends.recipe("icefall", frame_multiple=frame_multiple), **fields)
    for n in (9000, 9480, 9640):
        check(FrontEnd(recipe), speech(n), [333])
    epilogue = replace(recipe.spec.epilogue, masked_frames=2)
    check(FrontEnd(replace(recipe, spec=replace(recipe.spec, epilogue=epilogue))), speech(9000), [333])


@pytest.mark.parametrize("pad", (0, 100, -100))
@pytest.mark.parametrize("pad_mode", ("reflect", "constant", "replicate"))
def test_padding_of_ones_own(pad: int, pad_mode: str):
    recipe = frontends.recipe("speecht5")
    spec = replace(recipe.spec, pad=pad, pad_mode=pad_mode, win_length=800)
    for n in (9000, 2000):
        check(FrontEnd(replace(recipe, spec=spec)), speech(n), [333])


def test_a_stream_begins_anew():
    module = frontend("hifigan")
    stream = module.stream()
    for seed in range(2):
        x = speech(8000, seed=seed)
        got = torch.cat((stream(x[:5000]), stream(x[5000:]), stream.finish()), -1)
        torch.testing.assert_close(got, module(x), rtol=1e-4, atol=1e-3)
    stream(speech(3000))
    stream.reset()
    assert stream.samples == stream.frames == 0
    assert frontend("hifigan", dtype=torch.float16).stream()(speech(8000)).dtype == torch.float16
    assert frontend("hifigan").double().stream()(speech(8000)).dtype == torch.float64


def test_those_that_cannot():
    for name, reason in REASONS.items():
        with pytest.raises(ValueError, match=f"'{name}' cannot be streamed: .*{reason}"):
            frontend(name).stream()
    plain = frontends.recipe("hifigan")
    for fields, reason in (
        ({"spec": replace(plain.spec, pad_mode="circular")}, "audio's end"),
        ({"n_samples": 16000}, "n_samples=16000"),
        ({"min_samples": 8000}, "at least 8000 samples"),
    ):
        assert reason in (obstacle(replace(plain, **fields)) or "")
    assert "the mean of the whole" in (obstacle(replace(plain, normalization=Normalization("mean"))) or "")
    assert obstacle(plain) is None


def test_what_is_refused():
    stream = frontend("vocos").stream(2)
    with pytest.raises(TypeError, match="must be a torch.Tensor"):
        stream([0.0])
    with pytest.raises(ValueError, match=r"shape \(2, 'samples'\), got \(100,\)"):
        stream(torch.zeros(100))
    with pytest.raises(ValueError, match="real audio"):
        stream(torch.zeros(2, 100, dtype=torch.complex64))
    with pytest.raises(ValueError, match="input is empty"):
        stream.finish()
    stream(torch.zeros(2, 100))
    with pytest.raises(ValueError, match="too short"):
        stream.finish()
    assert isinstance(stream, Stream)


def test_a_clip_that_is_too_short_leaves_nothing_behind():
    module, y = frontend("vocos"), noise(5000)
    stream = module.stream()
    stream(torch.full((300,), 5.0))
    with pytest.raises(ValueError, match="too short"):
        stream.finish()
    torch.testing.assert_close(torch.cat((stream(y), stream.finish()), -1), module(y), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [-1, True, 2.0, (2, -1)])
def test_batches_that_are_none(batch):
    with pytest.raises(ValueError, match="batch must be a number of streams, a shape of them or None, got"):
        frontend("vocos").stream(batch)


def test_no_streams():
    assert frontend("vocos").stream(0)(torch.ones(0, 5000)).shape[:2] == (0, 100)
