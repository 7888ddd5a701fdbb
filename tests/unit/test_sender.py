"""Concurrent enqueues that a server's own timeout refuses together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from workq._clock import Clock
from workq._deadline import Deadline
from workq._new import Item, NewTask, item_of
from workq._sender import Sender
from workq._shared import Shared
from workq.dialect import NotNow, Unreachable


class Table:
    """Takes no more than so many rows at once."""

    def __init__(self, most: int) -> None:
        self.clock = Clock()
        self.most = most
        self.sent: list[int] = []

    async def insert(self, place: object, items: Sequence[Item]) -> list[int | None]:
        self.sent.append(len(items))
        if len(items) > self.most:
            raise NotNow("the server could not do it now") from TimeoutError("statement timeout")
        return list(range(len(items)))


class NoConnection:
    def connection(self, purpose: str) -> Any:
        return self

    async def close(self) -> None: ...


async def send(table: Table, number: int) -> list[int | BaseException | None]:
    sender = Sender(cast(Any, table), Shared(cast(Any, NoConnection())), Deadline(table.clock), lambda stored: None)
    item = item_of(NewTask("note", 1), 1000)
    return await asyncio.gather(*(sender.send(item) for _ in range(number)), return_exceptions=True)


async def test_what_is_too_much_at_once_is_stored_in_parts() -> None:
    table = Table(70)
    results = await send(table, 900)
    assert all(isinstance(result, int) for result in results)
    assert len(table.sent) < 40


async def test_where_one_alone_is_too_much_the_others_are_not_tried() -> None:
    """A table that somebody has locked: 900 statements of a timeout each would keep the last caller for an hour."""
    table = Table(0)
    results = await send(table, 900)
    assert all(isinstance(result, TimeoutError) for result in results)
    assert table.sent == [900, 450, 225, 112, 56, 28, 14, 7, 3, 1]


async def test_no_connection_is_an_error_at_once() -> None:
    table = Table(70)

    async def unreachable(place: object, items: object) -> list[int | None]:
        raise Unreachable("no connection") from OSError("refused")

    table.insert = unreachable  # type: ignore[method-assign]
    (result,) = await send(table, 1)
    assert isinstance(result, OSError)
    with pytest.raises(OSError, match="refused"):
        raise result
