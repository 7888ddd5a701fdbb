"""What hooks and the log are told when something happened to a held task."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime

from workq._describe import kind_of
from workq._event import EventKind, event_of
from workq._finish import Entry
from workq._held import Held, Holding
from workq._hub import Hub
from workq._store import parse_headers

logger = logging.getLogger("workq")


class Reporter:
    """Tells the queue's hooks, after the fact, and lets go of what is no longer held."""

    def __init__(self, hub: Hub, holding: Holding) -> None:
        self._hub = hub
        self._holding = holding

    def started(self, held: Held) -> None:
        """A handler is about to run."""
        self._tell("started", held, self._hub.clock.now())

    def written(self, entries: Sequence[tuple[Entry, datetime | None]]) -> None:
        """The ends of these runs are committed; with each, when its row is due again."""
        at = self._hub.clock.now()
        handed_back: set[str] = set()
        for entry, run_at in entries:
            self._written(entry, run_at, at)
            self._holding.remove(entry.held)
            if entry.ending.handed_back:
                handed_back.add(entry.held.claimed.queue)
        for queue in handed_back:
            self._hub.ring(queue, None)  # for whoever has a free place now, ourselves included
        self._hub.changed(entry.held.claimed.name for entry, _ in entries)

    def _written(self, entry: Entry, run_at: datetime | None, at: datetime) -> None:
        held, ended = entry.held, entry.ending
        if ended.kind == "failed":
            if ended.runs_again:
                level, what = logging.INFO, "will run again"
            elif ended.settled is not None and not ended.settled.failed:
                level, what = logging.WARNING, "goes on at its next time"
            else:
                level, what = logging.WARNING, "is kept as failed"
            self._log(level, held, f"failed{_kind(ended.error)} (run {held.claimed.attempt + 1}) and {what}")
        self._tell(
            ended.kind,
            held,
            at,
            duration=entry.duration,
            error=ended.error,
            retry_at=run_at if ended.runs_again else None,
        )

    def lost(self, held: Held) -> None:
        """The lease was lost: whatever the handler still does, its end changes nothing."""
        if held.lost:
            return
        held.lost = True
        held.cancel("lost")
        self._log(
            logging.WARNING, held, "is no longer ours: it was deleted, or its lease ran out and it was taken over"
        )
        self._tell("lost", held, self._hub.clock.now())
        if held.ended:
            self._holding.remove(held)
        self._hub.changed([held.claimed.name])

    def abandoned(self, held: Held) -> None:
        """stop() could not wait for its handler."""
        held.lost = True
        self._log(logging.WARNING, held, "did not end when stop() asked it to; its lease runs out by itself")

    def _log(self, level: int, held: Held, what: str) -> None:
        claimed = held.claimed
        extra = {"workq_task_id": held.lease.id, "workq_task": claimed.name, "workq_queue": claimed.queue}
        logger.log(level, "task %d %r %s", held.lease.id, claimed.name, what, extra=extra)

    def _tell(
        self,
        kind: EventKind,
        held: Held,
        at: datetime,
        *,
        duration: float | None = None,
        error: BaseException | str | None = None,
        retry_at: datetime | None = None,
    ) -> None:
        if not self._hub.hooks:
            return
        claimed = held.claimed
        self._hub.tell(
            event_of(
                kind,
                claimed.lease.id,
                claimed.queue,
                claimed.name,
                claimed.key,
                claimed.attempt + 1,
                parse_headers(claimed.headers),
                at,
                in_tx=False,
                duration=duration,
                error=error,
                retry_at=retry_at,
            )
        )


def _kind(error: BaseException | str | None) -> str:
    """What the log says of an error: not its message, which may quote a payload."""
    return f" with {kind_of(error).encode('unicode_escape').decode()}" if isinstance(error, BaseException) else ""
