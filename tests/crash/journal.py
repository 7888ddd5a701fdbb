"""The journal of a crash run: what every process saw, one line each, written down before anybody relies on it.

Each process appends to a file of its own. A line is a single write, which kill -9 does not undo; `sure` returns when
all lines so far are on the disk. Times are CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Line(NamedTuple):
    """One thing that happened.

    By producers: open (inserted, in an open transaction), sent (the commit is on its way), acked (it was answered:
    only from here on it is a promise), refused (a live task has the key), deleting, deleted.
    By nodes: ready, claimed and beat (at: not after the lease began; note: when the reply came), waited (a claim, so
    long), start, end, raised, cancelled (all four by the run), completed, failed, lost, released (events), stopping,
    stopped.
    By the story: killed, frozen, thawed, terminated, exited; of the database: down, up, crashing (with down, if it may
    lose its last 0.6 s of claims and beats), disturbed (replies may have been lost, but it is there).
    """

    what: str
    at: float
    pid: int
    token: str = "-"
    """What the producer called the task: ids of transactions that were rolled back are given out again by SQLite."""
    id: int = 0
    note: str = "-"


class Pen:
    """Writes lines for one process."""

    def __init__(self, folder: Path, pid: int | None = None) -> None:
        self._pid = os.getpid() if pid is None else pid
        self._file = os.open(folder / f"journal-{self._pid}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._written = 0
        self._safe = 0
        self._syncing: asyncio.Task[None] | None = None

    def note(
        self, what: str, token: str = "-", id: int = 0, note: str = "-", *, at: float | None = None, pid: int = 0
    ) -> float:
        """Write a line; returns its time."""
        at = time.monotonic() if at is None else at
        os.write(self._file, f"{what} {at:.6f} {pid or self._pid} {token} {id} {note}\n".encode())
        self._written += 1
        return at

    async def sure(self) -> None:
        """Wait until the disk has what was written so far. Those who wait at the same time share one fdatasync."""
        mine = self._written
        while self._safe < mine:
            if self._syncing is None:
                self._syncing = asyncio.create_task(self._sync())
            await asyncio.shield(self._syncing)

    async def _sync(self) -> None:
        written = self._written
        try:
            await asyncio.to_thread(os.fdatasync, self._file)
            self._safe = written
        finally:
            self._syncing = None


class Reader:
    """Reads the files of a folder as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._lines: list[Line] = []
        self.ready: set[int] = set()
        """The processes that said so."""

    def lines(self) -> list[Line]:
        """All lines so far, by time."""
        known = len(self._lines)
        for path in self._folder.glob("journal-*"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
            new = new[: new.rfind(b"\n") + 1]  # a line that is being written may be seen in part
            self._read[path] = self._read.get(path, 0) + len(new)
            self._lines += parsed(new.decode())
        self.ready |= {line.pid for line in self._lines[known:] if line.what == "ready"}
        self._lines.sort(key=lambda line: line.at)
        return self._lines


def parsed(text: str) -> Iterator[Line]:
    """The lines of a file."""
    for line in text.splitlines():
        what, at, pid, token, id, note = line.split(" ", 5)
        yield Line(what, float(at), int(pid), token, int(id), note)
