"""Two things that end badly if left to chance: a fork, and a cancellation in the middle of closing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any


def require_process(pid: int) -> None:
    """Raise RuntimeError in a process that was forked from the one that opened the database.

    Two processes on one socket garble it, and an SQLite file used across a fork can be corrupted.
    """
    if os.getpid() != pid:
        raise RuntimeError(
            f"this database was opened by process {pid}, before a fork, and cannot be used in its child: "
            "open it, and make the Queue and the Executor, in the process that uses them"
        )


async def to_its_end(closing: Coroutine[Any, Any, None]) -> None:
    """Run what must not stop half-way; a cancellation is delivered after it."""
    task = asyncio.get_running_loop().create_task(closing)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.done():
                break
            cancelled = error
        except Exception:
            break
    if cancelled is not None:
        if not task.cancelled():
            task.exception()
        raise cancelled
    task.result()
