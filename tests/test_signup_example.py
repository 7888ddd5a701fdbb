"""examples/signup: real requests to the application, and its real worker process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

import workq
from examples.signup import schema
from examples.signup.app import Queue, Session, create_app, sign_up
from examples.signup.contracts import CHARGE, CLEANUP, WELCOME, Charge
from examples.signup.worker import executors
from support import SOON, Database, PostgresDatabase, SQLiteDatabase, eventually

ROOT = Path(__file__).parents[1]


class Signup:
    """The application's database, as somebody beside it sees it."""

    def __init__(self, url: str, seen: Database) -> None:
        self.url = url
        """As SQLAlchemy spells it."""
        self._seen = seen

    async def emails(self) -> list[str]:
        return [email for (email,) in await self._seen.rows("select email from users order by email")]

    async def charged(self) -> list[tuple[int, int]]:
        rows = await self._seen.rows("select order_id, cents from charges")
        return [(order_id, cents) for order_id, cents in rows]

    async def log_in(self, *, expired: bool) -> None:
        await self._seen.rows(f"insert into logins (id, expired) values ('{uuid4().hex}', {expired})")

    async def logins(self) -> list[bool]:
        return [bool(expired) for (expired,) in await self._seen.rows("select expired from logins")]

    async def tasks(self) -> list[str]:
        return [name for (name,) in await self._seen.rows("select name from workq order by id")]


@pytest_asyncio.fixture
async def signup(database: Database) -> AsyncGenerator[Signup]:
    """Its schema, in a database of its own."""
    if isinstance(database, SQLiteDatabase):
        found = Signup(database.url.replace("sqlite:", "sqlite+aiosqlite:", 1), database)
        await schema.create(found.url)
        yield found
        return
    name = f"signup_{database.schema}"
    await database.rows(f"create database {name}")
    url = urlsplit(database.url)._replace(path=f"/{name}").geturl()
    found = Signup(url.replace("postgresql:", "postgresql+asyncpg:", 1), PostgresDatabase(url, "public"))
    try:
        await schema.create(found.url)
        yield found
    finally:
        await database.rows(f"drop database {name} with (force)")


def with_state(app: ASGIApp, state: dict[str, Any]) -> ASGIApp:
    """What a server does with the lifespan's state: every request gets a copy."""

    async def with_it(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "state": dict(state)}, receive, send)

    return with_it


@asynccontextmanager
async def running(app: FastAPI, *, raises: bool = True) -> AsyncGenerator[httpx.AsyncClient]:
    async with app.router.lifespan_context(app) as state:
        transport = httpx.ASGITransport(with_state(app, dict(state or {})), raise_app_exceptions=raises)
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
            yield client


async def test_when_the_response_begins_the_user_and_the_task_are_committed(signup: Signup) -> None:
    committed: list[tuple[list[str], list[str]]] = []
    app = create_app(signup.url)

    def looking(inner: ASGIApp) -> ASGIApp:
        async def looks(scope: Scope, receive: Receive, send: Send) -> None:
            async def sending(message: Any) -> None:
                if message["type"] == "http.response.start":
                    committed.append((await signup.emails(), await signup.tasks()))
                await send(message)

            await inner(scope, receive, sending)

        return looks

    app.add_middleware(looking)
    async with running(app) as client:
        response = await client.post("/signup", params={"email": "ann@example.org"})
    assert response.status_code == 201
    assert committed == [(["ann@example.org"], ["send-welcome"])]

    async with workq.connect(signup.url) as db:
        (row,) = await workq.Queue(db).find()
    assert (row.queue, row.payload) == ("mail", {"user_id": response.json(), "email": "ann@example.org"})
    assert 55 < (row.run_at - row.created_at).total_seconds() < 65


async def test_a_taken_address_leaves_no_second_user_and_no_task(signup: Signup) -> None:
    async with running(create_app(signup.url)) as client:
        first = await client.post("/signup", params={"email": "ann@example.org"})
        second = await client.post("/signup", params={"email": "ann@example.org"})
    assert (first.status_code, second.status_code) == (201, 409)
    assert await signup.emails() == ["ann@example.org"]
    assert await signup.tasks() == ["send-welcome"]


