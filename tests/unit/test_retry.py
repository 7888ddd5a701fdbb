"""Retry policies: when a failed run is repeated, and when no more."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import workq
from workq._ending import Run, ending
from workq._outcome import LONGEST
from workq._task import Claimed, Lease

ERROR = ValueError("x")
NOW = datetime(2026, 1, 1, tzinfo=UTC)

seconds = st.floats(min_value=0, max_value=LONGEST)
runs = st.integers(min_value=1, max_value=10_000)


def waits(policy: workq.RetryPolicy, most: int = 10) -> list[float | None]:
    """What a policy says of the first, second, ... failed run."""
    return [policy(failed, ERROR) for failed in range(1, most + 1)]


# linear


def test_linear_waits_the_number_of_the_failed_run_times_the_delay() -> None:
    """Q's try x delay."""
    assert waits(workq.linear(retries=4, delay=2.5), 6) == [2.5, 5, 7.5, 10, None, None]


def test_linear_is_three_retries_of_thirty_seconds_unless_told_otherwise() -> None:
    assert waits(workq.linear(), 4) == [30, 60, 90, None]


@pytest.mark.parametrize("make", [workq.linear, workq.exponential])
def test_no_retries_is_no_further_run(make: Any) -> None:
    assert waits(make(retries=0), 3) == [None, None, None]


@pytest.mark.parametrize(("make", "default"), [(workq.linear, 3), (workq.exponential, 5)])
def test_a_negative_number_of_retries_is_the_default(make: Any, default: int) -> None:
    for retries in (-1, -100):
        told = waits(make(retries=retries), default + 2)
        assert [wait is None for wait in told] == [False] * default + [True, True]


@settings(deadline=None)
@given(retries=st.integers(min_value=0, max_value=20_000), delay=seconds, failed=runs)
@example(retries=20_000, delay=LONGEST, failed=10_000)
def test_linear_stays_a_number_of_seconds_that_can_be_stored(retries: int, delay: float, failed: int) -> None:
    """F45: at attempt 10,000 too."""
    wait = workq.linear(retries=retries, delay=delay)(failed, ERROR)
    if failed > retries:
        assert wait is None
    else:
        assert wait is not None
        assert math.isclose(wait, min(failed * delay, LONGEST))


# exponential


def test_exponential_grows_by_its_factor_up_to_its_cap() -> None:
    policy = workq.exponential(retries=6, delay=1, factor=3, cap=50, jitter=0)
    assert waits(policy, 7) == [1, 3, 9, 27, 50, 50, None]


@settings(deadline=None)
@given(
    delay=seconds,
    factor=st.one_of(st.integers(min_value=1, max_value=1000), st.floats(min_value=1, max_value=1000)),
    cap=seconds,
    failed=runs,
)
@example(delay=0.0, factor=2.0, cap=3600.0, failed=10_000)
@example(delay=1e-300, factor=1000, cap=LONGEST, failed=10_000)
@example(delay=1.0, factor=1.0, cap=3600.0, failed=10_000)
def test_exponential_is_exact_up_to_attempt_ten_thousand(delay: float, factor: float, cap: float, failed: int) -> None:
    """F45: no overflow, and the cap where it would be passed."""
    wait = workq.exponential(retries=20_000, delay=delay, factor=factor, cap=cap, jitter=0)(failed, ERROR)
    assert wait is not None
    # The power is compared as a logarithm: exact fractions of it would have millions of digits.
    if delay == 0:
        grown = 0.0
    else:
        logarithm = math.log(delay) + (failed - 1) * math.log(factor)
        grown = math.exp(logarithm) if logarithm < 700 else math.inf
    assert math.isclose(wait, min(grown, cap), rel_tol=1e-6, abs_tol=1e-300)


