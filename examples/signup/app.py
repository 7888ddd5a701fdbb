"""The web process. It only enqueues; the executors run in worker.py."""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated, TypedDict
from uuid import UUID, uuid4

from fastapi import Depends, FastAPI, HTTPException, Request
from sqlalchemy import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

import workq

from .contracts import WELCOME, Welcome
from .schema import users


class State(TypedDict):
    queue: workq.Queue
    sessions: async_sessionmaker[AsyncSession]


async def get_session(request: Request) -> AsyncGenerator[AsyncSession]:
    sessions: async_sessionmaker[AsyncSession] = request.state.sessions
    async with sessions.begin() as session:
        yield session


def get_queue(request: Request) -> workq.Queue:
    queue: workq.Queue = request.state.queue
    return queue


# scope="function" commits before the response is sent. The default commits after it: the client would hear of a
# success that may still fail.
Session = Annotated[AsyncSession, Depends(get_session, scope="function")]
Queue = Annotated[workq.Queue, Depends(get_queue)]


async def sign_up(email: str, session: Session, queue: Queue) -> UUID:
    user_id = uuid4()
    try:
        await session.execute(insert(users).values(id=user_id, email=email))
    except IntegrityError:
        raise HTTPException(409, "there is such a user already") from None
    await queue.enqueue(session, WELCOME, Welcome(user_id, email), delay=60)
    return user_id


def create_app(database_url: str) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[State]:
        engine = create_async_engine(database_url)
        try:
            async with workq.connect(database_url) as db:
                yield State(queue=workq.Queue(db), sessions=async_sessionmaker(engine))
        finally:
            await engine.dispose()

    app = FastAPI(lifespan=lifespan)
    app.post("/signup", status_code=201)(sign_up)
    return app


def main() -> FastAPI:
    """For `uvicorn --factory`."""
    return create_app(os.environ["DATABASE_URL"])
