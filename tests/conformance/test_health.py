"""health(): what a readiness probe sees of an executor, in every state and from every loop."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

import pytest

import workq
from support import SOON, Database, Runs, Wire, eventually, wired_queue
from workq import _life
from workq.dialect import Interrupted, Rows, Statement, Unreachable

QUICK: dict[str, Any] = {"poll_interval": 0.05, "stop_timeout": 5}


def holding(runs: Runs) -> workq.Handler[int, Any]:
    @workq.handler("held")
    async def hold(task: workq.Task[int]) -> None:
        await runs.hold(task.payload)

    return hold


class Cut:
    """Statements whose replies do not come any more, until it is mended."""

    def __init__(self, wire: Wire, *statements: Statement, error: type[Exception] = Interrupted) -> None:
        self._wire = wire
        self._statements = statements
        self._error = error
        self.times = 0

    async def __call__(self, rows: Rows) -> Rows:
        self.times += 1
        raise self._error("cut by the test")

    def __enter__(self) -> Cut:
        self._wire.replies.update(dict.fromkeys(self._statements, self))
        return self

    def __exit__(self, *exc_info: object) -> None:
        for statement in self._statements:
            del self._wire.replies[statement]


async def until(executor: workq.Executor, **expected: object) -> workq.Health:
    """Wait until health() says so."""

    async def says() -> bool:
        health = executor.health()
        return all(getattr(health, name) == value for name, value in expected.items())

    try:
        await eventually(says)
    except TimeoutError:
        raise AssertionError(executor.health()) from None
    return executor.health()


async def claimed(executor: workq.Executor) -> workq.Health:
    """Once it has claimed."""

    async def has() -> bool:
        return executor.health().claimed_at is not None

    await eventually(has)
    return executor.health()


def nothing_yet(health: workq.Health) -> bool:
    times = (health.claimed_at, health.beat_at, health.finished_at, health.claimed_ago, health.beat_ago)
    return set(times) == {None} and health.finished_ago is None and (health.running, health.held) == (0, 0)


async def test_an_executor_that_was_not_started_is_not_ready(queue: workq.Queue) -> None:
    health = workq.Executor(queue, [holding(Runs())], **QUICK).health()
    assert (health.ok, health.phase, health.reachable) == (False, "new", None)
    assert (health.answered_at, health.answered_ago) == (None, None)
    assert nothing_yet(health)


async def test_one_that_starts_is_not_ready_until_it_has_started(database: Database) -> None:
    async with wired_queue(database) as (wire, queue):
        came, go = asyncio.Event(), asyncio.Event()

        async def late(rows: Rows) -> Rows:
            came.set()
            await go.wait()
            return rows

        wire.replies[wire.sql.read_version] = late
        executor = workq.Executor(queue, [holding(Runs())], **QUICK)
        starting = asyncio.create_task(executor.start())
        await came.wait()
        health = executor.health()
        assert (health.ok, health.phase, health.reachable) == (False, "starting", True)
        assert nothing_yet(health)
        go.set()
        await starting
        assert executor.health().phase == "running"
        assert executor.health().ok
        await executor.stop()


async def test_one_that_could_not_start_is_stopped(database: Database) -> None:
    async with database.open() as db:
        executor = workq.Executor(workq.Queue(db), [holding(Runs())], **QUICK)
        with pytest.raises(workq.SchemaError):
            await executor.start()
        health = executor.health()
        assert (health.ok, health.phase, health.reachable) == (False, "stopped", True)
        assert nothing_yet(health)


async def test_an_idle_one_claims_again_and_again_and_holds_nothing(queue: workq.Queue) -> None:
    before = datetime.now(UTC)
    async with workq.Executor(queue, [holding(Runs())], **QUICK) as executor:
        first = await claimed(executor)
        assert (first.ok, first.phase, first.reachable) == (True, "running", True)

        async def claims_again() -> bool:
            return executor.health().claimed_at != first.claimed_at

        await eventually(claims_again)
        health = executor.health()
        assert health.claimed_at is not None
        assert health.answered_at is not None
        assert before <= health.claimed_at <= datetime.now(UTC)
        assert before <= health.answered_at <= datetime.now(UTC)
        assert health.claimed_ago is not None
        assert 0 <= health.claimed_ago < SOON
        assert (health.running, health.held, health.finished_at, health.finished_ago) == (0, 0, None, None)


async def test_a_busy_one_is_ready_though_it_claims_nothing_for_long(queue: workq.Queue) -> None:
    """Its heartbeats show that the database answers. A task that waits for a place is held, and does not run."""
    runs = Runs()
    async with workq.Executor(queue, [holding(runs)], workers=2, lease=0.6, claim_ahead=False, **QUICK) as executor:
        await queue.enqueue_many(None, [workq.NewTask("held", n) for n in range(3)])
        await runs.until(lambda: len(runs.running) == 2)
        full = await until(executor, running=2, held=2)
        assert full.claimed_ago is not None

        async def beaten_twice() -> bool:
            beat = executor.health().beat_at
            return beat is not None and full.claimed_at is not None and (beat - full.claimed_at).total_seconds() > 0.4

        await eventually(beaten_twice)
        health = executor.health()
        assert (health.ok, health.reachable, health.running, health.held) == (True, True, 2, 2)
        assert health.claimed_at == full.claimed_at
        assert health.claimed_ago is not None
        assert health.claimed_ago > full.claimed_ago
        assert health.beat_ago is not None
        assert health.beat_ago < health.claimed_ago
        runs.go.set()
        await queue.wait(timeout=SOON)
        health = await until(executor, running=0, held=0)
        assert health.finished_at is not None
        assert health.finished_ago is not None
        assert 0 <= health.finished_ago < SOON


async def test_what_has_ended_and_is_not_yet_written_is_held(database: Database) -> None:
    async with wired_queue(database) as (wire, queue):
        runs = Runs()
        runs.go.set()
        async with workq.Executor(queue, [holding(runs)], **QUICK) as executor:
            with Cut(wire, wire.sql.succeed, wire.sql.look) as cut:
                await queue.enqueue(None, "held", 1)

                async def tried() -> bool:
                    return cut.times > 0

                await eventually(tried)
                health = executor.health()
                assert (health.running, health.held, health.finished_at) == (0, 1, None)
            await queue.wait(timeout=SOON)
            assert executor.health().held == 0


async def test_one_that_stops_is_not_ready_any_more_and_then_is_stopped(queue: workq.Queue) -> None:
    runs = Runs()
    executor = workq.Executor(queue, [holding(runs)], **QUICK)
    await executor.start()
    await queue.enqueue(None, "held", 1)
    await runs.until(lambda: bool(runs.running))
    stopping = asyncio.create_task(executor.stop())
    health = await until(executor, phase="stopping")
    assert (health.ok, health.running, health.held, health.reachable) == (False, 1, 1, True)
    runs.go.set()
    await stopping
    health = executor.health()
    assert (health.ok, health.phase, health.running, health.held) == (False, "stopped", 0, 0)
    assert health.finished_at is not None


@pytest.mark.parametrize("error", [Interrupted, Unreachable])
async def test_a_database_that_does_not_answer_is_unreachable_at_once_and_unready_after_a_while(
    database: Database, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """F18: and ready again when it is back, without a restart."""
    monkeypatch.setattr(_life, "MAY_FAIL", 0.5)
    async with wired_queue(database) as (wire, queue), workq.Executor(queue, [holding(Runs())], **QUICK) as executor:
        await until(executor, ok=True, reachable=True)
        with Cut(wire, wire.sql.claim, error=error):
            began = time.monotonic()
            gone = await until(executor, reachable=False)
            if time.monotonic() - began < 0.4:
                assert gone.ok
            health = await until(executor, ok=False)
            assert time.monotonic() - began > 0.4
            assert (health.phase, health.reachable, health.claimed_at) == ("running", False, gone.claimed_at)
            assert health.answered_at == gone.answered_at
            assert health.answered_ago is not None
            assert health.answered_ago > 0.4
        health = await until(executor, ok=True, reachable=True)
        assert health.claimed_at != gone.claimed_at


async def test_a_database_that_refuses_a_statement_answers_all_the_same(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop fails, and that makes the executor unready; the network is not to blame."""
    monkeypatch.setattr(_life, "MAY_FAIL", 0.2)
    async with wired_queue(database) as (wire, queue), workq.Executor(queue, [holding(Runs())], **QUICK) as executor:
        with Cut(wire, wire.sql.claim, error=RuntimeError):
            health = await until(executor, ok=False)
            assert health.reachable
        await until(executor, ok=True)


