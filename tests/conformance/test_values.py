"""same value: what enqueue accepts comes back equal, on every database; what does not decode harms nobody else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import workq
from support import SOON, Database, Events, Runs, SQLiteDatabase

NUMBERS: list[Any] = [
    0, 1, -1, 2**31, 2**53 - 1, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**300, -(10**3900),
    0.0, -0.0, 1.0, 0.1, 1e-320, 5e-324, -5e-324, 1e22, 1e23, 123456789.123456789, 1.7976931348623157e308, True, False,
]  # fmt: skip
TEXTS = [
    "", " ", "null", "0", "{}", "'", '"', "\\", "\\u0041", "\\\\u0000", "$1", "%s", ":now", "?", "--",
    "".join(map(chr, range(1, 0x20))), "\x7f\x80\x9f", "\r\n\t", "\u2028\u2029\ufeff", "\ufffe\uffff\U0010ffff",
    "e\u0301 is not \u00e9", "\u0627\u0644\u0639", "\u8868", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "x" * 70_000,
]  # fmt: skip
SHAPES: list[Any] = [
    None, [], {}, [[]], [{}], {"": {"": {"": None}}}, [None, True, 0, "", 0.0], {"b": 1, "a": 2, "B": 3, "\u00e9": 4},
    {"1": 1, "01": 2, " 1": 3}, [1, 1.0, True], {key: key for key in TEXTS[:20]},
]  # fmt: skip

PLAIN = workq.Spec("note", object)

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=5),
    max_leaves=20,
)


@dataclass
class Order:
    id: UUID
    price: Decimal
    at: datetime
    waits: timedelta
    parts: tuple[int, ...]
    names: dict[str, float]
    raw: bytes
    note: str | None = None


def same(one: object, other: object) -> bool:
    """Equal, and to the last bit: -0.0 is not 0.0, 1 is not True, and keys keep their order."""
    return one == other and repr(one) == repr(other)


async def ran_with(queue: workq.Queue, spec: workq.Spec[Any], payloads: list[Any]) -> list[Any]:
    """What a handler gets for these payloads, in their order."""
    got: dict[int, Any] = {}

    @workq.handler(spec)
    async def note(task: workq.Task[Any]) -> None:
        got[task.id] = task.payload

    ids = await queue.enqueue_many(None, [workq.NewTask(spec, payload) for payload in payloads])
    async with workq.Executor(queue, [note], poll_interval=0.1):
        await queue.wait(spec, timeout=SOON)
    assert got.keys() == set(ids)
    return [got[id] for id in ids if id is not None]


@pytest.mark.parametrize("payloads", [NUMBERS, TEXTS, SHAPES], ids=["numbers", "texts", "shapes"])
async def test_a_plain_payload_reaches_its_handler_as_it_was(queue: workq.Queue, payloads: list[Any]) -> None:
    """F43: integers and floats to the last bit, every character, and the order of keys."""
    payloads = [*payloads, list(payloads)]
    ids = await queue.enqueue_many(None, [workq.NewTask("shown", payload) for payload in payloads])
    shown = {row.id: row.payload for row in await queue.find(target="shown")}
    for payload, id, got in zip(payloads, ids, await ran_with(queue, PLAIN, payloads), strict=True):
        assert id is not None
        assert same(got, payload)
        assert same(shown[id], payload)


async def test_a_nul_inside_a_payload_is_a_character_like_any_other(queue: workq.Queue) -> None:
    """F42: taken alike, given back equal, and by way of an error or a repair too."""
    payloads = ["\0", "a\0b", {"\0": "\0\0"}, ["\\0", "\\u0000", "\0"]]
    for got, payload in zip(await ran_with(queue, PLAIN, payloads), payloads, strict=True):
        assert same(got, payload)
    id = await queue.enqueue(None, "parked", "before")
    assert id is not None
    await queue.disable(None, id)
    await queue.retry(None, id, payload="after\0")
    assert [row.payload for row in await queue.find()] == ["after\0"]


async def test_a_typed_payload_reaches_its_handler_as_it_was(queue: workq.Queue) -> None:
    payloads = [
        Order(UUID(int=n), Decimal("1.10"), at, timedelta(microseconds=-n), (n, 2**63), {"x": -0.0}, b"\0\xff", note)
        for n, (at, note) in enumerate(
            [(datetime(2031, 1, 1, tzinfo=UTC), None),
             (datetime(1900, 1, 1, 0, 0, 0, 1, timezone(timedelta(hours=14))), "\0\u00e9")]
        )
    ]  # fmt: skip
    for got, payload in zip(await ran_with(queue, workq.Spec("order", Order), payloads), payloads, strict=True):
        assert same(got, payload)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(json_values, min_size=1, max_size=20))
async def test_every_json_value_comes_back_equal(queue: workq.Queue, values: list[Any]) -> None:
    """F42, F43: whatever is accepted."""
    ids = await queue.enqueue_many(None, [workq.NewTask("value", value) for value in values])
    for id, value in zip(ids, values, strict=True):
        assert id is not None
        row = await queue.get(id)
        assert row is not None
        assert same(row.payload, value)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=200), other=st.text())
async def test_every_key_and_header_comes_back_equal(queue: workq.Queue, key: str, other: str) -> None:
    """F42: what the database would refuse was refused before; everything else is kept."""
    try:
        id = await queue.enqueue(None, "keyed", key=key, headers={key: other})
    except ValueError:
        assert re.search("[\0\ud800-\udfff]", other)
        return
    assert id is not None
    row = await queue.get(id)
    assert row is not None
    assert (row.key, row.headers) == (key, {key: other})
    assert await queue.enqueue(None, "keyed", key=key) is None
    await queue.delete(None, id)


async def test_a_payload_changed_by_retry_comes_back_equal(queue: workq.Queue) -> None:
    id = await queue.enqueue(None, "note", "before")
    assert id is not None
    for payload in (*NUMBERS, *SHAPES):
        assert await queue.disable(None, id)
        assert await queue.retry(None, id, payload=payload)
        row = await queue.get(id)
        assert row is not None
        assert same(row.payload, payload)


# What somebody wrote by hand

TOO_DEEP = "[" * 900 + "]" * 900
"""Deeper than workq writes, not too deep for a database; Python's own reader gives up at some such depth."""


