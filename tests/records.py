"""What a fault run measured: one line of JSON for each, from which the README's table of promises is made.

A run writes its line where WORKQ_RECORDS names a file, and nowhere else. The committed lines are in tests/measured/.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

PROMISES: tuple[str, ...] = (
    "no loss",
    "no trace",
    "fence",
    "one holder",
    "takeover",
    "one schedule",
    "clean stop",
    "back again",
    "same value",
    "isolation",
)
TIMED = ("takeover", "clean stop", "back again")
"""Those that have a bound: a run says something of them only where there was something to take the time of."""
SAMPLES = 200
"""Times kept of one run: evenly spread over the sorted ones, the largest among them."""


def record(
    instrument: str,
    database: str,
    story: str,
    *,
    tasks: int,
    took: float,
    violations: Mapping[str, int],
    times: Mapping[str, Sequence[float]] | None = None,
    observed: Mapping[str, int] | None = None,
    runs: int = 1,
    seed: int | None = None,
) -> None:
    """Append one line.

    instrument: "crash", "simulator", "model", ... database: "SQLite 3.40.1", "PostgreSQL 15.18", with "pgbouncer" and
    the like. story: the fault, in words. tasks: how many were enqueued. took: seconds in all. violations: for each
    promise that was checked, how often it was broken. times: seconds, for promises that have a bound. observed: in how
    many of the runs there was something to take the time of; without it, in all of them or none, as `times` says.
    """
    path = os.environ.get("WORKQ_RECORDS")
    if not path:
        return
    unknown = {*violations, *(times or ())} - {*PROMISES}
    if unknown:
        raise ValueError(f"no such promise: {', '.join(sorted(unknown))}")
    line = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "instrument": instrument,
        "database": database,
        "story": story,
        "runs": runs,
        "seed": seed,
        "tasks": tasks,
        "took": round(took, 3),
        "violations": dict(violations),
        "observed": dict(observed or {promise: runs if seconds else 0 for promise, seconds in (times or {}).items()}),
        "times": {promise: sampled(seconds) for promise, seconds in (times or {}).items()},
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    with open(path, "a", encoding="utf-8") as file:  # one write of one line: processes may share the file
        file.write(json.dumps(line) + "\n")


def sampled(seconds: Sequence[float]) -> list[float]:
    """At most SAMPLES of them, sorted, with the smallest and the largest."""
    ordered = sorted(seconds)
    if len(ordered) > SAMPLES:
        last = len(ordered) - 1
        ordered = [ordered[round(at * last / (SAMPLES - 1))] for at in range(SAMPLES)]
    return [round(value, 3) for value in ordered]
