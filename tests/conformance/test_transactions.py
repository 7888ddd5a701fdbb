"""no trace: what is done in a transaction exists if and only if that commits, savepoints included."""

from __future__ import annotations

import workq
from support import Database

NOTE = workq.Spec("note", str)


async def test_an_enqueue_that_rolls_back_leaves_no_trace(database: Database, queue: workq.Queue) -> None:
    async with database.caller() as app:
        id = await queue.enqueue(app.tx, NOTE, "never")
        assert id is not None
        await app.rollback()
    assert await queue.find() == []


async def test_an_enqueue_is_seen_by_nobody_before_the_commit(database: Database, queue: workq.Queue) -> None:
    async with database.caller() as app:
        id = await queue.enqueue(app.tx, NOTE, "soon")
        assert id is not None
        assert await queue.get(id) is None
        seen = await queue.get(id, tx=app.tx)
        assert seen is not None
        assert seen.state == "waiting"
        await app.commit()
        row = await queue.get(id)
        assert row is not None
        assert row.payload == "soon"


async def test_a_savepoint_that_rolls_back_leaves_no_trace(database: Database, queue: workq.Queue) -> None:
    async with database.caller() as app:
        kept = await queue.enqueue(app.tx, NOTE, "kept")
        await app.execute("savepoint s")
        await queue.enqueue(app.tx, NOTE, "undone")
        await app.execute("rollback to savepoint s")
        await app.commit()
    assert [row.id for row in await queue.find()] == [kept]
