"""Names of schemas and tables: validated and quoted by one function, so that none can break out of a statement."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workq
from support import Database
from workq._names import Names, names, quote
from workq._sql import Statement, Statements, postgres, sqlite

HOSTILE = 'wörk "q"; drop table x; -- \' $1 :id ? %s \\ 表\n'
"""Everything that means something in SQL, to a driver or to a formatter."""

identifiers = st.text(st.characters(exclude_characters="\0{}", exclude_categories=["Cs"]), min_size=1, max_size=13)


def unquoted(identifier: str) -> str:
    """An identifier as a database reads it. Raises AssertionError if it ends before its end."""
    assert identifier[0] == identifier[-1] == '"'
    inner = identifier[1:-1]
    assert '"' not in inner.replace('""', "")
    return inner.replace('""', '"')


def texts(statements: Statements) -> list[str]:
    """Every SQL text in a list of statements."""

    def inside(part: Any) -> Iterable[str]:
        if isinstance(part, Statement):
            yield part.text
        elif isinstance(part, str):
            yield part
        elif isinstance(part, tuple):
            for item in part:  # pyright: ignore[reportUnknownVariableType]
                yield from inside(item)

    return [
        text
        for field in dataclasses.fields(statements)
        if field.name != "names"
        for text in inside(getattr(statements, field.name))
    ]


@settings(deadline=None)
@given(identifiers)
def test_a_quoted_name_is_read_as_it_was_given(name: str) -> None:
    """F53: no character of a name ends the quotation."""
    assert unquoted(quote(name)) == name


@settings(deadline=None)
@given(identifiers, identifiers)
def test_a_qualified_name_keeps_its_two_parts(schema: str, table: str) -> None:
    """F53: a quote or a dot inside a name does not move the border between schema and table."""
    if table.lower().startswith("sqlite_"):
        return
    found = names(schema, table)
    assert found.table == f"{quote(schema)}.{quote(table)}"
    assert found.version_table == f"{quote(schema)}.{quote(table + '_version')}"
    assert found.schema == quote(schema)


@pytest.mark.parametrize("statements", [postgres, sqlite], ids=["postgres", "sqlite"])
def test_a_name_stands_in_statements_only_inside_quotes(statements: Any) -> None:
    """F53: with the quoted names taken out, nothing is left of a name in any statement."""
    found = names("sch\"ema'zz", "tab\"le'zz")
    every = texts(statements(found))
    assert any("zz" in text for text in every)
    for text in every:
        left = text
        for suffix in ("_version", "_due", "_key", "_scheduled", "_failed", "_failed_id", ""):
            left = left.replace(quote(f"tab\"le'zz{suffix}"), "")
        left = left.replace(quote("sch\"ema'zz"), "")
        assert "zz" not in left
        assert "{" not in left


@pytest.mark.parametrize("kind", ["schema", "table"])
@pytest.mark.parametrize(
    ("name", "complaint"),
    [("", "non-empty"), (None, "non-empty"), (7, "non-empty"), (b"workq", "non-empty"),
     ("work\0q", "NUL"), ("work\ud800q", "Unicode"), ("work{table}", "brace"), ("work}", "brace")],
    ids=repr,
)  # fmt: skip
def test_a_name_that_no_database_can_hold_is_refused(kind: str, name: Any, complaint: str) -> None:
    """F53: refused with the kind of name in the error, before any statement is made."""
    given = {"schema": "public", "table": "workq"} | {kind: name}
    with pytest.raises(ValueError, match=complaint) as refusal:
        names(**given)
    assert kind in str(refusal.value)


def test_what_sqlite_keeps_for_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="sqlite_"):
        names("main", "SQLite_tasks")


@pytest.mark.parametrize("letter", ["t", "é", "表", "😀"])
def test_the_length_of_a_name_is_counted_in_bytes(letter: str) -> None:
    """F53: a longer identifier would be cut silently, and two tables would share one index."""
    width = len(letter.encode())
    longest_schema = letter * (63 // width)
    longest_table = letter * (53 // width)
    found = names(longest_schema, longest_table)
    for text in (longest_schema, longest_table + "_version", longest_table + "_scheduled"):
        assert len(text.encode()) <= 63
    assert found.schema == quote(longest_schema)
    with pytest.raises(ValueError, match=r"bytes long; at most 63"):
        names(longest_schema + letter, "workq")
    with pytest.raises(ValueError, match=r"bytes long; at most 53"):
        names("public", longest_table + letter)


@settings(deadline=None)
@given(identifiers, identifiers)
def test_a_channel_is_a_plain_identifier_of_one_table(one: str, other: str) -> None:
    """F53: rings of two tables do not meet, whatever they are called."""
    first, second = (Names(table=quote(name), version_table="", schema="", bare=name) for name in (one, other))
    assert first.channel.isidentifier()
    assert first.channel.isascii()
    assert len(first.channel) <= 63
    assert (first.channel == second.channel) == (one == other)


async def test_a_table_may_have_any_name_from_migration_to_run(database: Database) -> None:
    """F53: a name with quotes, other scripts and SQL in it works end to end; needs a database."""
    ran: list[str] = []

    @workq.handler("note")
    async def note(task: workq.Task[str]) -> None:
        ran.append(task.payload)

    async with database.open(table=HOSTILE) as db:
        queue = workq.Queue(db)
        await queue.migrate()
        await queue.migrate()
        tick = workq.handler("tick")(lambda task: None)
        schedule = workq.Schedule(tick, workq.every(days=1))
        async with database.caller() as app:
            kept = await queue.enqueue(app.tx, "note", "kept", key="k")
            assert await queue.enqueue(app.tx, "note", "kept", key="k") is None
            await app.commit()
        (parked,) = await queue.enqueue_many(None, [workq.NewTask("note", "parked", key="p")])
        assert kept is not None
        assert parked is not None
        assert await queue.disable(None, parked)
        assert [row.id for row in await queue.find(state="failed")] == [parked]
        async with workq.Executor(queue, [note, tick], schedules=[schedule], poll_interval=0.1):
            await queue.wait(note, timeout=10)
            assert ran == ["kept"]
            assert await queue.retry_all(None, error_like="dis%") == 1
            await queue.wait(note, timeout=10)
        assert ran == ["kept", "parked"]
        assert [row.name for row in await queue.find()] == ["tick"]


async def test_two_tables_in_one_schema_know_nothing_of_each_other(database: Database) -> None:
    """F53: no index or version table of one is taken for the other's; needs a database."""
    async with database.open(table="one") as first, database.open(table='one"') as second:
        queues = [workq.Queue(first), workq.Queue(second)]
        for queue in queues:
            await queue.migrate()
        ids = [await queue.enqueue(None, "note", {"of": n}, key="k") for n, queue in enumerate(queues)]
        assert None not in ids
        for n, queue in enumerate(queues):
            assert [row.payload for row in await queue.find()] == [{"of": n}]
