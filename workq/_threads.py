"""Threads for plain `def` handlers: as many as run at once, and none left when the executor has stopped.

Not anyio's: its idle threads stay until the event loop ends, and one that still runs would keep the process alive.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

Outcome: TypeAlias = "tuple[Any, BaseException | None]"


@dataclass(frozen=True, slots=True)
class _Call:
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Outcome]
    context: contextvars.Context
    function: Callable[[Any], Any]
    argument: object


class _Thread(threading.Thread):
    """Takes one call after the other, until it is given None."""

    def __init__(self, done: Callable[[_Thread, _Call, Outcome], None]) -> None:
        super().__init__(name="workq handler", daemon=True)
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._done = done

    def run(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                outcome: Outcome = call.context.run(call.function, call.argument), None
            except BaseException as error:
                # As a value: StopIteration, for one, does not survive the way to the loop as an exception.
                outcome = None, error
            try:
                call.loop.call_soon_threadsafe(self._done, self, call, outcome)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more
            del call, outcome


class Threads:
    """Grows with the number of calls under way, which the workers bound. Used from one event loop."""

    def __init__(self) -> None:
        self._idle: list[_Thread] = []
        self._closed = False

    async def run(self, function: Callable[[Any], Any], argument: object) -> Outcome:
        """Call the function in a thread, in a copy of this context. Returns its result, or what it raised.

        A cancelled caller leaves the thread behind: it goes on to its end, unheard.
        """
        loop = asyncio.get_running_loop()
        call = _Call(loop, loop.create_future(), contextvars.copy_context(), function, argument)
        if self._idle:
            thread = self._idle.pop()
        else:
            thread = _Thread(self._done)
            thread.start()
        thread.calls.put(call)
        return await call.future

    def close(self) -> None:
        """End the idle threads now, and the others as soon as they are."""
        self._closed = True
        while self._idle:
            self._idle.pop().calls.put(None)

    def _done(self, thread: _Thread, call: _Call, outcome: Outcome) -> None:
        if self._closed:
            thread.calls.put(None)
        else:
            self._idle.append(thread)
        if not call.future.done():
            call.future.set_result(outcome)
