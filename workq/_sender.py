"""Concurrent `enqueue(None, ...)` calls share one INSERT: what gathered during the last goes out with the next."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import NamedTuple

from workq._deadline import Deadline
from workq._describe import one_line
from workq._errors import OutcomeUnknown
from workq._new import Item
from workq._place import Ours
from workq._shared import Shared, patiently, plainly
from workq._store import Store
from workq.dialect import Busy, Connection, Interrupted, NotNow, Unreachable

logger = logging.getLogger("workq")

PAGE = 1000


class Letter(NamedTuple):
    """One task to store, and who waits for its id."""

    item: Item
    waiting: asyncio.Future[int | None]
    soon: bool = False
    """It came by `enqueue_soon`: nobody asks for the id."""


class Sender:
    """Gathers tasks and stores them on the queue's own connection."""

    def __init__(
        self,
        store: Store,
        shared: Shared,
        deadline: Deadline,
        stored: Callable[[Sequence[tuple[Item, int | None]]], None],
    ) -> None:
        self._store = store
        self._shared = shared
        self._deadline = deadline
        self._stored = stored
        self._letters: list[Letter] = []
        self._jobs: set[asyncio.Task[object]] = set()
        self._soon: set[asyncio.Future[int | None]] = set()
        self._running = False
        self.idle: asyncio.Event = asyncio.Event()
        self.idle.set()

    async def send(self, item: Item) -> int | None:
        """Store one task. Raises OutcomeUnknown if the reply was lost: it is never sent twice."""
        waiting: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._put(Letter(item, waiting))
        return await waiting

    def soon(self, item: Item) -> None:
        """Store one task, as soon as it can be."""
        stored: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._soon.add(stored)
        stored.add_done_callback(self._soon.discard)
        self._put(Letter(item, stored, soon=True))

    async def flush(self) -> None:
        """Wait until what `soon` took until now is stored, or has failed."""
        if self._soon:
            await asyncio.wait(self._soon.copy())

    def _put(self, letter: Letter) -> None:
        self.idle.clear()
        if letter.item.key is not None:
            # Keyed ones go alone: the INSERT may have to wait for somebody's open transaction.
            self._begin(self._store_page([letter]))
            return
        self._letters.append(letter)
        if not self._running:
            self._running = True
            self._begin(self._run())

    def _begin(self, work: Coroutine[object, object, object]) -> None:
        job = asyncio.get_running_loop().create_task(work, name="workq sender")
        self._jobs.add(job)
        job.add_done_callback(self._ended)

    def _ended(self, job: asyncio.Task[object]) -> None:
        self._jobs.discard(job)
        if not self._jobs:
            self.idle.set()

    async def _run(self) -> None:
        try:
            while self._letters:
                # A caller that was cancelled before its task was sent has not enqueued it.
                letters = [letter for letter in self._letters if not letter.waiting.done()]
                page, self._letters = letters[:PAGE], letters[PAGE:]
                if page:
                    await self._store_page(page)
        finally:
            self._running = False

    async def _store_page(self, page: Sequence[Letter]) -> bool:
        """Store these, each or none. Returns False if the database could not do even one alone now."""
        try:
            await self._insert(page)
        except NotNow as error:
            # All at once may have been too much for a timeout of the server's.
            half = len(page) // 2
            if half and await self._store_page(page[:half]):
                return await self._store_page(page[half:])
            self._failed(page[half:], plainly(error))
            return False
        except Interrupted as error:
            self._failed(page, OutcomeUnknown(f"the reply to the INSERT was lost: {one_line(plainly(error))}"))
        except (Unreachable, Busy) as error:
            self._failed(page, plainly(error))
        except asyncio.CancelledError:
            self._failed(page, OutcomeUnknown("the event loop ended during the INSERT"))
            raise
        except Exception as error:
            if len(page) == 1:
                self._failed(page, error)
            else:
                for letter in page:  # so that one the database refuses does not take others along
                    await self._store_page([letter])
        return True

    async def _insert(self, page: Sequence[Letter]) -> None:
        items = [letter.item for letter in page]

        async def insert(connection: Connection) -> list[int | None]:
            return await self._store.insert(Ours(connection, self._deadline), items)

        ids = await patiently(partial(self._shared.run_here, insert), self._store.clock)
        self._stored(list(zip(items, ids, strict=True)))
        for letter, id in zip(page, ids, strict=True):
            if not letter.waiting.done():
                letter.waiting.set_result(id)

    def _failed(self, page: Sequence[Letter], error: BaseException) -> None:
        for letter in page:
            if letter.soon:
                logger.error("enqueue_soon could not store a task %r: %s", letter.item.name, one_line(error))
                letter.waiting.cancel()
            elif not letter.waiting.done():
                letter.waiting.set_exception(error)
