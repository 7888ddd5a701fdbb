"""What the end of a run becomes in the table: every outcome, for one-shot tasks and schedules, with and without a
policy."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import workq
from workq._ending import Ending, Raised, Run, Settled, ending, finish_time, hand_back, parked
from workq._errors import PayloadError
from workq._outcome import LONGEST
from workq._task import Claimed, Lease

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
HOURLY = workq.every(hours=1)
TWICE = workq.linear(retries=2, delay=10)
BOOM = ValueError("boom")
LEFT = '{"left":"by the handler"}'


def claimed(attempt: int = 0, *, lost: int = 0, scheduled: bool = False) -> Claimed:
    return Claimed(
        lease=Lease(7, 3, 99),
        queue="",
        name="mail",
        key=None,
        scheduled=scheduled,
        priority=0,
        run_at=NOON - timedelta(minutes=5),
        attempt=attempt,
        lost=lost,
        payload='"as it was"',
        headers=None,
        claimed_at=NOON - timedelta(minutes=1),
    )


def ended(
    outcome: workq.Outcome,
    *,
    attempt: int = 0,
    policy: workq.RetryPolicy | None = None,
    when: workq.When | None = None,
    payload: str | PayloadError | None = LEFT,
) -> Ending:
    return ending(Run(outcome, payload, NOON), claimed(attempt, scheduled=when is not None), policy, when)


def written(made: Ending) -> Settled:
    assert made.settled is not None
    return made.settled


@dataclass(frozen=True)
class Row:
    """An outcome after `attempt` failed runs, and what it becomes."""

    says: str
    outcome: workq.Outcome
    attempt: int
    policy: workq.RetryPolicy | None
    scheduled: bool
    kind: str
    settled: Settled | None
    error: BaseException | str | None = None
    runs_again: bool = False


def again(seconds: float, attempt: int) -> Settled:
    return Settled(delay=timedelta(seconds=seconds), attempt=attempt)


def stopped(attempt: int) -> Settled:
    return Settled(failed=True, attempt=attempt)


ON = NOON + timedelta(hours=1)

ONE_SHOT = [
    Row("Done deletes the row", workq.Done(), 0, None, False, "completed", None),
    Row("Done after failed runs deletes the row too", workq.Done(), 4, TWICE, False, "completed", None),
    Row("an error without a policy fails the task", Raised(BOOM), 0, None, False, "failed", stopped(1), BOOM),
    Row("an error with a policy runs again", Raised(BOOM), 0, TWICE, False, "failed", again(10, 1), BOOM, True),
    Row("the second delay is the policy's second", Raised(BOOM), 1, TWICE, False, "failed", again(20, 2), BOOM, True),
    Row("after the last retry it is failed", Raised(BOOM), 2, TWICE, False, "failed", stopped(3), BOOM),
    Row("no retries means none", Raised(BOOM), 0, workq.linear(retries=0), False, "failed", stopped(1), BOOM),
    Row("Retry without a policy is linear()", workq.Retry(BOOM), 0, None, False, "failed", again(30, 1), BOOM, True),
    Row("and so is the third", workq.Retry(BOOM), 2, None, False, "failed", again(90, 3), BOOM, True),
    Row("and then it is failed", workq.Retry(BOOM), 3, None, False, "failed", stopped(4), BOOM),
    Row("Retry with a policy", workq.Retry("hm"), 1, TWICE, False, "failed", again(20, 2), "hm", True),
    Row("Retry past the policy", workq.Retry("hm"), 2, TWICE, False, "failed", stopped(3), "hm"),
    Row("after= says when", workq.Retry("hm", after=5), 1, TWICE, False, "failed", again(5, 2), "hm", True),
    Row("the policy says whether", workq.Retry("hm", after=5), 2, TWICE, False, "failed", stopped(3), "hm"),
    Row("after=0 is at once", workq.Retry("hm", after=0), 0, TWICE, False, "failed", again(0, 1), "hm", True),
    Row("Fail is never retried", workq.Fail(BOOM), 0, TWICE, False, "failed", stopped(1), BOOM),
    Row("Fail without a policy", workq.Fail("no"), 0, None, False, "failed", stopped(1), "no"),
    Row("Skip is Fail", workq.Skip("no"), 0, TWICE, False, "failed", stopped(1), "no"),
    Row(
        "Later spends no attempt and saves the payload",
        workq.Later(7),
        2,
        TWICE,
        False,
        "released",
        Settled(delay=timedelta(seconds=7), payload=LEFT, attempt=2, keep_error=True),
    ),
]

SCHEDULED = [
    Row("Done goes on, with the payload", workq.Done(), 0, None, True, "completed", Settled(run_at=ON, payload=LEFT)),
    Row("Done clears the attempts", workq.Done(), 2, TWICE, True, "completed", Settled(run_at=ON, payload=LEFT)),
    Row(
        "Skip goes on, with the payload", workq.Skip("no"), 1, None, True, "completed", Settled(run_at=ON, payload=LEFT)
    ),
    Row("an error without a policy stops it", Raised(BOOM), 0, None, True, "failed", stopped(1), BOOM),
    Row("an error with a policy runs again", Raised(BOOM), 0, TWICE, True, "failed", again(10, 1), BOOM, True),
    Row(
        "after the last retry it goes on, and the error stays",
        Raised(BOOM),
        2,
        TWICE,
        True,
        "failed",
        Settled(run_at=ON),
        BOOM,
    ),
    Row(
        "with no retries it goes on at once",
        Raised(BOOM),
        0,
        workq.linear(retries=0),
        True,
        "failed",
        Settled(run_at=ON),
        BOOM,
    ),
    Row("Retry without a policy is linear()", workq.Retry(BOOM), 0, None, True, "failed", again(30, 1), BOOM, True),
    Row("and after its last it goes on", workq.Retry(BOOM), 3, None, True, "failed", Settled(run_at=ON), BOOM),
    Row("after= says when", workq.Retry("hm", after=5), 0, TWICE, True, "failed", again(5, 1), "hm", True),
    Row("Fail stops it, whatever the policy", workq.Fail(BOOM), 0, TWICE, True, "failed", stopped(1), BOOM),
    Row(
        "Later spends no attempt and saves the payload",
        workq.Later(7),
        1,
        None,
        True,
        "released",
        Settled(delay=timedelta(seconds=7), payload=LEFT, attempt=1, keep_error=True),
    ),
]


@pytest.mark.parametrize("row", ONE_SHOT + SCHEDULED, ids=lambda row: f"{row.scheduled * 'scheduled: '}{row.says}")
def test_an_outcome_becomes(row: Row) -> None:
    made = ended(row.outcome, attempt=row.attempt, policy=row.policy, when=HOURLY if row.scheduled else None)
    assert made == Ending(cast(Any, row.kind), row.settled, row.error, row.runs_again)


@pytest.mark.parametrize("when", [None, HOURLY], ids=["task", "schedule"])
@pytest.mark.parametrize(
    "error",
    [BOOM, asyncio.CancelledError(), SystemExit(1), KeyboardInterrupt(), GeneratorExit(), TimeoutError("too slow")],
    ids=lambda error: type(error).__name__,
)
def test_whatever_is_raised_is_a_failed_run(error: BaseException, when: workq.When | None) -> None:
    """F35, isolation: a BaseException is an error like any other."""
    assert ended(Raised(error), when=when) == Ending("failed", stopped(1), error)
    assert ended(Raised(error), when=when, policy=TWICE) == Ending("failed", again(10, 1), error, runs_again=True)


@pytest.mark.parametrize(
    ("outcome", "says"), [(workq.Retry(), "retry"), (workq.Skip(), "skipped")], ids=["Retry", "Skip"]
)
def test_an_outcome_without_a_reason_still_stores_a_readable_error(outcome: workq.Outcome, says: str) -> None:
    assert ended(outcome).error == says


def test_an_outcome_of_an_unknown_kind_fails_the_task_and_says_so() -> None:
    class Mine(workq.Outcome): ...

    made = ended(Mine("huh"), policy=TWICE)
    assert made.kind == "failed"
    assert written(made) == stopped(1)
    assert "huh" in str(made.error)


def test_a_policy_is_given_the_failed_runs_including_this_one_and_the_error() -> None:
    given: list[tuple[int, BaseException]] = []

    def policy(failed: int, error: BaseException) -> float:
        given.append((failed, error))
        return 1

    ended(Raised(BOOM), attempt=4, policy=policy)
    ended(workq.Retry("only text"), attempt=0, policy=policy)
    assert given[0] == (5, BOOM)
    failed, error = given[1]
    assert failed == 1
    assert "only text" in str(error)


def test_a_policy_that_raises_fails_the_task_and_names_both_errors() -> None:
    def policy(failed: int, error: BaseException) -> float:
        raise LookupError("the policy's own")

    made = ended(Raised(BOOM), policy=policy)
    assert written(made) == stopped(1)
    assert isinstance(made.error, LookupError)
    assert any("boom" in note for note in made.error.__notes__)
    assert not made.runs_again


@pytest.mark.parametrize("nonsense", ["10", True, float("nan"), timedelta(seconds=1), [1]], ids=repr)
def test_a_policy_that_returns_nonsense_fails_the_task(nonsense: Any) -> None:
    made = ended(Raised(BOOM), policy=lambda failed, error: nonsense)
    assert written(made) == stopped(1)
    assert isinstance(made.error, TypeError)
    assert "policy" in str(made.error)


@given(wait=st.floats(allow_nan=False) | st.integers())
def test_whatever_number_a_policy_returns_the_delay_can_be_stored(wait: float) -> None:
    """F45: delays are clamped, to now and to 100 years."""
    settled = written(ended(Raised(BOOM), policy=lambda failed, error: wait))
    assert settled.delay is not None
    assert timedelta(0) <= settled.delay <= timedelta(seconds=LONGEST)
    if 0 <= wait <= LONGEST:
        assert settled.delay == timedelta(seconds=wait)


@pytest.mark.parametrize(
    "policy",
    [
        workq.linear(retries=2**40, delay=30),
        workq.linear(retries=2**40, delay=LONGEST),
        workq.exponential(retries=2**40),
        workq.exponential(retries=2**40, delay=LONGEST, cap=LONGEST, factor=1000, jitter=1),
    ],
)
@pytest.mark.parametrize("attempt", [9_999, 1_000_000])
def test_at_a_very_high_attempt_every_backoff_still_yields_a_time(policy: workq.RetryPolicy, attempt: int) -> None:
    """F45: attempt 10,000 with any backoff still yields a valid, bounded run time."""
    began = time.perf_counter()
    made = ended(Raised(BOOM), attempt=attempt, policy=policy)
    assert time.perf_counter() - began < 0.2, "it is computed in the event loop: it must not take long"
    settled = written(made)
    assert made.runs_again
    assert settled.delay is not None
    assert timedelta(0) < settled.delay <= timedelta(seconds=LONGEST)
    assert NOON + settled.delay < datetime.max.replace(tzinfo=UTC)


@pytest.mark.parametrize(
    "outcome", [Raised(BOOM), workq.Retry("hm"), workq.Fail("no")], ids=lambda outcome: type(outcome).__name__
)
@pytest.mark.parametrize("policy", [None, TWICE, workq.linear(retries=0)], ids=["none", "retries", "exhausted"])
def test_neither_retry_nor_failure_stores_the_payload_of_a_schedule(
    outcome: workq.Outcome, policy: workq.RetryPolicy | None
) -> None:
    assert written(ended(outcome, policy=policy, when=HOURLY)).payload is None


@pytest.mark.parametrize(
    "outcome", [workq.Done(), workq.Skip(), workq.Later(1)], ids=lambda outcome: type(outcome).__name__
)
def test_a_payload_that_cannot_be_stored_fails_the_task_and_leaves_the_old_one(outcome: workq.Outcome) -> None:
    mistake = PayloadError("a set cannot be stored")
    made = ended(outcome, when=HOURLY, policy=TWICE, payload=mistake)
    assert made == Ending("failed", stopped(1), mistake)


def test_a_payload_that_cannot_be_stored_does_not_hide_the_error_of_the_run() -> None:
    made = ended(Raised(BOOM), when=HOURLY, payload=PayloadError("a set cannot be stored"))
    assert made == Ending("failed", stopped(1), BOOM)


def test_a_schedule_goes_on_from_the_finish() -> None:
    """F47: one next run, from the finish time, however long ago it was due."""
    asked: list[datetime] = []

    def when(last: datetime) -> datetime:
        asked.append(last)
        return last + timedelta(minutes=1)

    assert written(ended(workq.Done(), when=when)).run_at == NOON + timedelta(minutes=1)
    assert asked == [NOON]


@pytest.mark.parametrize("back", [timedelta(0), timedelta(microseconds=-999), timedelta(days=1000)], ids=str)
def test_the_next_run_is_never_before_the_finish_and_a_millisecond(back: timedelta) -> None:
    settled = written(ended(workq.Done(), when=lambda last: last - back))
    assert settled.run_at == NOON + timedelta(milliseconds=1)


def naive(last: datetime) -> datetime:
    return last.replace(tzinfo=None)


def raising(last: datetime) -> datetime:
    raise LookupError("no calendar")


def far(last: datetime) -> datetime:
    return last + timedelta(days=365 * 200)


def returning(answer: Any) -> workq.When:
    return lambda last: answer


WRONG: dict[str, workq.When] = {
    "no calendar": raising,
    "naive": naive,
    "100 years": far,
    "None": returning(None),
    "tomorrow": returning("tomorrow"),
    "12.5": returning(12.5),
}


@pytest.mark.parametrize("says", WRONG)
def test_a_schedule_function_that_goes_wrong_after_a_run_fails_the_row_and_saves_the_payload(says: str) -> None:
    made = ended(workq.Done(), when=WRONG[says])
    assert made.kind == "failed"
    assert written(made).failed
    assert written(made).payload == LEFT
    assert says in str(made.error)


@pytest.mark.parametrize("attempt", [0, 3])
def test_a_hand_back_changes_neither_attempt_nor_error_nor_lost_nor_time_nor_payload(attempt: int) -> None:
    assert hand_back(claimed(attempt, lost=2)) == Ending(
        "released", Settled(attempt=attempt, keep_error=True, keep_lost=True, finished=False), handed_back=True
    )


@pytest.mark.parametrize(
    "outcome", [Raised(BOOM), workq.Fail("no"), workq.Retry("hm"), workq.Later(1)], ids=lambda o: type(o).__name__
)
@pytest.mark.parametrize("when", [None, HOURLY], ids=["task", "schedule"])
def test_an_accepted_end_clears_the_crash_budget(outcome: workq.Outcome, when: workq.When | None) -> None:
    """F06: only what vanishes counts, and only while nothing else happens to the task."""
    assert not written(ended(outcome, policy=TWICE, when=when)).keep_lost


def test_a_parked_task_says_how_often_its_holder_vanished_and_what_helps() -> None:
    """F06: past max_lost a task is failed with an error that says so."""
    made = parked(claimed(2, lost=6))
    assert made.kind == "failed"
    assert written(made).failed
    assert written(made).attempt == 2
    assert "6 times" in str(made.error)
    assert "retry" in str(made.error)


def test_the_finish_time_is_the_databases_time_at_the_claim_and_what_passed_since() -> None:
    """F46, F47: durations are monotonic, instants are the database's."""
    assert finish_time(NOON, 2.5) == NOON + timedelta(seconds=2.5)


@pytest.mark.parametrize("elapsed", [0.0, -5.0, -math.inf])
def test_the_finish_time_is_never_before_the_claim(elapsed: float) -> None:
    assert finish_time(NOON, elapsed) == NOON
