"""Slow handlers must not suffer from claiming ahead: two nodes share tasks that take a second each.

The total time is set against the ideal, in which every worker is busy until the end. And a node should not hold tasks
that it does not run while the other has a free place. The same once more after quick tasks of the same name, from which
a node may have learned to claim ahead.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

import workq
from common import Kind, address, arguments, empty_queue, kinds, machine, print_result, run, table
from node import Node, node
from producers import clear
from work import WORK, Happened, Job, until

NODES = 2
Interval: TypeAlias = tuple[int, int]


def held_idle(log: Iterable[Happened]) -> list[Interval]:
    """When the node held a task without running it: from its claim to its start, or to its being handed back."""
    since: dict[int, int] = {}
    found: list[Interval] = []
    for what, id, at in sorted(log, key=lambda happened: happened.at):
        if what == "claimed":
            since[id] = at
        elif id in since:
            found.append((since.pop(id), at))
    return found


def free(log: Iterable[Happened], workers: int, until: int) -> Iterator[Interval]:
    """When at least one of the node's workers had nothing to do."""
    running, since = 0, 0
    for what, _, at in sorted(log, key=lambda happened: happened.at):
        if what == "started":
            running += 1
            if running == workers:
                yield since, at
        elif what == "ended":
            if running == workers:
                since = at
            running -= 1
    if running < workers:
        yield since, until


def longest_overlap(held: Iterable[Interval], others: Sequence[Interval]) -> int:
    """The longest time, without a break, that one of the first shares with one of the others."""
    return max((min(one[1], other[1]) - max(one[0], other[0]) for one in held for other in others), default=0)


def longest_withheld(logs: Sequence[Sequence[Happened]], workers: int, until: int) -> int:
    """The longest time that a node held a task it was not running while another one had a free place."""
    overlaps = [
        longest_overlap(held_idle(log), list(free(other, workers, until)))
        for log in logs
        for other in logs
        if other is not log
    ]
    return max(0, *overlaps)


def runs_of(logs: Sequence[Sequence[Happened]]) -> int:
    """The largest number of times that one task was started."""
    starts: dict[int, int] = defaultdict(int)
    for log in logs:
        for happened in log:
            starts[happened.id] += happened.what == "started"
    return max(starts.values(), default=0)


async def enqueue(queue: workq.Queue, tasks: int, seconds: float) -> None:
    """All at once."""
    await queue.enqueue_many(None, [workq.NewTask(WORK, Job(time.monotonic_ns(), seconds)) for _ in range(tasks)])


async def until_done(nodes: Sequence[Node], tasks: int, patience: float) -> None:
    """Wait until they have run so many together."""

    async def reached() -> bool:
        return sum([await one.ask("done") for one in nodes]) >= tasks

    await until(reached, patience)


async def shared(url: str, options: argparse.Namespace, quick: int) -> dict[str, float]:
    """Run the slow tasks after so many quick ones."""
    workers, tasks, seconds = options.workers, options.tasks, options.seconds
    ideal = math.ceil(tasks / (NODES * workers)) * seconds
    async with empty_queue(url) as queue, AsyncExitStack() as stack:
        flags = ["--keep", "--workers", str(workers)]
        nodes = [await stack.enter_async_context(node(url, *flags)) for _ in range(NODES)]
        await enqueue(queue, quick, 0)
        await until_done(nodes, quick, 60)
        began = time.monotonic_ns()
        await enqueue(queue, tasks, seconds)
        await until_done(nodes, quick + tasks, 3 * ideal + 10)
        logs = [[Happened(*one) for one in await node.ask("happened")] for node in nodes]
    logs = [[one for one in log if one.at >= began] for log in logs]
    ended = max(one.at for log in logs for one in log if one.what == "ended")
    total = (ended - began) / 1e9
    return {
        "quick_tasks_before": quick,
        "ideal": ideal,
        "total": total,
        "ratio": total / ideal,
        "longest_withheld": longest_withheld(logs, workers, ended) / 1e9,
        "most_runs_of_a_task": runs_of(logs),
    }


def measure(kind: Kind, options: argparse.Namespace) -> dict[str, Any]:
    """Without quick tasks before, and with them."""
    with address(kind) as url:
        found = [run(lambda quick=quick: shared(url, options, quick)) for quick in (0, options.quick)]
        run(lambda: clear(url))
        return {"machine": machine(url), "shared": found}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tasks", type=int, default=80)
    parser.add_argument("--seconds", type=float, default=1, help="that each takes")
    parser.add_argument("--workers", type=int, default=4, help="of each of the two nodes")
    parser.add_argument("--quick", type=int, default=2_000, help="tasks that take no time, before the second round")
    options = parser.parse_args()
    results = {kind: measure(kind, options) for kind in kinds(options)}
    text = table(
        f"{options.tasks} tasks of {options.seconds:g} s, two nodes of {options.workers} workers, in seconds:",
        ["database", "quick tasks before", "ideal", "total", "ratio", "held while the other was free"],
        [
            [
                kind,
                *(row[name] for name in ("quick_tasks_before", "ideal", "total", "ratio", "longest_withheld")),
            ]
            for kind, found in results.items()
            for row in found["shared"]
        ],
    )
    print_result(options, dict(results), text)


if __name__ == "__main__":
    main()
