"""How a rate is taken: p loops side by side, n times in all; the median of some runs, taken in turns."""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

TABLE = "workq_bench"
"""The table of the benchmarks; nobody's tasks are lost where they run in a database that is in use."""

PAGE = 1000
"""Rows of one multi-row statement."""

Measure: TypeAlias = Callable[[str, int, int], Awaitable[float]]
"""From a database's URL, p and n to a rate: n times, by p at once, how many of them a second."""

Figures: TypeAlias = dict[str, "Figure"]


class Figure(NamedTuple):
    """The median rate of some runs, and the runs."""

    rate: float
    n: int
    runs: list[float]


class Driver(Protocol):
    """What limits_postgres.py and limits_sqlite.py both have."""

    SINGLE: dict[str, Measure]
    MULTI: dict[str, Measure]

    async def empty(self, url: str) -> None: ...
    async def left(self, url: str) -> int: ...
    async def committed(self, url: str, p: int, n: int, write: Callable[[Any], Awaitable[object]]) -> float: ...


def rate_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of benchmarks that take rates."""
    parser.add_argument("--p", type=int, nargs="+", default=[1, 4, 16, 64], help="how many at once (1 4 16 64)")
    parser.add_argument("--tasks", type=int, help="n of every run (default: as many as the seconds allow)")
    parser.add_argument("--seconds", type=float, default=0.8, help="how long a run should take, about (0.8)")
    parser.add_argument("--repeat", type=int, default=3, help="runs, of which the median is taken (3)")


async def rate(p: int, n: int, work: Callable[[int], Awaitable[object]]) -> float:
    """How often a second p loops get `work` done, n times in all. Each loop says which one it is."""
    tickets = iter(range(n))

    async def loop(which: int) -> None:
        for _ in tickets:
            await work(which)

    gc.collect()
    since = time.perf_counter()
    async with asyncio.TaskGroup() as loops:
        for which in range(p):
            loops.create_task(loop(which))
    return n / (time.perf_counter() - since)


async def medians(measures: Mapping[str, Measure], url: str, p: int, options: argparse.Namespace) -> Figures:
    """Every measure's figure. They take turns, so that a drift of the machine meets them alike."""
    sizes = {name: await size(measure, url, p, options) for name, measure in measures.items()}
    runs: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(options.repeat):
        for name, measure in measures.items():
            runs[name].append(await measure(url, p, sizes[name]))
    return {name: Figure(statistics.median(runs[name]), sizes[name], runs[name]) for name in measures}


async def size(measure: Measure, url: str, p: int, options: argparse.Namespace) -> int:
    """The n of a measure's runs: what was asked for, or what a trial shows, which warms everything up, too."""
    if options.tasks is not None:
        return options.tasks
    trial = max(500, 20 * p)
    return fitting(await measure(url, p, trial) * options.seconds, trial)


def fitting(n: float, least: int) -> int:
    """Not so few tasks that starting counts, nor so many that they would not be there in a second."""
    return int(min(max(n, least), 100_000))


def pages(n: int) -> Sequence[int]:
    """The sizes of the statements that n rows take."""
    return [min(PAGE, n - done) for done in range(0, n, PAGE)]


def as_json(figures: Figures) -> dict[str, dict[str, object]]:
    """Figures for machines."""
    return {
        name: {"rate": round(figure.rate), "n": figure.n, "runs": [round(run) for run in figure.runs]}
        for name, figure in figures.items()
    }
