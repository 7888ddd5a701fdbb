"""A node: an executor in a process of its own, that a benchmark asks what its tasks did and what it costs.

Run as a program it is the node; the benchmark speaks with it by lines of JSON on its standard input and output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import workq
from common import run
from work import PATIENCE, Log, until

LONGEST_LINE = 1 << 26


class Node:
    """The other process, as the benchmark holds it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid: int = process.pid

    async def ask(self, question: str) -> Any:
        """Its answer. Raises RuntimeError if it has died."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{question}\n".encode())
        return await self.answer()

    async def answer(self) -> Any:
        """The next line that it says."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), PATIENCE)
        if not line:
            raise RuntimeError("a node has died")
        return json.loads(line)

    async def until_done(self, number: int, patience: float = PATIENCE) -> None:
        """Wait until it has run so many tasks. Raises TimeoutError."""

        async def reached() -> bool:
            done: int = await self.ask("done")
            return done >= number

        await until(reached, patience)


@asynccontextmanager
async def node(url: str, *flags: str) -> AsyncGenerator[Node]:
    """Start one, wait until its executor runs, and end it afterwards. `flags` are those of this program."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__)),
        url,
        *flags,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LONGEST_LINE,
    )
    assert process.stdin is not None
    try:
        started = Node(process)
        await started.answer()
        yield started
    finally:
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), PATIENCE)
        except TimeoutError:
            process.kill()
            await process.wait()


# -- inside the other process


async def lines() -> AsyncGenerator[str]:
    """Those on the standard input, without a thread."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        while line := await reader.readline():
            yield line.decode().strip()
    finally:
        transport.close()


def say(value: object) -> None:
    """One line on the standard output."""
    print(json.dumps(value), flush=True)


async def live(options: argparse.Namespace) -> None:
    """Run an executor until the standard input ends."""
    log = Log(keeps=options.keep)
    async with workq.connect(options.url) as db:
        queue = workq.Queue(log.watched(db, wake_ups=not options.deaf))
        async with workq.Executor(queue, [log.handler(options.queue)], workers=options.workers, stop_timeout=5):
            say("running")
            async for question in lines():
                say(log.answer(question))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--queue", default="")
    parser.add_argument("--keep", action="store_true", help="remember what each task did")
    parser.add_argument("--deaf", action="store_true", help="without wake-ups")
    options = parser.parse_args()
    run(lambda: live(options))


if __name__ == "__main__":
    main()
