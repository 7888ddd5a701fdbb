"""The long set: stories in turn, over both databases, several at once, each with a seed of its own.

    python tests/crash/long.py --runs 300 --tasks 1000000 --parallel 3

One line for each run. Ends with 1 if a promise was broken or a run failed, and names the command that replays it.
`--records FILE` appends what was measured (tests/records.py).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from crash import app  # noqa: E402
from crash.play import Place, Plan, Played, Story, play  # noqa: E402
from crash.stories import STORIES  # noqa: E402
from workq.testing._server import Server, launch  # noqa: E402

LONGEST = 600.0
"""Seconds after which a run is given up."""


def chosen(name: str | None) -> Iterator[tuple[str, Story]]:
    """Database and story of each run: the databases in turn, and the stories of each in turn."""
    if name is not None:
        yield from itertools.cycle([{title(*pair): pair for pair in pairs()}[name]])
    on_sqlite = itertools.cycle([pair for pair in pairs() if pair[0] == "SQLite"])
    on_postgres = itertools.cycle([pair for pair in pairs() if pair[0] == "PostgreSQL"])
    while True:
        yield next(on_sqlite)
        yield next(on_postgres)


def pairs() -> list[tuple[str, Story]]:
    return [(on, story) for story in STORIES for on in story.on]


def title(on: str, story: Story) -> str:
    return f"{on}, {story.name}"


@dataclass
class Sum:
    """Of all runs so far."""

    runs: int = 0
    tasks: int = 0
    failed: list[str] = field(default_factory=list)
    violations: Counter[str] = field(default_factory=Counter)
    late: int = 0
    """Takeovers that a stall made late."""
    times: dict[str, list[float]] = field(default_factory=dict)

    def add(self, played: Played) -> None:
        """One more run."""
        self.runs += 1
        self.tasks += played.tasks
        self.late += played.findings.counts["takeovers made late by a stall"]
        self.violations.update({promise: len(texts) for promise, texts in played.findings.violations.items()})
        for promise, seconds in played.findings.times.items():
            self.times.setdefault(promise, []).extend(seconds)

    def told(self, took: float) -> str:
        """In a few lines."""
        lines = [f"{self.runs} runs, {self.tasks} tasks, {took / 60:.1f} minutes, {len(self.failed)} failed runs"]
        for promise, number in self.violations.items():
            ordered = sorted(self.times.get(promise, []))
            times = ""
            if ordered:
                middle, high = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
                times = f"; {len(ordered)} times, p50 {middle:.2f} s, p99 {high:.2f} s, max {ordered[-1]:.2f} s"
            if promise == "takeover" and self.late:
                times += f"; {self.late} later than lease + poll_interval + 1 s, after a stall"
            lines.append(f"  {promise}: {number} violations{times}")
        return "\n".join([*lines, *(f"replay: {command}" for command in self.failed)])


class Lane:
    """Plays one run after the other, on a server and in a folder of its own."""

    def __init__(self, args: argparse.Namespace, root: Path) -> None:
        self._args = args
        self._root = root
        self._server: Server | None = None

    async def run(self, number: int, on: str, story: Story, sum: Sum) -> None:
        """One run. Its folder stays if something was broken."""
        args, seed = self._args, self._args.seed + number
        folder = self._root / f"{number}"
        (folder / "journal").mkdir(parents=True)
        each = args.each or -(-args.tasks // args.runs)
        command = f'python tests/crash/long.py --only "{title(on, story)}" --seed {seed} --runs 1 --each {each}'
        try:
            place = await asyncio.to_thread(self._place, on, folder, number)
            async with asyncio.timeout(LONGEST):
                played = await play(story, place, folder / "journal", seed, self._plan(each, seed))
        except Exception:
            sum.failed.append(command)
            print(f"{number:4} FAILED {title(on, story)}, in {folder}\n{traceback.format_exc()[-3000:]}", flush=True)
            return
        sum.add(played)
        worst = ", ".join(f"{name} {max(seconds):.2f} s" for name, seconds in played.findings.times.items() if seconds)
        print(
            f"{number:4} {played.took:5.1f} s {played.tasks:6} tasks  {title(on, story):55} {worst or '-'}", flush=True
        )
        if played.findings.broken:
            sum.failed.append(command)
            (folder / "printed").write_text(played.printed)
            first = "".join(f"     BROKEN {text}\n" for text in played.findings.broken[:10])
            print(f"{first}     {len(played.findings.broken)} in all, see {folder}", flush=True)
        else:
            shutil.rmtree(folder)
            if place.schema is not None:
                await app.run(place.url, f'drop schema "{place.schema}" cascade')

    def _place(self, on: str, folder: Path, number: int) -> Place:
        if on == "SQLite":
            return Place(f"sqlite:///{folder}/test.db")
        if self._server is None:
            self._server = launch(options={"synchronous_commit": "on"})
        self._server.start()
        return Place(self._server.url, f"r{number}", self._server)

    def _plan(self, tasks: int, seed: int) -> Plan:
        return Plan(tasks=tasks, seconds=self._args.seconds * Random(seed).uniform(0.8, 1.2))

    def close(self) -> None:
        if self._server is not None:
            self._server.remove()


async def main(args: argparse.Namespace) -> int:
    began, sum = time.monotonic(), Sum()
    runs = zip(range(args.runs), chosen(args.only), strict=False)

    async def work(lane: Lane) -> None:
        for number, (on, story) in runs:
            late = args.minutes is not None and time.monotonic() - began > args.minutes * 60
            if late or (sum.failed and not args.go_on):
                return
            await lane.run(number, on, story, sum)

    root = Path(tempfile.mkdtemp(prefix="workq-crash-"))
    lanes = [Lane(args, root) for _ in range(min(args.parallel, args.runs))]
    try:
        async with asyncio.TaskGroup() as group:
            for lane in lanes:
                group.create_task(work(lane))
    finally:
        for lane in lanes:
            await asyncio.to_thread(lane.close)
        with suppress(OSError):  # what was broken lies there
            os.rmdir(root)
    print(sum.told(time.monotonic() - began))
    return 1 if sum.failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--tasks", type=int, default=1_000_000, help="in all runs together")
    parser.add_argument("--each", type=int, help="tasks of each run, instead")
    parser.add_argument("--parallel", type=int, default=3, help="runs at the same time")
    parser.add_argument("--minutes", type=float, help="begin no run after so many")
    parser.add_argument("--seconds", type=float, default=9, help="that the producers of a run take, about")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next one has the next")
    parser.add_argument(
        "--only",
        choices=[title(*pair) for pair in pairs()],
        metavar="NAME",
        help="one story on one database, as the lines name it",
    )
    parser.add_argument("--records", type=Path, help="append what was measured to this file")
    parser.add_argument("--go-on", action="store_true", help="begin new runs after one that broke a promise, too")
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    if given.records:
        os.environ["WORKQ_RECORDS"] = str(given.records)
    sys.exit(asyncio.run(main(given)))
