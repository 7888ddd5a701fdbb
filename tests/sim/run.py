"""Plays stories by the thousand, or one again.

    python tests/sim/run.py --seeds 10000 --jobs 2       # prints what was broken, and ends with 1 if anything was
    python tests/sim/run.py --seed 161                   # one, with what happened in it

WORKQ_RECORDS=file appends what the README's table of promises is made of.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from records import PROMISES, record
from sim.story import Result, play
from sim.trace import traced

CHUNK = 25


def chunk(seeds: range) -> list[Result]:
    """Some stories, in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        return [play(seed, Path(folder)) for seed in seeds]


def all_of(first: int, number: int, jobs: int) -> Iterator[Result]:
    """The stories of so many seeds."""
    chunks = [range(at, min(at + CHUNK, first + number)) for at in range(first, first + number, CHUNK)]
    with ProcessPoolExecutor(jobs) as pool:
        for results in pool.map(chunk, chunks):
            yield from results


def seen(result: Result) -> list[str]:
    """The promises with a bound that the story says something of."""
    of = {"takeover": result.takeovers, "clean stop": result.stops, "back again": result.outages}
    return [promise for promise, what in of.items() if what]


def main(args: argparse.Namespace) -> int:
    if args.seed is not None:
        with tempfile.TemporaryDirectory() as folder:
            result = traced(args.seed, Path(folder), args.since, args.until, set(args.task))
        for promise, text in result.violations:
            print(f"BROKEN {promise}: {text}")
        return 1 if result.violations else 0
    began, broken, tasks, runs, statements, seconds = time.monotonic(), 0, 0, 0, 0, 0.0
    counts = dict.fromkeys(PROMISES, 0)
    takeovers: list[float] = []
    stops: list[float] = []
    observed = Counter[str]()
    for result in all_of(args.first, args.seeds, args.jobs):
        tasks, runs, statements = tasks + result.tasks, runs + result.runs, statements + result.statements
        seconds += result.seconds
        takeovers += result.takeovers
        stops += result.stops
        observed.update(seen(result))
        broken += bool(result.violations)
        for promise, text in result.violations:
            counts[promise] += 1
            print(f"seed {result.seed} ({result.kind}: {result.title}): {promise}: {text[:500]}", flush=True)
    took = time.monotonic() - began
    record(
        "simulator",
        "simulated",
        "everything",
        runs=args.seeds,
        tasks=tasks,
        took=took,
        violations=counts,
        times={"takeover": takeovers, "clean stop": stops},
        observed=observed,
        seed=args.first,
    )
    print(
        f"{args.seeds} stories in {took:.0f} s ({seconds / 3600:.1f} hours of theirs): {tasks} tasks, {runs} runs, "
        f"{statements} statements, {len(takeovers)} takeovers of dead nodes; {broken} stories broke a promise"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seed", type=int, help="play this one, and print it")
    parser.add_argument("--since", type=float, default=0.0, help="print from this second of the story")
    parser.add_argument("--until", type=float, default=1e9, help="print to this second")
    parser.add_argument("--task", type=int, action="append", default=[], help="print only what concerns this task")
    sys.exit(main(parser.parse_args()))
