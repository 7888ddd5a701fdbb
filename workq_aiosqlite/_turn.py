"""Whose turn it is to write: SQLite has one writer, and inside a process it is better to queue than to collide."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque

from workq.dialect import Busy


class Turn:
    """A lock with two queues: beats go first, so that leases live through a burst of other writes."""

    def __init__(self) -> None:
        self._taken = False
        self._first: deque[asyncio.Future[None]] = deque()
        self._others: deque[asyncio.Future[None]] = deque()

    def taken_at_once(self) -> bool:
        """Take the turn if it is free."""
        free = not self._taken
        self._taken = True
        return free

    async def take(self, *, first: bool, wait: float) -> None:
        """Wait for the turn. Raises Busy after `wait` seconds."""
        if self.taken_at_once():
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        (self._first if first else self._others).append(mine)
        try:
            async with asyncio.timeout(wait):
                await mine
        except BaseException as error:
            if mine.done() and not mine.cancelled():
                self.give()  # it came in the same turn of the loop as the timeout or the cancellation
            if isinstance(error, TimeoutError):
                raise Busy("the queue for SQLite's writer was too long") from None
            raise

    def give(self) -> None:
        """Pass the turn on."""
        for queue in (self._first, self._others):
            while queue:
                following = queue.popleft()
                if not following.done():
                    following.set_result(None)
                    return
        self._taken = False


_turns: weakref.WeakValueDictionary[tuple[int, int, int], Turn] = weakref.WeakValueDictionary()


def turn_of(device: int, inode: int) -> Turn:
    """The one turn for a file in this process (and loop: two loops meet in SQLite, like two processes)."""
    key = (device, inode, id(asyncio.get_running_loop()))
    turn = _turns.get(key)
    if turn is None:
        turn = _turns[key] = Turn()
    return turn
