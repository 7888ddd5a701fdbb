"""The workers: from a claimed row to the ending that is to be written."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from workq._ahead import HOLD, LATE, Pace
from workq._clock import Clock
from workq._complete import complete
from workq._describe import describe
from workq._ending import SUCCESS, Ending, Raised, Run, Settled, ending, finish_time, hand_back, parked
from workq._errors import PayloadError
from workq._finish import Entry
from workq._held import Held, Holding
from workq._outcome import Done, Later, Outcome, Skip
from workq._report import Reporter
from workq._run import raised, run_once
from workq._settings import Settings
from workq._store import Store
from workq._task import Claimed, Task
from workq._threads import Threads
from workq.dialect import Transaction

logger = logging.getLogger("workq")


class Workers:
    """Runs each claimed task as an asyncio task of its own, in a fresh context; keeps those that wait for a place."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        clock: Clock,
        holding: Holding,
        reporter: Reporter,
        put: Callable[[Entry], None],
        redact: Callable[[str], str],
        checked: Callable[[str], str],
    ) -> None:
        self._settings = settings
        self._store = store
        self._clock = clock
        self._holding = holding
        self._reporter = reporter
        self._put = put
        self._redact = redact
        self._checked = checked
        self._threads = Threads()
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Held] = deque()
        self._patrol: asyncio.TimerHandle | None = None
        self._look_at = 0.0
        self._excused = False
        self.pace = Pace(settings.workers, enabled=settings.claim_ahead)
        self.jobs: set[asyncio.Task[None]] = set()
        self.ended = 0
        """How many runs have ended so far."""
        self.handed_back = False
        """Tasks were handed back that may be more urgent than what a claim would come to next."""
        self.freed = asyncio.Event()
        """Set when places are free or few tasks wait for one, or when there is room for outcomes again."""

    @property
    def free(self) -> int:
        """How many more may run."""
        return self._settings.workers - len(self.jobs)

    @property
    def waiting(self) -> int:
        """How many were claimed ahead and wait for a place."""
        return len(self._waiting)

    def take(self, page: Sequence[Claimed], sent: float, received: float, *, late: bool) -> None:
        """Start claimed tasks, in order, as places become free. Those that come too late are given back; one that
        kills its holders is parked."""
        waiting = self._waiting
        behind = bool(waiting)
        alive_until = sent + self._settings.lease
        for claimed in page:
            held = Held(claimed, claimed.lease, self._settings.handlers[claimed.name], received, alive_until)
            self._holding.add(held)
            if late:
                self._end(held, hand_back(claimed), None)
            elif claimed.lost > self._settings.max_lost:
                self._end(held, parked(claimed), None)
            else:
                waiting.append(held)
        if behind:
            # What came now may be more urgent than what waits.
            self._waiting = deque(sorted(waiting, key=urgency))
        self._fill()
        if self._waiting and self._patrol is None:
            self._look_after(HOLD)

    def hand_back(self, *, older_than: float = 0) -> int:
        """Give back what was claimed ahead and has waited so long."""
        latest = self._clock.monotonic() - older_than
        patient: deque[Held] = deque()
        returned = 0
        for held in self._waiting:
            if held.received > latest:
                patient.append(held)
            else:
                returned += 1
                self._end(held, hand_back(held.claimed), None)
        self._waiting = patient
        return returned

    def close(self) -> None:
        """Leave behind what still runs: it was asked to end, or sits in a thread."""
        if self._patrol is not None:
            self._patrol.cancel()
        for job in self.jobs:
            job.cancel()
        self._threads.close()

    def _look_after(self, seconds: float) -> None:
        self._look_at = self._clock.monotonic() + seconds
        self._patrol = self._loop.call_later(seconds, self._look_round)

    def _look_round(self) -> None:
        self._patrol = None
        # After a stop of the whole program the tasks did not wait for slow handlers, and get a moment to start.
        self._excused = not self._excused and self._clock.monotonic() - self._look_at > LATE
        if self._excused:
            self._look_after(LATE)
            return
        if self.hand_back(older_than=HOLD):
            self.handed_back = True
            self.pace.handed_back(self._clock.monotonic())
            self.freed.set()
        if self._waiting:
            oldest = min(held.received for held in self._waiting)
            self._look_after(max(oldest + HOLD - self._clock.monotonic(), 0.001))

    def _fill(self) -> None:
        waiting, most = self._waiting, self._settings.workers
        while waiting and len(self.jobs) < most:
            held = waiting.popleft()
            if held.lost:
                self._holding.remove(held)
            elif self._is_stale(held, self._clock.monotonic()):
                self._end(held, hand_back(held.claimed), None)
            else:
                self._start(held)
        if len(waiting) <= self.pace.target // 2:
            self.freed.set()

    def _is_stale(self, held: Held, now: float) -> bool:
        """Has the process stood still, so that the lease is about to end? Then it must not start."""
        return held.alive_until - now < self._settings.lease / 3

    def _start(self, held: Held) -> None:
        # A context of its own for each run: nothing that a handler sets is seen by a later one.
        job = self._loop.create_task(
            self._run(held),
            name=f"workq task {held.lease.id} {held.claimed.name}",
            context=self._settings.context.copy(),
        )
        held.job = job
        self.jobs.add(job)

    async def _run(self, held: Held) -> None:
        held.begun = True
        clock = self._clock
        outcome: Outcome | None
        try:
            began = clock.monotonic()
            # Before the first step it may have been cancelled, or the process may have stood still.
            if held.cancelled is not None or self._is_stale(held, began):
                self._end(held, hand_back(held.claimed), None)
                return
            self._reporter.started(held)
            try:
                outcome, payload = await run_once(held, self._settings.middleware, self._threads, self._complete)
            except BaseException as error:
                # A GeneratorExit out of an awaited task is thrown in here, past every `except` further in.
                outcome, payload = raised(error), None
            # From here to the end nothing awaits: a cancellation can no longer part a run from its outcome.
            ended_at = clock.monotonic()
            self._end(held, self._ending(held, outcome, payload, ended_at), ended_at - began)
        except Exception as error:
            logger.error("a run ended by an error of workq's own", exc_info=error)
            if not held.ended:
                settled = Settled(failed=True, attempt=held.claimed.attempt + 1)
                self._end(held, Ending("failed", settled, error), None)
        finally:
            # Here, not in a callback when the job is done: that would be another turn of the loop for every task.
            assert held.job is not None
            self.jobs.discard(held.job)
            self.ended += 1
            self._fill()

    def _ending(
        self, held: Held, outcome: Outcome | None, payload: str | PayloadError | None, ended_at: float
    ) -> Ending:
        claimed = held.claimed
        if type(outcome) is Done and not (claimed.scheduled or held.wants_completion):
            return SUCCESS  # what nearly every run ends with
        if isinstance(payload, str):
            try:
                self._checked(payload)
            except PayloadError as too_large:
                payload = too_large
        if held.wants_completion and isinstance(outcome, Done | Skip | Later):
            held.committed = held.completing
            # Written only if the row is still ours when the transaction is over: then it was rolled back.
            not_done = RuntimeError("complete(tx) was called, but tx was not committed")
            outcome, payload = Raised(held.refused or not_done), None
        if outcome is None:
            return hand_back(claimed)
        run = Run(outcome, payload, finish_time(claimed.claimed_at, ended_at - held.received))
        return ending(run, claimed, held.handler.retry, self._settings.when(claimed))

    async def _complete(self, held: Held, task: Task[Any], tx: Transaction) -> None:
        await complete(held, task, tx, self._store, self._clock, self._settings.when(held.claimed), self._checked)

    def _end(self, held: Held, ended: Ending, duration: float | None) -> None:
        held.ended = True
        if held.lost:
            self._holding.remove(held)
            return
        if ended.error is not None and ended.settled is not None:
            text = self._redact(describe(ended.error))
            ended = replace(ended, settled=ended.settled._replace(error=text))
        self._put(Entry(held, ended, duration))


def urgency(held: Held) -> tuple[int, datetime, int]:
    """The order in which tasks start."""
    claimed = held.claimed
    return claimed.priority, claimed.run_at, claimed.lease.id
