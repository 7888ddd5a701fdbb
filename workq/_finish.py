"""Writes how runs ended: what gathered while the last write was under way goes out in the next one.

Nothing waits when idle, and under load one statement ends hundreds of tasks. No statement waits for a foreign row
lock: a row that somebody's transaction holds is left out, and tried again later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

from workq._clock import Clock
from workq._deadline import Deadline
from workq._describe import one_line
from workq._ending import SUCCESS, Ending, Settled
from workq._held import Held
from workq._store import Store
from workq._task import Lease
from workq.dialect import Busy, Connection, Interrupted, NotNow, Unreachable, Urgency

logger = logging.getLogger("workq")

PAGE = 1000
LONGEST_WAIT = 1.0
"""Seconds between looks at a row that somebody's transaction holds, and between attempts of one that failed alone."""
REFUSED = 1.0
"""Seconds of refusals after which an ending is given in: a privilege may be back, or a table that was renamed."""
DELETE_REFUSED = 30.0

Verdict: TypeAlias = Literal["written", "completed", "locked", "lost"]


@dataclass(eq=False, slots=True)
class Entry:
    """The end of one run, until it is written."""

    held: Held
    ending: Ending
    duration: float | None
    unsure: bool = False
    """A write was sent whose reply was lost."""
    alone: bool = False
    """A write of it alone failed: it holds up nobody else any more."""
    refused_since: float | None = None
    """When the database first refused to store it."""
    given_in: bool = False
    """The ending is that it could not be stored."""
    due: float = 0.0
    wait: float = 0.01


def verdict(entry: Entry, row: Lease | None, *, within_lease: bool) -> Verdict:
    """What became of an entry that its statement did not return; `row` is its row as last committed."""
    lease = entry.held.lease
    if row == lease:
        return "locked"
    if entry.held.completing:
        # A one-shot task that is still there was not completed, whatever became of it since.
        if row is not None and entry.held.moves_to is None:
            return "lost"
        # Gone or, of a schedule, changed: complete(tx) was committed, unless the very next change was somebody else's
        # claim; or, where the lease is over and the handler raised (its commit failed, say), any number of changes.
        taken = row is not None and row.version == lease.version + 1 and row.token != lease.token
        doubtful = not within_lease and not entry.held.committed
        return "lost" if taken or doubtful else "completed"
    if entry.ending.settled is None:
        # Gone: by our own lost reply, most likely, as long as nobody else could have claimed and finished it.
        return "written" if row is None and entry.unsure and within_lease else "lost"
    if row is not None and row.version == lease.version + 1 and row.token == lease.token:
        return "written"  # an update leaves the token, so this one was ours
    return "lost"


