"""What a queue shares with the executors of this process: the table, the hooks, its own connection, who wakes whom."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TypeVar

from workq._bell import Announcer
from workq._checks import check_size
from workq._clock import Clock
from workq._deadline import Deadline
from workq._describe import storable
from workq._errors import OutcomeUnknown
from workq._event import Event, EventKind, Hook, event_of, tell
from workq._held import Holding
from workq._new import Item
from workq._process import require_process
from workq._sender import Sender
from workq._shared import Shared, patiently, plainly
from workq._store import Repaired, Store, parse_headers
from workq._task import EMPTY
from workq.dialect import Busy, Connection, Dialect, Interrupted, Transaction, Unreachable

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """What the queue knows of an executor in this process: whom to wake, and what to wait for."""

    queue: str
    names: frozenset[str]
    schedules: tuple[tuple[str, str, str], ...]
    """(queue, name, key) of what it schedules."""
    holding: Holding
    ring: Callable[[], None]


class _InLoop:
    """What belongs to the event loop that uses the queue."""

    def __init__(
        self,
        dialect: Dialect,
        store: Store,
        inserts: Deadline,
        stored: Callable[[Sequence[tuple[Item, int | None]]], None],
    ) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.pid: int = os.getpid()
        self.shared: Shared = Shared(dialect)
        self.sender: Sender = Sender(store, self.shared, inserts, stored)
        self.announcer: Announcer = Announcer(dialect, self.shared)
        self.changed: asyncio.Event = asyncio.Event()
        self.locals: list[Local] = []
        self.listening: asyncio.Task[None] | None = None
        self.release: Callable[[], None] | None = None


class Hub:
    """One for each Queue. Making one does no I/O and needs no running loop."""

    def __init__(
        self, dialect: Dialect, hooks: Sequence[Hook], max_payload: int, redact: Callable[[str], str] | None
    ) -> None:
        self.dialect: Dialect = dialect
        self.clock: Clock = Clock()
        self.store: Store = Store(dialect, self.clock)
        self.inserts: Deadline = Deadline(self.clock)
        """Of those on the queue's own connection."""
        self.hooks: tuple[Hook, ...] = tuple(hooks)
        self.max_payload: int = max_payload
        self._redact = redact
        self._rings: dict[str, Callable[[], None]] = {}
        self._changes = Counter[str]()
        self._state: _InLoop | None = None
        dialect.at_close(self._close)

    def in_loop(self) -> _InLoop:
        """The part that belongs to the running loop. Raises RuntimeError if another loop uses the queue."""
        state, loop = self._state, asyncio.get_running_loop()
        if state is not None:
            require_process(state.pid)
        if state is not None and state.loop is not loop:
            if not state.loop.is_closed():
                raise RuntimeError("this Queue is in use in another event loop: make one for each loop")
            state = None
        if state is None:
            state = self._state = _InLoop(self.dialect, self.store, self.inserts, self._stored)
        return state

    async def own(self, work: Callable[[Connection], Awaitable[T]], *, unsure: bool = False) -> T:
        """Run work on it. Raises the driver's errors; with `unsure`, OutcomeUnknown if the reply was lost."""
        try:
            return await patiently(partial(self.in_loop().shared.run, work), self.clock)
        except Interrupted as error:
            if unsure:
                raise OutcomeUnknown("the reply to the INSERT was lost: the tasks may have been stored") from plainly(
                    error
                )
            raise plainly(error) from None
        except (Unreachable, Busy) as error:
            raise plainly(error) from None

    async def send(self, item: Item) -> int | None:
        """Store one task, together with others that are sent now."""
        return await self.in_loop().sender.send(item)

    def soon(self, item: Item) -> None:
        """Store one task, as soon as it can be."""
        self.in_loop().sender.soon(item)

    async def flush(self) -> None:
        """Wait until what `soon` took until now is stored, or has failed."""
        if self._state is not None:
            await self._state.sender.flush()

    @property
    def locals(self) -> Sequence[Local]:
        """Those that run on this queue."""
        return () if self._state is None else tuple(self._state.locals)

    def attach(self, local: Local) -> None:
        """An executor lives here from now on: listen for rings, and count on the queue's two connections."""
        state = self.in_loop()
        if not state.locals:
            state.release = self.dialect.reserve(2)
            state.listening = state.loop.create_task(self.dialect.listen(self._heard), name="workq listen")
        state.locals.append(local)

    async def detach(self, local: Local) -> None:
        """It does no more."""
        state = self.in_loop()
        state.locals.remove(local)
        if not state.locals:
            if state.release is not None:
                state.release()
            if state.listening is not None:
                state.listening.cancel()
                await asyncio.wait([state.listening], timeout=0.2)

    def changes(self, names: Set[str] | None) -> int:
        """Counts what happened here to tasks of these names (None: any), so that a look at the table can be told from
        a stale one."""
        counts = self._changes
        return sum(counts.values() if names is None else (counts[name] for name in names))

    def changed(self, names: Iterable[str]) -> None:
        """Tasks of these names ended here: whoever waits may look again."""
        self._changes.update(names)
        if self._state is not None:
            self._state.changed.set()

    async def change(self, seconds: float) -> None:
        """Wait for `changed`, at most so long."""
        event = self.in_loop().changed
        event.clear()
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            pass

    def tell(self, event: Event) -> None:
        """Call the hooks."""
        tell(self.hooks, event)

    def enqueued(self, stored: Iterable[tuple[Item, int | None]], tx: Transaction | None) -> None:
        """Tasks were stored: tell the hooks, and wake the executors once they may see them."""
        queues: set[str] = set()
        at = self.clock.now()
        for item, id in stored:
            if id is None:
                continue
            if self.hooks:
                self._tell("enqueued", id, item.queue, item.name, item.key, parse_headers(item.headers), at, tx)
            if item.run_at is None and not item.delay:
                queues.add(item.queue)
        for queue in queues:
            self.ring(queue, tx)

    def repaired(self, repaired: Iterable[Repaired], tx: Transaction | None) -> None:
        """Failed tasks were set free."""
        at = self.clock.now()
        for one in repaired:
            if self.hooks:
                self._tell("retried", one.id, one.queue, one.name, one.key, one.headers, at, tx)
            self.ring(one.queue, tx)

    def ring(self, queue: str, tx: Transaction | None) -> None:
        """Wake the executors of a queue, here and elsewhere, when `tx` is over."""
        if tx is None:
            self._rung(queue)
            return
        # One callback for each queue, so that a transaction with many tasks rings once.
        callback = self._rings.setdefault(queue, partial(self._rung, queue))
        self.in_loop()
        self.dialect.after(tx, callback)

    def redacted(self, text: str) -> str:
        """An error text as it may be stored."""
        if self._redact is None:
            return text
        try:
            return storable(str(self._redact(text)))
        except BaseException as error:
            return f"(the error is not shown: redact raised {type(error).__name__})"

    def checked(self, payload: str) -> str:
        """A payload's JSON text, if it is not too large. Raises PayloadError."""
        return check_size(payload, self.max_payload)

    def _stored(self, stored: Sequence[tuple[Item, int | None]]) -> None:
        self.enqueued(stored, None)
        self._changes.update(item.name for item, id in stored if id is not None)

    def _tell(
        self,
        kind: EventKind,
        id: int,
        queue: str,
        name: str,
        key: str | None,
        headers: Mapping[str, str],
        at: datetime,
        tx: Transaction | None,
    ) -> None:
        self.tell(event_of(kind, id, queue, name, key, 1, headers or EMPTY, at, in_tx=tx is not None))

    def _rung(self, queue: str) -> None:
        state = self.in_loop()
        for local in state.locals:
            if local.queue == queue:
                local.ring()
        state.announcer.ring(queue)

    def _heard(self, message: str | None) -> None:
        state = self.in_loop()
        ours, queue = state.announcer.queue_in(message)
        for local in state.locals:
            if ours and queue in (None, local.queue):
                local.ring()

    async def _close(self) -> None:
        """The database is about to be closed."""
        state = self._state
        if state is None or state.loop is not asyncio.get_running_loop():
            return
        try:
            async with asyncio.timeout(5):
                await state.sender.idle.wait()
        except TimeoutError:
            pass
        await state.shared.close()
