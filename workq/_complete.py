"""`task.complete(tx)`: the end of a task inside its handler's own transaction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workq._clock import Clock
from workq._ending import finish_time
from workq._errors import LeaseLost, PayloadError
from workq._held import Held
from workq._run import encoded
from workq._schedule import When, next_run
from workq._store import Store
from workq._task import Task
from workq.dialect import Transaction


async def complete(
    held: Held,
    task: Task[Any],
    tx: Transaction,
    store: Store,
    clock: Clock,
    when: When | None,
    checked: Callable[[str], str],
) -> None:
    """Delete the row, or move the schedule on, on the caller's connection.

    From here on the open transaction is the lease: a beat skips the row, and no loss is believed. May be called again
    in another transaction after one that rolled back; the payload and next run stay those of the first call.
    """
    held.wants_completion = True
    try:
        if tx is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise TypeError("complete(tx) needs the connection whose open transaction holds what the handler wrote")
        if held.lost or held.ended:
            raise LeaseLost(f"task {task.id} is no longer this run's: roll back what was done in its name")
        if when is not None and held.moves_to is None:
            payload = encoded(held.handler, task)
            if isinstance(payload, PayloadError):
                raise payload
            finished_at = finish_time(held.claimed.claimed_at, clock.monotonic() - held.received)
            held.moves_to = next_run(when, finished_at), checked(payload)
        before, held.completing = held.completing, True
        try:
            if held.moves_to is None:
                ours = await store.complete(tx, held.lease)
            else:
                ours = await store.complete_schedule(tx, held.lease, *held.moves_to)
        except Exception:
            held.completing = before  # nothing was done
            raise
        if not ours:
            held.completing = before
            if before:
                raise LeaseLost(f"task {task.id} was completed by this run before, perhaps in this very transaction")
            raise LeaseLost(f"task {task.id} was taken over or deleted: roll back what was done in its name")
        held.refused = None
    except Exception as error:
        held.refused = error
        raise
