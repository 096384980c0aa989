"""The error metrics themselves: a metric that passes wrong values would hide every other fault."""

import math

import pytest
import torch

from flashmel.testing import assert_close, cpu_time, host_time, peak_error, poisoned_call, tolerance_fraction

NAN, INF = math.nan, math.inf


def test_assert_close_names_the_worst_coordinate():
    expected = torch.ones(2, 3, 4)
    actual = expected.clone()
    actual[1, 2, 3] = 1.5
    actual[0, 1, 2] = 1.001
    with pytest.raises(AssertionError) as failure:
        assert_close(actual, expected)
    message = str(failure.value)
    assert "2 of 24 values" in message
    assert "worst at (1, 2, 3): actual 1.5, expected 1," in message
    assert "2.5e+03 times the tolerance" in message


def test_assert_close_compares_across_dtypes_and_accepts_empty_and_scalar():
    assert_close(torch.ones(3, dtype=torch.float16), torch.ones(3, dtype=torch.float64))
    assert_close(torch.empty(0, 5), torch.empty(0, 5))
    assert_close(torch.tensor(1.0), torch.tensor(1.00005))
    with pytest.raises(AssertionError, match=r"worst at \(\)"):
        assert_close(torch.tensor(1.0), torch.tensor(2.0))


def test_assert_close_reports_shapes_instead_of_broadcasting():
    with pytest.raises(AssertionError, match=r"actual \(1, 3\), expected \(3,\)"):
        assert_close(torch.ones(1, 3), torch.ones(3))


@pytest.mark.parametrize(
    ("actual", "expected", "passes"),
    [
        (NAN, NAN, True),
        (INF, INF, True),
        (-INF, -INF, True),
        (NAN, 1.0, False),
        (1.0, NAN, False),
        (INF, -INF, False),
        (INF, NAN, False),
        (1.0, INF, False),
        (INF, 1.0, False),
    ],
)
@pytest.mark.parametrize("tolerance", [0.0, 1e-4])
def test_nonfinite_values_must_match(actual, expected, passes, tolerance):
    a, e = torch.tensor([[0.0], [actual]]), torch.tensor([[0.0], [expected]])
    assert (peak_error(a, e) == 0) is passes
    assert (peak_error(a, e) == INF) is not passes
    assert (tolerance_fraction(a, e, tolerance, tolerance) <= 1) is passes
    if passes:
        assert_close(a, e, tolerance, tolerance)
    else:
        with pytest.raises(AssertionError, match="1 of 2 values"):
            assert_close(a, e, tolerance, tolerance)


def test_tolerance_fraction_is_one_at_the_limit():
    actual, expected = torch.tensor([3.0], dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
    assert tolerance_fraction(actual, expected, atol=1.0, rtol=0.0) == 1.0
    assert tolerance_fraction(actual, expected, atol=0.0, rtol=0.25) == 2.0
    assert tolerance_fraction(expected, expected, atol=0.0, rtol=0.0) == 0.0


def test_peak_error_judges_a_frame_by_its_own_peak():
    expected = torch.tensor([[1000.0, 1.0], [10.0, 0.5]])  # (n_mels, frames): frame 1 is 60 dB below frame 0
    actual = expected.clone()
    actual[1, 1] += 0.125
    assert peak_error(actual, expected) == 0.125
    actual = expected.clone()
    actual[1, 0] += 0.125
    assert peak_error(actual, expected) == pytest.approx(0.125e-3)


def test_peak_error_wants_exact_silence():
    expected = torch.zeros(2, 3, 4)
    assert peak_error(expected, expected) == 0.0
    actual = expected.clone()
    actual[1, 2, 3] = 1e-30
    assert peak_error(actual, expected) == INF


def test_peak_error_next_to_nonfinite_bins_still_counts():
    expected = torch.tensor([[INF], [NAN], [2.0]])
    assert peak_error(torch.tensor([[INF], [NAN], [3.0]]), expected) == 0.5
    assert peak_error(torch.empty(0, 3, 4), torch.empty(0, 3, 4)) == 0.0


def test_poisoned_call_returns_the_output_unchanged():
    source = torch.arange(6.0).reshape(2, 3)
    out, _ = poisoned_call(lambda: source + 1)
    assert torch.equal(out, source + 1)


def test_cpu_timers_take_turns_and_count_every_call():
    calls = []
    slow, fast = cpu_time([lambda: calls.append("a") or sum(range(200_000)), lambda: calls.append("b")], repeats=4)
    assert slow > fast > 0
    assert "".join(calls) == "ab" + "abba" * 2
    count = len(calls)
    assert host_time(lambda: calls.append("h"), "cpu", calls=5, repeats=2) > 0
    assert len(calls) == count + 3 + 10


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu_helpers():
    from flashmel.testing import extra_memory, gpu_time

    x = torch.rand(1 << 20, device="cuda")
    out, reached = poisoned_call(lambda: x + 1)
    assert reached and torch.equal(out, x + 1)
    assert extra_memory(lambda: x + 1) == 0
    assert extra_memory(lambda: (x + 1) * 2) == x.numel() * 4
    big = torch.rand(1 << 26, device="cuda")
    assert 0 < gpu_time(lambda: x + 1) < gpu_time([lambda: big + 1, lambda: big * 2], calls=3)
