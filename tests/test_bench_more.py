"""The benchmarks of latency, backlog, memory and fairness run, and print JSON. Their figures are not judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

from servers import Servers

BENCH = Path(__file__).parents[1] / "bench"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="clocks that processes share, and /proc")


@pytest_asyncio.fixture
async def database(servers: Servers) -> AsyncGenerator[str]:
    """An empty one of its own: the benchmarks make their table in the schema public."""
    url = servers.url("wheel")
    name = f"bench_{os.getpid()}"
    conn = await asyncpg.connect(url)
    await conn.execute(f"create database {name}")
    yield url.removesuffix("postgres") + name
    await conn.execute(f"drop database {name} with (force)")
    await conn.close()


def printed(database: str, script: str, *flags: str) -> dict[str, Any]:
    """What it prints for both databases. It must end well, and be quiet on stderr."""
    ended = subprocess.run(
        [sys.executable, BENCH / f"{script}.py", "--json", *flags],
        env=os.environ | {"WORKQ_BENCH_POSTGRES_DSN": database},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stderr == ""
    assert ended.returncode == 0
    found: dict[str, Any] = json.loads(ended.stdout)
    assert list(found) == ["postgres", "sqlite"]
    assert all("cores" in one["machine"] for one in found.values())
    return found


def test_latency(database: str) -> None:
    tiny = ["--samples", "3", "--idle", "0.5", "--seconds", "0.2", "--producers", "4", "--rounds", "1"]
    for one in printed(database, "latency", *tiny).values():
        assert [row["samples"] for row in one["pick_up_ms"]] == [3] * 4
        assert all(0 < row["p50"] <= row["p99"] <= row["max"] for row in one["pick_up_ms"])
        assert one["idle"]["core"] >= 0
        assert [row["ratio"] > 0 for row in one["wake_ups"]] == [True, True]


def test_backlog(database: str) -> None:
    found = printed(database, "backlog", "--rows", "2000")
    cases = {kind: [(row["case"], row["page"]) for row in one["claims"]] for kind, one in found.items()}
    assert cases["sqlite"] == [case for case in cases["postgres"] if "dead" not in case[0]]
    assert all(row["ms"] > 0 and row["claims"] > 0 for one in found.values() for row in one["claims"])


def test_memory(database: str) -> None:
    for one in printed(database, "memory", "--tasks", "200").values():
        assert [look["tasks"] for look in one["looks"]] == [0, 10, 200]
        assert one["looks"][1]["threads"] == one["looks"][2]["threads"]


def test_fairness(database: str) -> None:
    for one in printed(database, "fairness", "--tasks", "8", "--seconds", "0.1", "--quick", "20").values():
        for row in one["shared"]:
            assert row["total"] >= row["ideal"] * 0.9
            assert row["most_runs_of_a_task"] == 1