@settings(deadline=None)
@given(jitter=st.floats(min_value=0, max_value=1), failed=st.integers(min_value=1, max_value=40))
def test_jitter_makes_a_wait_longer_by_at_most_its_part(jitter: float, failed: int) -> None:
    """F27: tasks that failed together do not come back together."""
    plain = workq.exponential(retries=50, jitter=0)(failed, ERROR)
    wait = workq.exponential(retries=50, jitter=jitter)(failed, ERROR)
    assert plain is not None
    assert wait is not None
    assert Fraction(plain) <= Fraction(wait)
    assert wait <= plain * (1 + jitter) * (1 + 1e-9)


def test_jitter_spreads_waits() -> None:
    """F27: with the default."""
    policy = workq.exponential()
    assert len({policy(3, ERROR) for _ in range(20)}) > 1


# What cannot work


@pytest.mark.parametrize("delay", [-1, -0.001, math.nan, math.inf, -math.inf, LONGEST * 2])
@pytest.mark.parametrize("make", [workq.linear, workq.exponential])
def test_a_delay_that_is_no_time_is_refused(make: Any, delay: float) -> None:
    with pytest.raises(ValueError, match="delay"):
        make(delay=delay)


@pytest.mark.parametrize("delay", [True, "5", None, timedelta(seconds=5)])
@pytest.mark.parametrize("make", [workq.linear, workq.exponential])
def test_a_delay_that_is_no_number_is_refused(make: Any, delay: Any) -> None:
    with pytest.raises(TypeError, match="delay"):
        make(delay=delay)


@pytest.mark.parametrize("retries", [True, 1.0, "3", None])
@pytest.mark.parametrize("make", [workq.linear, workq.exponential])
def test_retries_that_are_no_number_are_refused(make: Any, retries: Any) -> None:
    with pytest.raises(TypeError, match="retries"):
        make(retries=retries)


@pytest.mark.parametrize(
    "nonsense",
    [{"factor": 0.5}, {"factor": 0}, {"factor": math.nan}, {"factor": 1e9}, {"jitter": -0.1}, {"jitter": 1.1},
     {"jitter": math.nan}, {"cap": -1}, {"cap": math.nan}, {"cap": math.inf}],
    ids=str,
)  # fmt: skip
def test_an_exponential_that_cannot_work_is_refused(nonsense: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(nonsense))):
        workq.exponential(**nonsense)  # type: ignore[arg-type]


# What becomes of it


def constant(wait: float) -> workq.RetryPolicy:
    return lambda failed, error: wait


def doubling(failed: int, error: BaseException) -> float:
    return 2**failed


def delay_after(policy: workq.RetryPolicy, attempt: int) -> timedelta | None:
    """The delay that is written for a task after so many failed runs and one more."""
    claimed = Claimed(Lease(1, 1, 1), "", "note", None, False, 0, NOW, attempt - 1, 0, "null", None, NOW)
    ended = ending(Run(workq.Retry(ERROR), None, NOW), claimed, policy, None)
    assert ended.settled is not None
    return ended.settled.delay


@pytest.mark.parametrize("attempt", [1, 1024, 1025, 10_000])
@pytest.mark.parametrize(
    "policy",
    [
        workq.linear(retries=20_000, delay=LONGEST),
        workq.exponential(retries=20_000, delay=LONGEST, factor=1000, cap=LONGEST, jitter=1),
        constant(math.inf),
        constant(1e300),
        doubling,
    ],
    ids=["linear", "exponential", "infinite", "huge", "doubling"],
)
def test_any_backoff_at_any_attempt_is_a_valid_run_time(policy: workq.RetryPolicy, attempt: int) -> None:
    """F45: clamped, so that neither duration nor date overflows."""
    delay = delay_after(policy, attempt)
    assert delay is not None
    assert timedelta(0) <= delay <= timedelta(seconds=LONGEST)
    assert (NOW + delay).year < 9999


def test_a_negative_backoff_is_at_once() -> None:
    """F45: clamped at the other end too."""
    assert delay_after(constant(-5), 1) == timedelta(0)
