"""SQLite on a disk that is full: a clear error, nothing half stored, and work goes on when there is space again."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Generator
from contextlib import closing, suppress
from pathlib import Path

import pytest

import workq
from crash.names import name_of
from faults.flow import flow
from records import record
from support import SQLiteDatabase, eventually

BACK_AGAIN = 5.0
SIZE = 16 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path]:
    """A file system of a few megabytes, of which only root can make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "workq-test", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take all the space that is left."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


def integrity(path: Path) -> str:
    with closing(sqlite3.connect(path)) as conn:
        return str(conn.execute("pragma integrity_check").fetchone()[0])


async def test_a_full_disk_loses_nothing_and_work_goes_on_when_there_is_space_again(small_disk: Path) -> None:
    """no loss, back again (5 s): two executors and a producer; the disk is full for some seconds, three times."""
    database = SQLiteDatabase(small_disk / "test.db")
    began, resumed = time.monotonic(), list[float]()
    async with flow(database, database.url, database.url, lease=300) as tasks:
        await tasks.runs(since=0)
        for _ in range(3):
            refused = len(tasks.failures)
            ballast = await asyncio.to_thread(fill, small_disk)

            async def full(before: int = refused) -> bool:
                return len(tasks.failures) >= before + 10

            await eventually(full)
            await asyncio.sleep(1)
            ballast.unlink()
            back = time.monotonic()
            resumed.append(await tasks.runs(since=back, timeout=4 * BACK_AGAIN))
            await asyncio.sleep(0.5)
        await tasks.end()
        await eventually(tasks.healthy)
        rows = await database.rows("select id, error from {table}")
    completed = Counter(tasks.completed())
    lost = tasks.enqueued - set(completed)
    unknown = sum(isinstance(error, workq.OutcomeUnknown) for error in tasks.failures)
    unasked = max(len(set(completed) - tasks.enqueued) - unknown, 0)
    record(
        "crash",
        await name_of(database),
        "the disk is full for some seconds",
        tasks=len(tasks.enqueued),
        took=time.monotonic() - began,
        runs=len(resumed),
        violations={
            "no loss": len(lost) + len(rows),
            "no trace": unasked,
            "fence": sum(times > 1 for times in completed.values()),
            "back again": sum(seconds > BACK_AGAIN for seconds in resumed),
        },
        times={"back again": resumed},
    )
    assert rows == []
    assert lost == set()
    assert unasked == 0
    assert set(completed.values()) == {1}
    assert "database or disk is full" in {str(error) for error in tasks.failures}
    assert {type(error) for error in tasks.failures} <= {sqlite3.OperationalError, workq.OutcomeUnknown}
    assert [event for event in tasks.events if event.kind == "failed"] == []
    assert max(resumed) < BACK_AGAIN
    assert integrity(database.path) == "ok"


async def test_a_transaction_on_a_full_disk_stores_neither_the_applications_row_nor_the_task(
    small_disk: Path,
) -> None:
    """no trace: whatever the statement that did not fit, and nothing is left of it."""
    database = SQLiteDatabase(small_disk / "test.db")
    async with database.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        await database.rows("create table orders (number integer, text text)")
        kept, ballast = list[int](), small_disk / "not there yet"
        for number in range(400):
            if number == 20:
                ballast = await asyncio.to_thread(fill, small_disk)
            if number == 200:
                ballast.unlink()
            with suppress(sqlite3.OperationalError):
                async with database.caller() as app:
                    await app.execute(f"insert into orders values ({number}, '{'x' * (number * 31 % 3000)}')")
                    await queue.enqueue(app.tx, "work", number)
                    await app.commit()
                    kept.append(number)
        orders = [number for (number,) in await database.rows("select number from orders order by number")]
        tasks = sorted(row.payload for row in await queue.find(limit=1000))
    record(
        "crash",
        await name_of(database),
        "transactions on a full disk",
        tasks=len(kept),
        took=0,
        violations={"no loss": len(set(kept) ^ set(orders)), "no trace": len(set(orders) ^ set(tasks))},
    )
    assert kept == orders == tasks
    assert set(range(20)) <= set(kept)
    assert set(range(200, 400)) <= set(kept)
    assert not set(range(20, 200)) <= set(kept)
    assert integrity(database.path) == "ok"
