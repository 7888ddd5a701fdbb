"""The handlers. Importable without a database: what they need is given to the functions that make them."""

from typing import Protocol

from sqlalchemy import delete, insert
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

import workq

from .contracts import CHARGE, CLEANUP, WELCOME, Charge, Welcome
from .schema import charges, logins


class Mailer(Protocol):
    async def send(self, to: str, text: str) -> None: ...


class Mail:
    def __init__(self, mailer: Mailer) -> None:
        self._mailer = mailer

    async def welcome(self, task: workq.Task[Welcome]) -> None:
        await self._mailer.send(task.payload.email, "Hello")


# The short form, for handlers that need nothing but modules.
@workq.handler("resize")
def resize(task: workq.Task[dict[str, int]]) -> None:
    """A plain function: it runs in a thread."""
    print(task.payload["width"], task.attempt, flush=True)


def mail_handlers(mailer: Mailer) -> list[workq.Handler]:
    return [workq.handler(WELCOME, retry=workq.exponential(retries=5), timeout=20)(Mail(mailer).welcome)]


def order_handlers(sessions: async_sessionmaker[AsyncSession]) -> list[workq.Handler]:
    @workq.handler(CHARGE, retry=workq.linear())
    async def charge(task: workq.Task[Charge]) -> workq.Result:
        if task.payload.cents <= 0:
            return workq.Fail("nothing to charge")
        async with sessions.begin() as session:
            await session.execute(insert(charges).values(order_id=task.payload.order_id, cents=task.payload.cents))
            await task.complete(session)  # commits with the charge, or not at all
        return None

    return [charge]


def cleanup_handler(sessions: async_sessionmaker[AsyncSession]) -> workq.Handler[None]:
    @workq.handler(CLEANUP)
    async def cleanup(task: workq.Task) -> None:
        async with sessions.begin() as session:
            await session.execute(delete(logins).where(logins.c.expired))

    return cleanup
