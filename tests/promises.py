"""The README's tables of promises, made of what the fault runs measured (tests/measured/).

python tests/promises.py            # prints them
python tests/promises.py --write    # puts them into the README
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).parent))

from records import PROMISES, TIMED  # noqa: E402

Line: TypeAlias = dict[str, Any]

MEASURED = Path(__file__).with_name("measured")
README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- measured: python tests/promises.py --write -->", "<!-- end of measured -->"
NOT_MEASURED = "not measured"
LIMITS = {
    "no loss": "no task",
    "no trace": "no task",
    "fence": "no result",
    "one holder": "no start",
    "takeover": "lease + poll_interval + 1 s; in these runs 2.7 s",
    "one schedule": "one row, no run twice",
    "clean stop": "timeout + 1 s; in these runs 2 s",
    "back again": "5 s; 10 s after a promotion",
    "same value": "no payload",
    "isolation": "no task",
}
"""What each may be broken by, or how long it may take."""


def lines(folder: Path = MEASURED) -> list[Line]:
    """All that was recorded."""
    return [json.loads(text) for path in sorted(folder.glob("*.jsonl")) for text in path.read_text().splitlines()]


def table(found: Iterable[Line]) -> list[str]:
    """One row for each promise."""
    rows = [
        "| promise | limit | real processes | stories simulated | model, permutations | broken | p50 / p99 / max |",
        "|---|---|---|---|---|---|---|",
    ]
    checked = list(found)
    for promise in PROMISES:
        mine = [line for line in checked if promise in line["violations"]]
        broken = sum(line["violations"][promise] for line in mine)
        times = [
            seconds for line in mine if line["instrument"] == "crash" for seconds in line["times"].get(promise, ())
        ]
        rows.append(
            f"| {promise} | {LIMITS[promise]} | {amount(promise, mine, 'crash')} | "
            f"{amount(promise, mine, 'simulator')} | {amount(promise, mine, 'model', 'permutations')} | "
            f"{broken if mine else NOT_MEASURED} | {spread(promise, times)} |"
        )
    return rows


def stories(found: Iterable[Line]) -> list[str]:
    """One row for each way in which real processes, networks and servers were broken."""
    rows = [
        "| what was done | database | runs | tasks | broken | takeovers: number, max | back again: number, max |",
        "|---|---|---|---|---|---|---|",
    ]
    of: defaultdict[str, list[Line]] = defaultdict(list)
    for line in found:
        if line["instrument"] == "crash":
            of[line["story"]].append(line)
    for story, told in sorted(of.items()):
        databases = ", ".join(sorted({line["database"].split(".")[0] for line in told}))
        rows.append(
            f"| {story} | {databases} | {sum(line['runs'] for line in told):,} | "
            f"{sum(line['tasks'] for line in told):,} | {sum(sum(line['violations'].values()) for line in told)} | "
            f"{longest(told, 'takeover')} | {longest(told, 'back again')} |"
        )
    return rows


def amount(promise: str, found: Sequence[Line], *instruments: str) -> str:
    """In how many runs there was something to see of it, and of how many tasks."""
    mine = [line for line in found if line["instrument"] in instruments]
    if promise in TIMED:
        return f"{sum(line['observed'].get(promise, 0) for line in mine):,}" if mine else NOT_MEASURED
    if not mine:
        return NOT_MEASURED
    return f"{sum(line['runs'] for line in mine):,} ({sum(line['tasks'] for line in mine):,} tasks)"


def longest(found: Sequence[Line], promise: str) -> str:
    """Number and maximum of a time."""
    times = [seconds for line in found for seconds in line["times"].get(promise, ())]
    return f"{len(times)}, {max(times):.2f} s" if times else ""


def spread(promise: str, times: Sequence[float]) -> str:
    """The usual, the unusual and the worst."""
    if not times:
        return NOT_MEASURED if promise in TIMED else ""
    ordered = sorted(times)
    p50, p99 = (ordered[min(int(len(ordered) * part), len(ordered) - 1)] for part in (0.5, 0.99))
    return f"{p50:.2f} / {p99:.2f} / {ordered[-1]:.2f} s ({len(ordered)})"


def machine(found: Sequence[Line]) -> str:
    """Where and when it was measured."""
    pythons = ", ".join(sorted({line["python"] for line in found}))
    databases = "; ".join(sorted({line["database"] for line in found if line["instrument"] == "crash"}))
    cores = ", ".join(f"{cores} cores" for cores in sorted({line["cores"] for line in found}))
    last = max((line["at"] for line in found), default="")[:10]
    took = Counter[str]()
    for line in found:
        took[line["instrument"]] += line["took"]
    hours = ", ".join(f"{name} {seconds / 3600:.1f} h" for name, seconds in sorted(took.items()))
    return (
        f"Until {last}, with Python {pythons} on {cores}. Databases of the real processes: {databases}. "
        f"Time of all runs, some of which ran side by side: {hours}."
    )


def text(found: Sequence[Line]) -> str:
    """What belongs between the README's two marks."""
    if not found:
        return "\n".join(table(found))
    return "\n".join([*table(found), "", *stories(found), "", machine(found)])


def written(readme: str, found: Sequence[Line]) -> str:
    """The README with the tables in it."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{text(found)}\n\n{END}{after}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into the README")
    if parser.parse_args().write:
        README.write_text(written(README.read_text(), lines()))
    else:
        print(text(lines()))
