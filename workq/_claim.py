"""Takes due tasks: where the next page starts, what may be taken, and what to make of a lost reply.

Each claim goes on after the (run_at, id) where the last one ended, per (name, priority), so that it does not walk over
the dead index entries of tasks that are done. A short page, or a second, starts again from the beginning, which picks
up retried tasks, expired leases and tasks with an earlier time. (W: "Claiming".)
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import NamedTuple, TypeAlias

from workq._caution import IMPATIENT, Caution
from workq._clock import Clock
from workq._deadline import Deadline
from workq._held import Holding
from workq._settings import Settings
from workq._store import Lane, Store, Wanted
from workq._task import Claimed
from workq.dialect import Busy, Connection, Urgency

Cursor: TypeAlias = Mapping[tuple[str, int], tuple[datetime, int]]

START: Cursor = {}
SUSPECT = 3
"""From so many vanished holders on (or max_lost, if that is less), a node runs such tasks one at a time, or a killer's
neighbours would be parked with it."""
BUSY = 10.0
"""Seconds of attempts while SQLite's writer is busy."""
BREATH = 0.005
"""Seconds between them."""


class Page(NamedTuple):
    """What a claim brought."""

    tasks: list[Claimed]
    sent: float
    """When its statement was sent, on the monotonic clock: the leases run from then."""


def next_cursor(cursor: Cursor, page: Sequence[Claimed], asked: int) -> Cursor:
    """Where the following claim starts."""
    if len(page) < asked:
        return START
    moved = dict(cursor)
    for task in page:
        lane, place = (task.name, task.priority), (task.run_at, task.lease.id)
        if lane not in moved or moved[lane] < place:
            moved[lane] = place
    return moved


class Claimer:
    """One claim at a time, on a connection of its own."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        connection: Connection,
        clock: Clock,
        holding: Holding,
        caution: Caution,
        beat: Callable[[], Awaitable[None]],
    ) -> None:
        self._store = store
        self._connection = connection
        self._clock = clock
        self._holding = holding
        self._caution = caution
        self._beat = beat
        self._queue = settings.queue
        self._names = sorted(settings.handlers)
        self._schedules = list(settings.schedules)
        self._lease = timedelta(seconds=settings.lease)
        self._poll_interval = poll_interval = settings.poll_interval
        # An idle executor sends two statements a second at most; and a takeover is due a second after a poll.
        self._suspects_every = max(poll_interval / 2, min(poll_interval + 0.2, 1.2))
        self._suspect = min(SUSPECT, max(settings.max_lost, 1))
        self._cursor: Cursor = START
        self._passed = clock.monotonic()
        self._looked_for_suspects = float("-inf")
        self._unanswered: dict[int, float] = {}
        self._deadline = Deadline(clock)
        self._closed = False

    def close(self) -> None:
        """Claim nothing more, not even what is being tried again."""
        self._closed = True

    def due(self, now: float) -> bool:
        """Is it time to look at everything again, from the beginning?"""
        return now - self._passed >= min(1.0, self._poll_interval)

    def begin_again(self) -> None:
        """Let the next claim start from the beginning."""
        self._cursor = START

    async def once(self, room: int, *, ahead: bool = False) -> Page:
        """Claim up to `room` tasks. The page is short if there is nothing more.

        `ahead`: the page ends before a task that a vanished process held. That one may kill this process, too, and
        must not take along what waits; nor do others overtake it.
        """
        now = self._clock.monotonic()
        if self.due(now):
            self._cursor = START
        if self._cursor is START and not ahead:
            self._passed = now
        tasks, sent = await self._claim(room, self._cursor, suspects=False, ahead=ahead)
        self._cursor = next_cursor(self._cursor, tasks, room)
        if not ahead and len(tasks) < room and now - self._looked_for_suspects >= self._suspects_every:
            self._looked_for_suspects = now
            if not any(held.claimed.lost >= self._suspect for held in self._holding):
                if not tasks:
                    tasks, sent = await self._claim(1, START, suspects=True)
                else:
                    # What was claimed waits for its start, and is not beaten yet. The next claim meets the same trouble
                    # and tells of it.
                    with suppress(Exception):
                        tasks += (await self._send(1, START, suspects=True, ahead=False, brief=True)).tasks
        alive_until = sent + self._lease.total_seconds()
        return Page([task for task in tasks if not self._holding.renew(task.lease, alive_until)], sent)

    async def _claim(self, limit: int, cursor: Cursor, *, suspects: bool, ahead: bool = False) -> Page:
        until = self._clock.monotonic() + BUSY
        while True:
            try:
                return await self._send(limit, cursor, suspects=suspects, ahead=ahead)
            except Busy:
                # SQLite: with the time of before the wait, the leases would be over when the page comes.
                if self._closed or self._clock.monotonic() > until:
                    raise
            await self._clock.sleep(BREATH)

    async def _send(self, limit: int, cursor: Cursor, *, suspects: bool, ahead: bool, brief: bool = False) -> Page:
        clock, caution = self._clock, self._caution
        if caution.before_claim(clock.monotonic(), clock.now()):
            await self._beat()
        sent, wall = clock.monotonic(), clock.now()
        takeover = caution.may_take_over(sent)
        token = random.getrandbits(63) or 1
        tokens = [old for old, until in self._unanswered.items() if until > sent]
        wanted = Wanted(
            queue=self._queue,
            names=self._names,
            limit=limit,
            token=token,
            lease=self._lease,
            cursor=[Lane(*lane, *place) for lane, place in cursor.items()],
            schedules=self._schedules,
            tokens=tokens,
            takeover=takeover,
            suspect=self._suspect,
            suspects=suspects,
            ahead=ahead,
        )
        patience = IMPATIENT if brief else caution.patience(takeover=takeover)

        async def claim(seconds: float) -> list[Claimed]:
            urgency = Urgency(timeout=seconds, lock_wait=min(patience, seconds))
            return await self._store.claim(self._connection, wanted, urgency)

        try:
            tasks = await self._deadline.meet(claim)
        except Busy:
            caution.waited(clock.monotonic())
            raise
        except BaseException:
            # It may have been carried out: rows with this token are ours, and the next claims take them.
            self._unanswered = {old: until for old, until in self._unanswered.items() if until > sent}
            self._unanswered[token] = clock.monotonic() + 2 * self._lease.total_seconds()
            self._cursor = START
            raise
        caution.claimed(sent, clock.monotonic(), wall, takeover=takeover)
        return Page(tasks, sent)