async def test_a_request_that_fails_after_the_enqueue_leaves_nothing(signup: Signup) -> None:
    app = create_app(signup.url)

    async def broken(email: str, session: Session, queue: Queue) -> None:
        await sign_up(email, session, queue)
        assert len(await queue.find(tx=session)) == 1
        raise ConnectionError("the payment service is down")

    app.post("/broken")(broken)
    async with running(app, raises=False) as client:
        response = await client.post("/broken", params={"email": "ann@example.org"})
        assert response.status_code == 500
        assert await signup.emails() == []
        assert await signup.tasks() == []

        # The connection went back to the pool in order.
        assert (await client.post("/signup", params={"email": "ann@example.org"})).status_code == 201
    assert await signup.tasks() == ["send-welcome"]


async def test_many_requests_at_once_all_leave_their_user_and_their_task(signup: Signup) -> None:
    async with running(create_app(signup.url)) as client:
        responses = await asyncio.gather(
            *(client.post("/signup", params={"email": f"{number % 10}@example.org"}) for number in range(20))
        )
    assert sorted(response.status_code for response in responses) == [201] * 10 + [409] * 10
    assert await signup.emails() == [f"{number}@example.org" for number in range(10)]
    assert await signup.tasks() == ["send-welcome"] * 10


@pytest.mark.skipif(sys.platform == "win32", reason="a process cannot be asked to end by SIGTERM")
async def test_the_worker_process_does_the_work_and_ends_when_asked_to(signup: Signup) -> None:
    async with running(create_app(signup.url)) as client:
        await client.post("/signup", params={"email": "ann@example.org"})
    async with workq.connect(signup.url) as db:
        queue = workq.Queue(db)
        await queue.enqueue(None, CHARGE, Charge(order_id=7, cents=100))
        await queue.enqueue(None, "resize", {"width": 640})
        (mail,) = await queue.find(target=WELCOME)
        await queue.reschedule(None, mail.id)  # a minute early

        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "error", "-m", "signup.worker"),
            cwd=ROOT / "examples",
            env=os.environ | {"DATABASE_URL": signup.url, "PYTHONPATH": str(ROOT)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:

            async def finished() -> bool:
                return [(row.name, row.state, row.scheduled) for row in await queue.find()] == [
                    ("cleanup", "waiting", True)
                ]

            await eventually(finished, timeout=3 * SOON)
            worker.send_signal(signal.SIGTERM)
            async with asyncio.timeout(SOON):
                printed, errors = await worker.communicate()
        finally:
            if worker.returncode is None:
                worker.kill()
                await worker.wait()

        assert errors.decode() == ""
        assert worker.returncode == 0
        # One is printed in a thread, so the two may run into each other.
        assert printed.decode().count("640 1") == 1
        assert printed.decode().count("ann@example.org: Hello") == 1
        assert await signup.charged() == [(7, 100)]


async def test_the_hourly_cleanup_deletes_what_has_expired(signup: Signup) -> None:
    await signup.log_in(expired=False)
    await signup.log_in(expired=True)
    async with (
        executors(signup.url) as (_, _, maintenance),
        maintenance,
        workq.connect(signup.url) as db,
    ):
        queue = workq.Queue(db)
        (row,) = await queue.find(target=CLEANUP)
        assert 3590 < (row.run_at - row.created_at).total_seconds() < 3610
        await queue.reschedule(None, row.id)

        async def cleaned() -> bool:
            return await signup.logins() == [False]

        await eventually(cleaned)


async def test_a_charge_of_nothing_fails_and_is_not_written(signup: Signup) -> None:
    async with executors(signup.url) as (_, orders, _), orders, workq.connect(signup.url) as db:
        queue = workq.Queue(db)
        id = await queue.enqueue(None, CHARGE, Charge(order_id=8, cents=0))
        assert id is not None
        await queue.wait(CHARGE, timeout=SOON)
        row = await queue.get(id)
    assert row is not None
    assert row.state == "failed"
    assert "nothing to charge" in (row.error or "")
    assert await signup.charged() == []
