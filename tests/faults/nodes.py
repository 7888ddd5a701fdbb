"""Processes that run executors, and what they wrote down."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import workq
from support import SOON, Database, eventually
from workq.testing._server import wait_for_state

WORKER = Path(__file__).with_name("worker.py")
# The code under test, wherever this process has it from.
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(workq.__file__).parents[1]), "PYTHONWARNINGS": "default"}


class Line(NamedTuple):
    """One line of the journal."""

    what: str
    id: int
    pid: int
    monotonic: float
    wall: float


class Journal:
    """What all nodes of a test wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self._read = 0
        self._lines: defaultdict[str, list[Line]] = defaultdict(list)

    def lines(self, what: str, pid: int | None = None) -> list[Line]:
        """The lines of one kind, in the order of writing."""
        with self.path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]  # a line that is being written may be seen in part
        self._read += len(new)
        for text in new.decode().splitlines():
            kind, id, writer, monotonic, wall = text.split()
            self._lines[kind].append(Line(kind, int(id), int(writer), float(monotonic), float(wall)))
        return [line for line in self._lines[what] if pid in (None, line.pid)]

    def times(self, what: str) -> Counter[int]:
        """How often it happened, by task."""
        return Counter(line.id for line in self.lines(what))

    async def until(self, what: str, number: int, pid: int | None = None, timeout: float = SOON) -> None:
        """Wait until so many lines of a kind are there."""

        async def written() -> bool:
            return len(self.lines(what, pid)) >= number

        await eventually(written, timeout)


class Node:
    """One process."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self._process = process
        self._output = output
        self.pid = process.pid

    def kill(self) -> None:
        """SIGKILL: nothing of it runs any more when this returns."""
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """SIGSTOP: it stands still when this returns."""
        self._process.send_signal(signal.SIGSTOP)
        wait_for_state([self.pid], "TZX")

    def thaw(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def terminate(self, timeout: float) -> int:
        """SIGTERM, and the exit code."""
        self._process.terminate()
        return self._process.wait(timeout)

    def wait(self, timeout: float) -> int:
        """The exit code, once it has ended by itself."""
        return self._process.wait(timeout)

    def printed(self) -> str:
        """All that it printed so far."""
        return self._output.read_text()

    async def end(self, timeout: float = SOON) -> str:
        """Ask it to end well, and return all that it printed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = await asyncio.to_thread(self._process.wait, timeout)
        assert code == 0, self.printed()
        return self.printed()

    def remove(self) -> None:
        """Leave nothing, however the test ended."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


class Nodes:
    """The processes of one test, on one database."""

    def __init__(self, database: Database, folder: Path) -> None:
        self._database = database
        self._folder = folder
        self._nodes: list[Node] = []
        self.journal = Journal(folder / "journal")

    def begin(self, *flags: str, environment: Mapping[str, str] = {}, **options: float) -> Node:
        """Start a process, without waiting for it."""
        command = [sys.executable, str(WORKER), self._database.url, str(self.journal.path), *flags]
        if self._database.schema is not None:
            command.append(f"--schema={self._database.schema}")
        command += [f"--{name}={value}" for name, value in options.items()]
        output = self._folder / f"output-{len(self._nodes)}"
        with output.open("wb") as file:
            process = subprocess.Popen(
                command, env={**ENVIRONMENT, **environment}, stdin=subprocess.PIPE, stdout=file, stderr=file
            )
        node = Node(process, output)
        self._nodes.append(node)
        return node

    async def start(self, *flags: str, environment: Mapping[str, str] = {}, **options: float) -> Node:
        """Start a process, and wait until its executor runs."""
        node = self.begin(*flags, environment=environment, **options)
        await self.journal.until("ready", 1, node.pid)
        return node

    def remove(self) -> None:
        """Kill those that are left."""
        for node in self._nodes:
            node.remove()


@contextmanager
def nodes_on(database: Database, folder: Path) -> Generator[Nodes]:
    """Processes that do not outlive the block."""
    nodes = Nodes(database, folder)
    try:
        yield nodes
    finally:
        nodes.remove()


FOREIGN_WRITER = """
import sqlite3, sys, time
conn = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30)
conn.execute("begin immediate")
print("locked", flush=True)
time.sleep(float(sys.argv[2]))
conn.execute("commit")
conn.close()
"""


@contextmanager
def foreign_writer(path: Path, seconds: float) -> Generator[subprocess.Popen[bytes]]:
    """A process that holds an SQLite file's writer, from now on and for so long."""
    command = [sys.executable, "-c", FOREIGN_WRITER, str(path), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"locked\n"
            yield process
        finally:
            process.kill()


@contextmanager
def program(*command: str) -> Generator[subprocess.Popen[bytes]]:
    """Any other program that uses workq."""
    with subprocess.Popen(
        [sys.executable, *command], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.kill()
