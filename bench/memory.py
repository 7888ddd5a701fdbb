"""What an executor's process has in memory, and how many descriptors and threads, after few tasks and after many.

The tasks are enqueued in batches by another process while the executor runs. Reads /proc, so it needs Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path
from typing import Any

import workq
from common import Kind, address, arguments, empty_queue, kinds, machine, print_result, run, table
from node import Node, node
from producers import clear
from work import WORK, Job

SMALL = 20
"""The first look comes after this part of the tasks."""
BATCH = 1_000
AHEAD = 5
"""Batches that may be waiting: the executor always has something to do, and the table stays small."""
STALLED = 60.0
"""Seconds without progress after which it is given up."""


def process(pid: int) -> dict[str, int]:
    """Resident kilobytes, open descriptors and threads of a process."""
    folder = Path("/proc", str(pid))
    status = (folder / "status").read_text()
    resident = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    assert resident is not None
    return {
        "kilobytes": int(resident[1]),
        "descriptors": len(list((folder / "fd").iterdir())),
        "threads": len(list((folder / "task").iterdir())),
    }


async def produce(queue: workq.Queue, executor: Node, already: int, until: int) -> None:
    """Enqueue in batches, not too far ahead, and wait until all has run."""
    for first in range(already, until, BATCH):
        await executor.until_done(first - AHEAD * BATCH, STALLED)
        number = min(BATCH, until - first)
        await queue.enqueue_many(None, [workq.NewTask(WORK, Job(0, 0)) for _ in range(number)])
    await executor.until_done(until, STALLED)
    await asyncio.sleep(1)  # what is to be let go is let go


async def grown(url: str, tasks: int) -> list[dict[str, int]]:
    """What the process has before the first task, after few and after all of them."""
    few = max(tasks // SMALL, 1)
    async with empty_queue(url) as queue, node(url) as executor:
        found = [{"tasks": 0, **process(executor.pid)}]
        for already, until in ((0, few), (few, tasks)):
            await produce(queue, executor, already, until)
            found.append({"tasks": until, **process(executor.pid)})
    return found


def measure(kind: Kind, options: argparse.Namespace) -> dict[str, Any]:
    """One database."""
    with address(kind) as url:
        found = run(lambda: grown(url, options.tasks))
        run(lambda: clear(url))
        _, early, late = found
        return {"machine": machine(url), "looks": found, "ratio": late["kilobytes"] / early["kilobytes"]}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tasks", type=int, default=1_000_000, help="how many the executor runs")
    options = parser.parse_args()
    results = {kind: measure(kind, options) for kind in kinds(options)}
    text = table(
        "The process of an executor of 16 workers:",
        ["database", "after tasks", "resident MB", "descriptors", "threads"],
        [
            [kind, look["tasks"], look["kilobytes"] / 1024, look["descriptors"], look["threads"]]
            for kind, found in results.items()
            for look in found["looks"]
        ],
    )
    print_result(options, dict(results), text)


if __name__ == "__main__":
    main()
