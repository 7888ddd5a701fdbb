"""One life of an executor: its three loops (claim, finish, beat), and how they come to an end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from functools import partial
from typing import Any

from workq._ahead import MOST, ask
from workq._caution import Caution
from workq._claim import Claimer
from workq._finish import Finisher
from workq._heartbeat import Heartbeat
from workq._held import Holding
from workq._hub import Hub
from workq._report import Reporter
from workq._settings import Settings
from workq._steady import Steady
from workq._workers import Workers
from workq.dialect import Connection

GRACE = 0.4
"""Seconds a handler has to end after stop() cancelled it."""
LAST_WRITES = 0.2
"""Seconds for writing how those ended. Together with giving back connections, under the second that stop() has."""

MAY_FAIL = 10.0
"""Seconds that claims and finishes may fail before the executor counts as unwell."""


class Life:
    """Built from the stages, each loop on a connection of its own; a number of free places is all that flows back."""

    def __init__(
        self,
        settings: Settings,
        hub: Hub,
        holding: Holding,
        *,
        claim: Connection,
        finish: Connection,
        beat: Connection,
        caution: Caution,
    ) -> None:
        clock, store, lease = hub.clock, hub.store, settings.lease
        name = f"executor of queue {settings.queue!r}"
        self._settings = settings
        self._hub = hub
        self._clock = clock
        self._holding = holding
        self.rung = asyncio.Event()
        self._stopping = asyncio.Event()
        self._expired = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None
        self.claiming = Steady(f"{name}: claiming", clock)
        self.finishing = Steady(f"{name}: finishing", clock)
        # A beat that failed is tried again within its window.
        self.beating = Steady(f"{name}: heartbeat", clock, longest=min(lease / 6, 2))
        self._reporter = Reporter(hub, holding)
        self._heartbeat = Heartbeat(store, beat, clock, holding, caution, lease, self._reporter.lost)
        self._finisher = Finisher(
            store,
            finish,
            clock,
            max(4 * settings.workers, 2 * MOST),
            self._reporter.written,
            lambda entry: self._reporter.lost(entry.held),
            hub.redacted,
        )
        self.workers = Workers(
            settings, store, clock, holding, self._reporter, self._finisher.put, hub.redacted, hub.checked
        )
        self._claimer = Claimer(settings, store, claim, clock, holding, caution, self._heartbeat.once)

    async def live(self) -> None:
        """Run until stopped, then end within the second after the deadline."""
        async with asyncio.TaskGroup() as loops:
            claims = loops.create_task(self._claims(), name="workq claims")
            others = [
                loops.create_task(self._finishes(), name="workq finishes"),
                loops.create_task(self._beats(), name="workq beats"),
            ]
            try:
                await self._stopping.wait()
                self.workers.hand_back()
                await self._drain(claims)
            finally:
                for loop in (claims, *others):
                    loop.cancel()
                self.workers.close()

    def stop(self, patience: float) -> None:
        """Begin to end: what runs has `patience` seconds. A later call may shorten that, not lengthen it."""
        loop = asyncio.get_running_loop()
        at = loop.time() + patience
        if self._deadline is None or at < self._deadline.when():
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline = loop.call_at(at, self._expired.set)
        self._stopping.set()
        self._claimer.close()
        self.rung.set()
        self.workers.freed.set()

    async def _drain(self, claims: asyncio.Task[None]) -> None:
        expired = asyncio.create_task(self._expired.wait())
        emptied = asyncio.create_task(self._emptied(claims))
        try:
            await asyncio.wait([expired, emptied], return_when=asyncio.FIRST_COMPLETED)
            if not emptied.done():
                await self._hurry(emptied)
        finally:
            expired.cancel()
            emptied.cancel()
            if self._deadline is not None:
                self._deadline.cancel()

    async def _emptied(self, claims: asyncio.Task[None]) -> None:
        """Nothing is being claimed, nothing held, and what hooks enqueued is stored."""
        await asyncio.wait([claims])
        await self._holding.empty.wait()
        await self._hub.flush()

    async def _hurry(self, emptied: asyncio.Task[None]) -> None:
        """The deadline has passed: cancel what runs, and give it and the last writes a moment."""
        for held in self._holding:
            held.cancel("stop")
        running = [held.job for held in self._holding if held.job is not None and held.handler.is_async]
        until = self._clock.monotonic() + (GRACE if running else 0) + LAST_WRITES
        if running:
            await asyncio.wait(running, timeout=GRACE)
        for held in self._holding:
            if held.running:
                self._reporter.abandoned(held)
                self._holding.remove(held)
        await asyncio.wait([emptied], timeout=until - self._clock.monotonic())

    async def _claims(self) -> None:
        settings, workers, clock, claimer = self._settings, self.workers, self._clock, self._claimer
        look = False  # at everything: nothing more was to be had ahead
        while not self._stopping.is_set():
            sent = clock.monotonic()
            workers.pace.measure(sent, workers.ended)
            # A recovered task may kill this process as it did others, and must not take along what waits.
            look = look or claimer.due(sent) or self._holding.recovered > 0
            wanted = ask(workers.free, workers.waiting, workers.pace.target, look=look)
            if wanted is None and not self._finisher.full:
                self.claiming.rests()
            if wanted is None or self._finisher.full:
                workers.freed.clear()
                await workers.freed.wait()
                continue
            if workers.handed_back:
                workers.handed_back = False
                claimer.begin_again()
            self.rung.clear()  # before the claim is sent: a ring from now on is for the next one
            limit, ahead = wanted
            page, pause = await self.claiming.attempt(partial(claimer.once, limit, ahead=ahead))
            if page is None:
                await self._within(pause, self._stopping.wait())
                continue
            received = clock.monotonic()
            # Stopped meanwhile; or the reply took so long (the process was frozen, say) that the lease may be over.
            late = self._stopping.is_set() or received - page.sent > settings.lease * 2 / 3
            short = len(page.tasks) < limit
            sizes = [len(claimed.payload) for claimed in page.tasks]
            workers.pace.page(received, sizes, full=not short, ended=workers.ended)
            workers.take(page.tasks, page.sent, received, late=late)
            # Nothing more to be had ahead; or where one recovered task was, there are more.
            look = short if ahead else any(claimed.lost for claimed in page.tasks)
            if short and not ahead:
                workers.pace.idle()
                # Nodes that were started together drift apart.
                await self._within(settings.poll_interval * random.uniform(0.9, 1), self.rung.wait())

    async def _finishes(self) -> None:
        while True:
            await self._finisher.wait()
            _, pause = await self.finishing.attempt(self._finisher.once)
            self.workers.freed.set()
            if pause:
                await self._clock.sleep(pause)

    async def _beats(self) -> None:
        while True:
            await self._clock.sleep(self._settings.lease / 3 * random.uniform(0.9, 1))
            while True:
                _, pause = await self.beating.attempt(self._heartbeat.once)
                if not pause:
                    break
                await self._clock.sleep(pause)

    async def _within(self, seconds: float, event: Coroutine[Any, Any, object]) -> None:
        try:
            async with asyncio.timeout(seconds):
                await event
        except TimeoutError:
            pass

    @property
    def stopping(self) -> bool:
        """Has `stop` been called?"""
        return self._stopping.is_set()

    def overdue(self) -> bool:
        """Does a loop fail for longer than it may?"""
        loops = (self.claiming, MAY_FAIL), (self.finishing, MAY_FAIL), (self.beating, self._settings.lease)
        return any(steady.fails_for(seconds) for steady, seconds in loops)
