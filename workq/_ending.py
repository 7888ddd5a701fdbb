"""What an outcome becomes in the table: pure decisions, from the end of a run to the row that is written."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple, TypeAlias

from workq._describe import describe
from workq._errors import PayloadError
from workq._outcome import LONGEST, Done, Fail, Later, Outcome, Retry, Skip
from workq._retry import RetryPolicy, linear
from workq._schedule import When, next_run
from workq._task import Claimed

Kind: TypeAlias = Literal["completed", "failed", "released"]


class Settled(NamedTuple):
    """The columns of a finishing UPDATE beside the lease, in the statement's order."""

    run_at: datetime | None = None
    """None, and no delay: as it was."""
    delay: timedelta | None = None
    payload: str | None = None
    """None: as it was."""
    failed: bool = False
    attempt: int = 0
    error: str | None = None
    keep_error: bool = False
    keep_lost: bool = False
    finished: bool = True


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of one run, ready to be written: `settled` is None for a success that deletes the row."""

    kind: Kind
    settled: Settled | None
    error: BaseException | str | None = None
    runs_again: bool = False
    """A failed run that its policy repeats."""
    handed_back: bool = False
    """As it was, for anybody to run at once."""


SUCCESS = Ending("completed", None)
"""Of a one-shot task: its row is deleted."""


class Run(NamedTuple):
    """How a handler ended, as the runner saw it."""

    outcome: Outcome
    payload: str | PayloadError | None
    """The payload as the handler left it; None: as it was."""
    finished_at: datetime
    """By the database's clock: its time at the claim, and the seconds since."""


def hand_back(claimed: Claimed) -> Ending:
    """Give a claimed task back as it was: nothing of it counts as a run."""
    return Ending(
        "released",
        Settled(attempt=claimed.attempt, keep_error=True, keep_lost=True, finished=False),
        handed_back=True,
    )


def parked(claimed: Claimed) -> Ending:
    """Fail a task that kills its holders: taking it over once more would go past `max_lost`."""
    error = (
        f"parked: the process that ran this task vanished {claimed.lost} times without finishing it. "
        "retry() starts it again with a clean count"
    )
    settled = Settled(failed=True, attempt=claimed.attempt, error=error, keep_lost=True, finished=False)
    return Ending("failed", settled, error)


def ending(run: Run, claimed: Claimed, policy: RetryPolicy | None, when: When | None) -> Ending:
    """What the end of a run becomes. `when` is the schedule's function, None for a one-shot task."""
    outcome = run.outcome
    if isinstance(run.payload, PayloadError) and isinstance(outcome, Done | Skip | Later):
        # The handler left a payload that cannot be stored: the old one stays.
        return _failed(claimed.attempt + 1, run.payload)
    payload = None if isinstance(run.payload, PayloadError) else run.payload
    match outcome:
        case Later():
            delay = timedelta(seconds=outcome.delay)
            return Ending("released", Settled(delay=delay, payload=payload, attempt=claimed.attempt, keep_error=True))
        case Done() if when is None:
            return SUCCESS
        case Skip() if when is None:
            return _failed(claimed.attempt + 1, _reason(outcome, "skipped"))
        case Done() | Skip() if when is not None:
            return _scheduled(run, when, payload, error=None)
        case Fail():
            return _failed(claimed.attempt + 1, _reason(outcome, "failed"))
        case Retry():
            return _retried(run, claimed, policy or linear(), when, _reason(outcome, "retry"), outcome.after)
        case Raised():
            if policy is None:
                return _failed(claimed.attempt + 1, outcome.error)
            return _retried(run, claimed, policy, when, outcome.error, None)
        case _:
            return _failed(claimed.attempt + 1, f"the handler ended with {outcome!r:.200}, which is no result")


class Raised(Outcome):
    """The handler raised an ordinary error, or was too slow."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def _retried(
    run: Run,
    claimed: Claimed,
    policy: RetryPolicy,
    when: When | None,
    error: BaseException | str,
    after: float | None,
) -> Ending:
    failed = claimed.attempt + 1
    try:
        wait: Any = policy(failed, error if isinstance(error, BaseException) else Retry(error))
        delay = None if wait is None else _delay(wait)
    except BaseException as mistake:
        mistake.add_note(f"the retry policy failed on: {describe(error)[:500]}")
        return _failed(failed, mistake)
    if delay is None:
        if when is None:
            return _failed(failed, error)
        return _scheduled(run, when, None, error=error)
    pause = timedelta(seconds=delay if after is None else after)
    return Ending("failed", Settled(delay=pause, attempt=failed), error, runs_again=True)


def _delay(wait: Any) -> float:
    if isinstance(wait, bool) or not isinstance(wait, int | float) or wait != wait:
        raise TypeError(f"the retry policy returned {wait!r:.80}; it must return seconds, or None to give up")
    return min(max(wait, 0.0), LONGEST)


def _scheduled(run: Run, when: When, payload: str | None, error: BaseException | str | None) -> Ending:
    """On to the next time: after success and Skip, and (with an error that stays readable) after the last retry."""
    try:
        following = next_run(when, run.finished_at)
    except BaseException as mistake:
        return Ending("failed", Settled(payload=payload, failed=True), mistake)
    kind: Kind = "completed" if error is None else "failed"
    return Ending(kind, Settled(run_at=following, payload=payload), error)


def _failed(failed_runs: int, error: BaseException | str) -> Ending:
    return Ending("failed", Settled(failed=True, attempt=failed_runs), error)


def _reason(outcome: Retry | Fail | Skip, otherwise: str) -> BaseException | str:
    error = outcome.error
    if error is None:
        return otherwise
    return error if isinstance(error, BaseException | str) else repr(error)  # pyright: ignore[reportUnnecessaryIsInstance]


def finish_time(claimed_at: datetime, elapsed: float) -> datetime:
    """The database's time when a run ended: a clock that jumped meanwhile changes nothing."""
    return (claimed_at + timedelta(seconds=max(elapsed, 0.0))).astimezone(UTC)
