"""SQLite's files as a crash leaves them: copied in the middle of writing, and with the end of the log cut off.

With `synchronous=NORMAL` a power failure may take the last commits with it; that is documented. What is promised is
that the rest is a whole: the commits up to some moment and none after it, each one altogether or not at all.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import NamedTuple

import pytest

from crash import till
from faults.nodes import ENVIRONMENT, Journal, Node
from records import record
from support import SOON

TILL = Path(till.__file__)
HEADER, FRAME = 32, 24
"""Bytes of the log's header, and of a frame's before its page."""


class Image(NamedTuple):
    """What is in a copy."""

    orders: list[int]
    payments: list[int]
    tasks: list[int]
    failed: int
    integrity: str

    def half(self) -> int:
        """Orders that are not just once either waiting or paid, and tasks and payments without an order."""
        ended = Counter([*self.payments, *self.tasks])
        return len(ended.keys() ^ set(self.orders)) + sum(times != 1 for times in ended.values())

    def gaps(self) -> int:
        """Orders that are missing although a later one of their producer is there."""
        last: dict[int, int] = {}
        for number in self.orders:
            producer = number // till.FROM_EACH
            last[producer] = max(last.get(producer, 0), number % till.FROM_EACH)
        return sum(number + 1 for number in last.values()) - len(self.orders)


def look(path: Path) -> Image:
    """Open a copy as SQLite does after a crash."""
    with closing(sqlite3.connect(path)) as conn:

        def numbers(sql: str) -> list[int]:
            return [int(value) for (value,) in conn.execute(sql)]

        ((integrity,),) = conn.execute("pragma integrity_check").fetchall()
        failed = numbers("select count(*) from workq where failed_at is not null")[0]
        ordered = numbers("select number from orders"), numbers("select number from payments")
        return Image(*ordered, numbers("select payload from workq"), failed, integrity)


def begun(path: Path, journal: Path, output: Path) -> Node:
    """The program, started."""
    environment = ENVIRONMENT | {"PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}:{TILL.parents[1]}"}
    with output.open("wb") as file:
        return Node(subprocess.Popen([sys.executable, TILL, path, journal], env=environment, stderr=file), output)


@asynccontextmanager
async def at_the_till(folder: Path) -> AsyncGenerator[tuple[Node, Path, Journal]]:
    """The program, running."""
    path, journal = folder / "till.db", Journal(folder / "journal")
    node = begun(path, journal.path, folder / "output")
    try:
        await journal.until("ready", 1)
        yield node, path, journal
    finally:
        node.remove()
    assert (folder / "output").read_text() == ""


def copied(path: Path, folder: Path) -> Path:
    """The files of a process that stands still; the index in shared memory is not one that survives."""
    folder.mkdir()
    for suffix in ("", "-wal", "-shm"):
        shutil.copyfile(f"{path}{suffix}", folder / f"image.db{suffix}")
    return folder / "image.db"


def cut(image: Path, rng: random.Random, *, torn: bool) -> None:
    """Take the end of the log away, at any byte; or leave its length, as where blocks were not written (`torn`).

    Not what a checkpoint has begun to copy: the log is flushed before that, with `synchronous=NORMAL` too.
    """
    index, log = Path(f"{image}-shm").read_bytes(), Path(f"{image}-wal")
    frames, page = struct.unpack_from("=I", index, 16)[0], struct.unpack_from("=H", index, 14)[0]
    backfilled = struct.unpack_from("=I", index, 128)[0]  # nBackfillAttempted of the first copy of WalCkptInfo
    size = FRAME + (65536 if page == 1 else page)
    whole = log.read_bytes()
    at = rng.randint(HEADER + backfilled * size, HEADER + frames * size)
    log.write_bytes(whole[:at] + bytes(len(whole) - at) * torn)


async def settle(image: Path) -> Image:
    """Open a copy with workq, and have it run what is left."""
    async with till.opened(image) as (queue, executor), executor:
        await queue.wait(timeout=3 * SOON)
    return look(image)


IMAGES = pytest.mark.parametrize(
    "images", [6, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])], ids=["6", "60"]
)


async def judged(story: str, images: dict[Path, tuple[Image, set[int]]], began: float) -> None:
    """Open each with workq, and compare what was there, and what becomes of it, with what was acknowledged."""
    ended = {path: await settle(path) for path in images}
    violations: Counter[str] = Counter({"no loss": 0, "no trace": 0, "fence": 0})
    for path, (found, acknowledged) in images.items():
        after = ended[path]
        assert found.integrity == after.integrity == "ok"
        violations["no loss"] += len(acknowledged - set(found.orders)) + found.gaps() + found.failed + after.failed
        violations["no loss"] += len(set(after.orders) - set(after.payments)) + len(after.tasks)
        violations["no trace"] += found.half()
        violations["fence"] += len(after.payments) - len(set(after.payments))
    record(
        "crash",
        f"SQLite {sqlite3.sqlite_version}",
        story,
        tasks=sum(len(found.orders) for found, _ in images.values()),
        took=time.monotonic() - began,
        runs=len(images),
        violations=violations,
    )
    assert violations == dict.fromkeys(violations, 0)
    assert len({len(found.orders) for found, _ in images.values()}) > 1
    assert any(found.tasks for found, _ in images.values())


@IMAGES
async def test_a_copy_of_the_files_in_mid_writing_has_every_acknowledged_task(tmp_path: Path, images: int) -> None:
    """no loss, no trace: the process stands still at any moment, in a transaction or a checkpoint; it is killed."""
    began, found = time.monotonic(), dict[Path, tuple[Image, set[int]]]()
    async with at_the_till(tmp_path) as (node, path, journal):
        for number in range(images):
            await journal.until("acked", 20 * (number + 1))
            await asyncio.sleep(random.uniform(0, 0.1))
            await asyncio.to_thread(node.kill if number == images - 1 else node.freeze)
            image = copied(path, tmp_path / f"image-{number}")
            acknowledged = set(journal.times("acked"))
            node.thaw()
            found[image] = look(image), acknowledged
    await judged("files copied in mid-WAL", found, began)


@IMAGES
async def test_a_log_that_is_cut_anywhere_leaves_whole_transactions_up_to_some_moment(
    tmp_path: Path, images: int
) -> None:
    """no trace: nobody's row without its task, no task without its row, and what is left runs, once."""
    began, found, rng = time.monotonic(), dict[Path, tuple[Image, set[int]]](), random.Random(images)
    shorter = 0
    async with at_the_till(tmp_path) as (node, path, journal):
        for number in range(images):
            await journal.until("acked", 20 * (number + 1))
            await asyncio.sleep(rng.uniform(0, 0.1))
            await asyncio.to_thread(node.freeze)
            image = copied(path, tmp_path / f"image-{number}")
            acknowledged = set(journal.times("acked"))
            node.thaw()
            cut(image, rng, torn=number % 2 == 1)
            there = look(image)
            shorter += not acknowledged <= set(there.orders)
            found[image] = there, acknowledged & set(there.orders)
    assert shorter > 0
    await judged("files copied in mid-WAL, the log cut", found, began)
