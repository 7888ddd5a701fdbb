"""The processes of a crash run: begun, watched, broken, and written down in the journal what was done to them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from crash.journal import Pen, Reader
from faults.nodes import ENVIRONMENT, Node
from support import eventually

HERE = Path(__file__).parent
PATIENCE = 60.0
"""Seconds after which a run gives up waiting for what must happen."""

Option = str | float | bool | None


class Company:
    """Nodes and producers on one database, and their journal.

    common: options of both programs. Options become flags: stop=2 is --stop=2, no_listen=True is --no-listen.
    """

    def __init__(self, url: str, folder: Path, **common: Option) -> None:
        self.url = url
        self.folder = folder
        self.nodes: list[Node] = []
        """Those that were neither killed nor asked to end."""
        self.producers: list[Node] = []
        self.pen = Pen(folder)
        self.journal = Reader(folder)
        self._common = common
        self._all: list[Node] = []

    def node(self, url: str | None = None, **options: Option) -> Node:
        """Begin one more node."""
        node = self._begin("node.py", [url or self.url, str(self.folder)], options)
        self.nodes.append(node)
        return node

    def producer(self, name: str, url: str | None = None, **options: Option) -> Node:
        """Begin one more producer."""
        producer = self._begin("producer.py", [url or self.url, str(self.folder), name], options)
        self.producers.append(producer)
        return producer

    def _begin(self, program: str, words: list[str], options: dict[str, Option]) -> Node:
        command = [sys.executable, str(HERE / program), *words]
        for name, value in {**self._common, **options}.items():
            flag = "--" + name.replace("_", "-")
            if value is True:
                command.append(flag)
            elif value is not None and value is not False:
                command.append(f"{flag}={value}")
        environment = ENVIRONMENT | {"PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}:{HERE.parent}"}
        output = self.folder / f"output-{len(self._all)}"
        with output.open("wb") as file:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=file, stderr=file)
        node = Node(process, output)
        self._all.append(node)
        return node

    async def ready(self, *nodes: Node) -> None:
        """Wait until their executors run."""
        pids = {node.pid for node in nodes}
        await self.until(lambda: pids <= self._ready())

    def running(self) -> list[Node]:
        """The nodes whose executors run."""
        ready = self._ready()
        return [node for node in self.nodes if node.pid in ready]

    def _ready(self) -> set[int]:
        self.journal.lines()
        return self.journal.ready

    async def kill(self, node: Node) -> None:
        """kill -9: nothing of it runs any more when this returns."""
        (self.nodes if node in self.nodes else self.producers).remove(node)
        await asyncio.to_thread(node.kill)
        self.pen.note("killed", pid=node.pid)

    async def freeze(self, node: Node) -> None:
        """SIGSTOP: it stands still when this returns."""
        self.pen.note("frozen", pid=node.pid)
        await asyncio.to_thread(node.freeze)

    def thaw(self, node: Node) -> None:
        """SIGCONT."""
        node.thaw()
        self.pen.note("thawed", pid=node.pid)

    async def terminate(self, node: Node) -> None:
        """SIGTERM, and wait until it has ended."""
        self.nodes.remove(node)
        self.pen.note("terminated", pid=node.pid)
        code = await asyncio.to_thread(node.terminate, PATIENCE)
        self.pen.note("exited", pid=node.pid, note=str(code))

    async def produced(self) -> None:
        """Wait until the producers have done their work. Raises AssertionError if one failed."""
        for producer in self.producers:
            code = await asyncio.to_thread(producer.wait, PATIENCE)
            assert code == 0, f"a producer ended with {code}: {producer.printed()[-1000:]}"

    async def until(self, fact: Callable[[], bool], timeout: float = PATIENCE) -> None:
        """Wait until the journal, or something else that is cheap to look at, says so."""

        async def looked() -> bool:
            return fact()

        await eventually(looked, timeout)

    def printed(self) -> str:
        """What all of them had to say."""
        return "".join(node.printed() for node in self._all)

    def remove(self) -> None:
        """Leave nothing, however the run ended."""
        for node in self._all:
            node.remove()


@contextmanager
def company_on(url: str, folder: Path, **common: Option) -> Generator[Company]:
    """Processes that do not outlive the block."""
    company = Company(url, folder, **common)
    try:
        yield company
    finally:
        company.remove()
