"""The benchmarks run, on every database, and say in JSON what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support import Database, PostgresDatabase

BENCH = Path(__file__).parents[1] / "bench"

SINGLE = {"round trips", "durable commits", "INSERT", "INSERT in a transaction", "per-task protocol"}
MULTI = {"multi-row INSERT", "multi-row DELETE"}


def run(script: str, database: Database, *arguments: str) -> dict[str, Any]:
    """What a benchmark prints of one database. It must end well, and be quiet on stderr."""
    kind, environment = "sqlite", dict(os.environ)
    if isinstance(database, PostgresDatabase):
        kind, environment["WORKQ_BENCH_POSTGRES_DSN"] = "postgres", database.url
    ended = subprocess.run(
        [sys.executable, BENCH / script, "--json", "--database", kind, *arguments],
        env=environment | {"PYTHONPATH": str(BENCH.parent)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stderr == ""
    assert ended.returncode == 0
    result: dict[str, Any] = json.loads(ended.stdout)
    assert list(result) == [kind]
    return result[kind]


def test_the_limits_of_the_bare_driver(database: Database) -> None:
    result = run("limits.py", database, "--tasks", "50", "--repeat", "1", "--p", "1", "3")
    assert result["machine"]["cores"]
    assert set(result["single"]) == {"1", "3"}
    for figures in result["single"].values():
        assert set(figures) == SINGLE
    assert set(result["multi"]) == MULTI
    assert all(figure["rate"] > 0 and figure["n"] == 50 for figure in result["multi"].values())


def test_the_throughput_stands_beside_the_limits(database: Database) -> None:
    result = run("throughput.py", database, "--tasks", "50", "--repeat", "1", "--p", "3")
    assert set(result["single"]["3"]) == SINGLE | {"execute", "enqueue(None)", "enqueue(tx)", "ratios"}
    assert set(result["multi"]) == MULTI | {"enqueue_many", "ratios"}
    ratios = result["single"]["3"]["ratios"] | result["multi"]["ratios"]
    assert set(ratios) == {"execute", "enqueue(None)", "enqueue(tx)", "enqueue_many"}
    assert all(ratio > 0 for ratio in ratios.values())


def test_people_get_a_table() -> None:
    printed = subprocess.check_output(
        [
            sys.executable,
            BENCH / "throughput.py",
            "--database",
            "sqlite",
            "--tasks",
            "20",
            "--repeat",
            "1",
            "--p",
            "1",
            "2",
        ],
        env=os.environ | {"PYTHONPATH": str(BENCH.parent)},
        text=True,
    )
    assert "| p = 1 | p = 2 |" in " ".join(printed.split())
    assert "| execute, ratio |" in " ".join(printed.split())
