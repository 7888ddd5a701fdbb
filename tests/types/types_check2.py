# ruff: noqa
"""More edges."""

from typing import Any, NamedTuple
import msgspec, pydantic
from sqlalchemy.ext.asyncio import AsyncSession
import workq


class PM(pydantic.BaseModel):
    a: int


class MS(msgspec.Struct):
    a: int


class NT(NamedTuple):
    a: int


class Base: ...


class Derived(Base): ...


@workq.handler("pm")
async def pm(task: workq.Task[PM]) -> None: ...
@workq.handler(workq.Spec("ms", MS, key=lambda m: str(m.a)))
async def ms(task: workq.Task[MS]) -> None: ...
@workq.handler("nt")
async def nt(task: workq.Task[NT]) -> None: ...
@workq.handler("base")
async def base(task: workq.Task[Base]) -> None: ...
@workq.handler("mix")
async def mix(task: workq.Task[int]) -> workq.Result:
    if task.attempt > 3:
        return workq.Fail("x")
    raise workq.Retry(after=3)


async def mw(task: workq.Task[Any], call_next: workq.Next) -> workq.Result:
    return await call_next()


async def mw_bad(task: workq.Task[Any]) -> workq.Result: ...
async def f(
    q: workq.Queue,
    tx: AsyncSession | None,
    h: workq.Handler,
    spec: workq.Spec,
    rows: list[tuple[workq.Spec[Any], Any]],
    o: workq.Options,
) -> None:
    await q.enqueue(tx, pm, PM(a=1), delay=3, key="x")
    await q.enqueue(tx, pm, {"a": 1})  # E
    await q.enqueue(tx, pm, PM(a=1), dely=3)  # E
    await q.enqueue(tx, pm, PM(a=1), delay="3")  # E
    await q.enqueue(tx, ms, MS(a=1))
    await q.enqueue(tx, ms, NT(1))  # E
    await q.enqueue(tx, nt, NT(1))
    await q.enqueue(tx, base, Derived())
    await q.enqueue(tx, h)
    await q.enqueue(tx, h, 3)
    await q.enqueue(tx, spec, 3, **o)
    for s, p in rows:
        await q.enqueue(tx, s, p)
    workq.Executor(q, [pm], middleware=[mw])
    workq.Executor(q, [pm], middleware=[mw_bad])  # E
    workq.Executor(q, [pm], on_event=print)  # E
    id = await q.enqueue(tx, mix, 3)
    await q.retry(tx, id)  # E int | None
    if id is not None:
        await q.retry(tx, id)
    row = await q.get(3)
    if row:
        print(row.payload["a"])