@pytest.mark.parametrize("loop", ["beats", "finishes"])
async def test_every_loop_counts(database: Database, monkeypatch: pytest.MonkeyPatch, loop: str) -> None:
    """Heartbeats for a lease, finishes like claims."""
    monkeypatch.setattr(_life, "MAY_FAIL", 0.3)
    async with wired_queue(database) as (wire, queue):
        runs = Runs()
        async with workq.Executor(queue, [holding(runs)], lease=0.9, **QUICK) as executor:
            await queue.enqueue(None, "held", 1)
            await runs.until(lambda: bool(runs.running))
            cut = [wire.sql.extend] if loop == "beats" else [wire.sql.succeed, wire.sql.look]
            with Cut(wire, *cut):
                if loop == "finishes":
                    runs.go.set()
                health = await until(executor, ok=False, held=1)
                assert health.claimed_ago is not None
            await until(executor, ok=True)
            runs.go.set()
            await queue.wait(timeout=SOON)


async def test_a_jump_of_the_wall_clock_makes_nobody_unready(
    queue: workq.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F47: ages are measured by a clock that does not jump."""
    async with workq.Executor(queue, [holding(Runs())], poll_interval=600, stop_timeout=5) as executor:
        await claimed(executor)
        real = time.time()
        monkeypatch.setattr(time, "time", lambda: real + 86_400)
        health = executor.health()
        assert health.ok
        assert health.claimed_ago is not None
        assert health.claimed_ago < 60
        monkeypatch.undo()
