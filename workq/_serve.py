"""`serve`: run executors until the process is asked to end, and leave the signal handlers as they were."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Any

from workq._executor import Executor, StoppedEarly

logger = logging.getLogger("workq")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def serve(*executors: Executor) -> None:
    """Run executors until SIGINT or SIGTERM, then stop all of them at once, each within its `stop_timeout`.

    A second signal is `stop(0)`. Signals are watched only in the main thread; the handlers that were set before are
    put back. If one executor cannot start, those that have are stopped. Raises what `start` raises.
    """
    if not executors:
        raise ValueError("serve() needs at least one executor")
    asked = asyncio.Queue[None]()
    waiting: list[asyncio.Task[None]]
    with watched(lambda: asked.put_nowait(None)):
        running = [asyncio.create_task(executor.run(), name="workq serve") for executor in executors]
        signalled = asyncio.create_task(asked.get())
        try:
            waiting = [signalled, *running]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            signalled.cancel()
            await _stop(executors, running, asked)
    for task in (task for task in running if task.done()):
        with suppress(asyncio.CancelledError, StoppedEarly):
            task.result()


async def _stop(executors: tuple[Executor, ...], running: list[asyncio.Task[None]], asked: asyncio.Queue[None]) -> None:
    stopping = asyncio.create_task(_all(executor.stop() for executor in executors))
    again = asyncio.create_task(asked.get())
    try:
        await asyncio.wait([stopping, again], return_when=asyncio.FIRST_COMPLETED)
    finally:
        again.cancel()
        if not stopping.done():
            await _all(executor.stop(0) for executor in executors)
        await stopping
    await asyncio.wait(running, timeout=1)


async def _all(stops: Iterable[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*stops)


@contextmanager
def watched(asked: Callable[[], None]) -> Generator[None]:
    """Call `asked` in the loop at SIGINT and SIGTERM; put the previous handlers back afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        loop.add_signal_handler(number, asked)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            if handler is not None:
                signal.signal(number, handler)
