"""The workers: from a claimed row to the ending that is to be written."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from workq._clock import Clock
from workq._complete import complete
from workq._describe import describe
from workq._ending import Ending, Raised, Run, Settled, ending, finish_time, hand_back, parked
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
    """Runs each claimed task as an asyncio task of its own, in a fresh context."""

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
        self.jobs: set[asyncio.Task[None]] = set()
        self.freed = asyncio.Event()
        """Set when a place became free, or there is room for outcomes again."""

    @property
    def free(self) -> int:
        """How many more may run."""
        return self._settings.workers - len(self.jobs)

    def take(self, claimed: Claimed, received: float, *, late: bool) -> None:
        """Start a claimed task; give it back if it comes too late; park it if it kills its holders."""
        handler = self._settings.handlers[claimed.name]
        held = Held(claimed, claimed.lease, handler, received, alive_until=received + self._settings.lease)
        self._holding.add(held)
        if late:
            self._end(held, hand_back(claimed), None)
        elif claimed.lost > self._settings.max_lost:
            self._end(held, parked(claimed), None)
        else:
            self._start(held)

    def close(self) -> None:
        """Leave behind what still runs: it was asked to end, or sits in a thread."""
        for job in self.jobs:
            job.cancel()
        self._threads.close()

    def _start(self, held: Held) -> None:
        # A context of its own for each run: nothing that a handler sets is seen by a later one.
        job = asyncio.get_running_loop().create_task(
            self._run(held),
            name=f"workq task {held.lease.id} {held.claimed.name}",
            context=self._settings.context.copy(),
        )
        held.job = job
        self.jobs.add(job)
        job.add_done_callback(partial(self._left, held))

    def _left(self, held: Held, job: asyncio.Task[None]) -> None:
        self.jobs.discard(job)
        self.freed.set()
        if job.cancelled():
            if not held.ended:
                self._end(held, hand_back(held.claimed), None)  # before its first step
            return
        error = job.exception()
        if error is not None:
            logger.error("a run ended by an error of workq's own", exc_info=error)
            if not held.ended:
                settled = Settled(failed=True, attempt=held.claimed.attempt + 1)
                self._end(held, Ending("failed", settled, error), None)

    async def _run(self, held: Held) -> None:
        clock, claimed, settings = self._clock, held.claimed, self._settings
        began = clock.monotonic()
        self._reporter.started(held)
        outcome: Outcome | None
        try:
            outcome, payload = await run_once(held, settings.middleware, self._threads, partial(self._complete, held))
        except BaseException as error:
            # A GeneratorExit out of an awaited task is thrown in here, past every `except` further in.
            outcome, payload = raised(error), None
        if isinstance(payload, str):
            try:
                self._checked(payload)
            except PayloadError as too_large:
                payload = too_large
        # From here to the end nothing awaits: a cancellation can no longer part a run from its outcome.
        ended_at = clock.monotonic()
        if held.wants_completion and isinstance(outcome, Done | Skip | Later):
            # Written only if the row is still ours when the transaction is over: then it was rolled back.
            outcome, payload = Raised(RuntimeError("complete(tx) was called, but tx was not committed")), None
        if outcome is None:
            ended = hand_back(claimed)
        else:
            run = Run(outcome, payload, finish_time(claimed.claimed_at, ended_at - held.received))
            ended = ending(run, claimed, held.handler.retry, settings.when(claimed))
        self._end(held, ended, ended_at - began)

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