@dataclass
class Email:
    to: str


@pytest.mark.parametrize("column", ["payload", "headers", "key"])
@pytest.mark.parametrize("raw", ["x'7b7d'", "cast(x'22ff22' as text)"], ids=["a blob", "not UTF-8"])
async def test_bytes_in_a_row_hold_up_nobody_else(sqlite: SQLiteDatabase, column: str, raw: str) -> None:
    """F07, isolation: SQLite stores whatever it is given in any column."""
    ran: set[int] = set()

    @workq.handler("any")
    async def handle(task: workq.Task[Any]) -> None:
        ran.add(task.id)

    async with sqlite.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        ids = await queue.enqueue_many(None, [workq.NewTask(handle, {"n": n}) for n in range(5)])
        await sqlite.rows(f"update {{table}} set {column} = {raw} where id = 3")
        async with workq.Executor(queue, [handle], poll_interval=0.1):
            await queue.wait(handle, timeout=SOON)
    assert ran >= set(ids) - {3}


@pytest.mark.parametrize(
    "raw",
    ['{"to":  7}', "{ }", "[]", "null", '"ann"', "7", '{"to" : "\\ud800"}', '{"to": 1e999}', TOO_DEEP],
    ids=lambda raw: f"{raw:.20}",
)
async def test_a_payload_that_does_not_decode_fails_only_its_own_task(database: Database, raw: str) -> None:
    """F07: whatever the handler's policy; the raw text is kept, byte for byte, and the neighbours run."""
    events, got = Events(), list[str]()

    @workq.handler("email", retry=workq.linear(retries=5, delay=0))
    async def send(task: workq.Task[Email]) -> None:
        got.append(task.payload.to)

    async with database.open() as db:
        queue = workq.Queue(db, on_event=[events])
        await queue.migrate()
        ids = await queue.enqueue_many(None, [workq.NewTask(send, Email(str(n))) for n in range(10)])
        bad = ids[5]
        assert bad is not None
        await database.rows(f"update {{table}} set payload = '{raw}' where id = {bad}")
        async with workq.Executor(queue, [send], poll_interval=0.1):
            await queue.wait(send, timeout=SOON)
        assert sorted(got) == sorted(str(n) for n in range(10) if n != 5)
        (row,) = await queue.find()
        assert (row.id, row.state, row.attempt) == (bad, "failed", 1)
        assert row.error is not None
        assert "PayloadError" in row.error
        assert "Email" in row.error
        assert await database.rows(f"select payload from {{table}} where id = {bad}") == [(raw,)]
        (event,) = (event for event in events if event.kind == "failed")
        assert (event.id, event.retry_at) == (bad, None)
        assert isinstance(event.error, workq.PayloadError)
        assert sum(event.kind == "completed" for event in events) == 9

        assert await queue.retry(None, bad, payload=Email("mended"))
        async with workq.Executor(queue, [send], poll_interval=0.1):
            await queue.wait(send, timeout=SOON)
        assert got[-1] == "mended"
        assert await queue.find() == []


async def test_a_payload_that_does_not_decode_is_shown_and_can_be_deleted(
    database: Database, queue: workq.Queue
) -> None:
    """F07: `get` and `find` show the rest of the page."""
    ids = await queue.enqueue_many(None, [workq.NewTask("note", n) for n in range(3)])
    too_long = "1" * 5000
    await database.rows(f"update {{table}} set payload = '{too_long}' where id = {ids[1]}")
    await database.rows(f"update {{table}} set headers = '[7]' where id = {ids[2]}")
    assert [row.payload for row in await queue.find()] == [0, too_long, 2]
    assert [dict(row.headers) for row in await queue.find()] == [{}, {}, {}]
    for id in ids:
        assert id is not None
        assert await queue.delete(None, id)


async def test_a_payload_of_a_newer_release_fails_nothing_it_does_not_concern(queue: workq.Queue) -> None:
    """F07, F08: an old handler reads what it knows; a field it does not know is no error."""
    runs = Runs()
    runs.go.set()

    @workq.handler("email")
    async def send(task: workq.Task[Email]) -> None:
        await runs.hold(task.payload.to)

    await queue.enqueue(None, "email", {"to": "ann", "new_field": [1, 2]})
    async with workq.Executor(queue, [send], poll_interval=0.1):
        await queue.wait(send, timeout=SOON)
    assert runs.order == ["ann"]
    assert await queue.find() == []