class Finisher:
    """Gathers endings and writes them, on a connection of its own."""

    def __init__(
        self,
        store: Store,
        connection: Connection,
        clock: Clock,
        most: int,
        written: Callable[[Sequence[tuple[Entry, datetime | None]]], None],
        lost: Callable[[Entry], None],
        redact: Callable[[str], str],
    ) -> None:
        self._store = store
        self._connection = connection
        self._clock = clock
        self._most = most
        self._written = written
        self._lost = lost
        self._redact = redact
        self._entries: dict[Entry, None] = {}
        self._arrived = asyncio.Event()
        self._deadline = Deadline(clock)
        self._page = PAGE
        """How many go into one write: fewer after one that may have been too much for a timeout of the server's."""

    @property
    def full(self) -> bool:
        """So much waits to be written that nothing more should be claimed."""
        return len(self._entries) >= self._most

    def put(self, entry: Entry) -> None:
        """Have an ending written."""
        self._entries[entry] = None
        self._arrived.set()

    async def wait(self) -> None:
        """Wait until there is something to write."""
        while True:
            self._arrived.clear()
            now = self._clock.monotonic()
            due = min((entry.due for entry in self._entries), default=None)
            if due is not None and due <= now:
                return
            try:
                async with asyncio.timeout(None if due is None else due - now):
                    await self._arrived.wait()
            except TimeoutError:
                return

    async def once(self) -> None:
        """Write what is due, at most a page of it."""
        now = self._clock.monotonic()
        page = self._due(now)
        try:
            await self._write(page)
            self._page = min(self._page * 2, PAGE)
        except (Interrupted, Unreachable, Busy) as error:
            if not isinstance(error, Busy):
                self._page = max(len(page) // 2, 1)
            self._doubted(page, error)
            raise
        except Exception as error:
            if len(page) == 1:
                self._refused(page[0], error)
            else:
                for entry in page:
                    await self._alone(entry)

    def _due(self, now: float) -> list[Entry]:
        """A page, with one run of a task at most: a write says of a task, not of a run, that it was done."""
        page = dict[int, Entry]()
        for entry in self._entries:
            if entry.due > now:
                continue
            if entry.alone:
                if page:
                    continue
                return [entry]
            page.setdefault(entry.held.lease.id, entry)
            if len(page) == self._page:
                break
        return list(page.values())

    async def _alone(self, entry: Entry) -> None:
        """One by one: a statement failed, and an ending that the database refuses must hold up nobody."""
        if entry not in self._entries:
            return
        try:
            await self._write([entry])
        except (Interrupted, Unreachable, Busy) as error:
            self._doubted([entry], error)
            raise
        except Exception as error:
            self._refused(entry, error)

    def _doubted(self, page: Sequence[Entry], error: Interrupted | Unreachable | Busy) -> None:
        for entry in page:
            entry.unsure = entry.unsure or isinstance(error, Interrupted)
        if len(page) == 1 and isinstance(error, Interrupted | NotNow):
            # It may be the one that is too much, for a proxy or a full disk.
            page[0].alone = True
            self._later(page[0])

    def _later(self, entry: Entry) -> None:
        entry.due = self._clock.monotonic() + entry.wait
        entry.wait = min(entry.wait * 2, LONGEST_WAIT)

    def _refused(self, entry: Entry, error: Exception) -> None:
        """The database refuses to store this ending. After a while: fail the task with that, in words it will take."""
        entry.alone = True
        self._later(entry)
        now = self._clock.monotonic()
        text = self._redact(f"the end of the run could not be stored: {one_line(error)}")
        if entry.refused_since is None:
            entry.refused_since = now
            logger.warning("task %d: %s; it is tried again", entry.held.lease.id, text)
        # A DELETE has no content that could be at fault.
        if now - entry.refused_since < (DELETE_REFUSED if entry.ending.settled is None else REFUSED):
            return
        if not entry.given_in:
            logger.error("task %d: %s", entry.held.lease.id, text)
        entry.given_in = True
        settled = Settled(failed=True, attempt=entry.held.claimed.attempt + 1, error=text)
        entry.ending = Ending("failed", settled, text)

    async def _write(self, page: Sequence[Entry]) -> None:
        deletes = [entry for entry in page if entry.ending.settled is None]
        updates = [(entry, entry.ending.settled) for entry in page if entry.ending.settled is not None]
        left_out: list[Entry] = []
        if deletes:
            leases = [entry.held.lease for entry in deletes]
            ids = await self._deadline.meet(
                lambda seconds: self._store.succeed(self._connection, leases, Urgency(timeout=seconds))
            )
            left_out += self._done(deletes, dict.fromkeys(ids))
        if updates:
            rows = [(entry.held.lease, settled) for entry, settled in updates]
            run_ats = await self._deadline.meet(
                lambda seconds: self._store.settle(self._connection, rows, Urgency(timeout=seconds))
            )
            left_out += self._done([entry for entry, _ in updates], run_ats)
        if left_out:
            await self._look(left_out)

    def _done(self, entries: Sequence[Entry], returned: dict[int, datetime] | dict[int, None]) -> list[Entry]:
        left_out: list[Entry] = []
        written: list[tuple[Entry, datetime | None]] = []
        for entry in entries:
            id = entry.held.lease.id
            if id in returned:
                del self._entries[entry]
                written.append((entry, returned[id]))
            else:
                left_out.append(entry)
        self._written(written)
        return left_out

    async def _look(self, entries: Sequence[Entry]) -> None:
        ids = [entry.held.lease.id for entry in entries]
        rows = await self._deadline.meet(
            lambda seconds: self._store.look(self._connection, ids, Urgency(timeout=seconds))
        )
        now = self._clock.monotonic()
        for entry in entries:
            within_lease = now < entry.held.alive_until
            match verdict(entry, rows.get(entry.held.lease.id), within_lease=within_lease):
                case "locked":
                    self._later(entry)
                case "written":
                    if entry.ending.settled is None:
                        logger.info("task %d is gone; it was most likely our own finish", entry.held.lease.id)
                    del self._entries[entry]
                    self._written([(entry, None)])
                case "completed":
                    entry.ending = SUCCESS
                    del self._entries[entry]
                    self._written([(entry, None)])
                case "lost":
                    del self._entries[entry]
                    self._lost(entry)
