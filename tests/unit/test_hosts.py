"""Several servers in one URL: who is asked, who is waited for, and what becomes of the answers nobody needs."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

import workq
from workq_asyncpg import Hosts
from workq_asyncpg._hosts import each_host

ONE, TWO = "postgresql://u:p@one:1/db?x=y", "postgresql://u:p@two/db?x=y"
BOTH = "postgresql://u:p@one:1,two/db?x=y"


class Connection:
    """Knows only whether it was dropped."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.dropped = False

    def terminate(self) -> None:
        self.dropped = True


class Servers:
    """What each does when it is asked: answer after so many seconds, or raise."""

    def __init__(self, **does: float | Exception) -> None:
        self.does = does
        self.asked: list[str] = []
        self.wanted: set[object] = set()
        self.made: list[Connection] = []

    async def connect(self, dsn: str, **options: Any) -> Connection:
        name = "one" if "@one" in dsn else "two"
        self.asked.append(name)
        self.wanted.add(options.get("target_session_attrs"))
        what = self.does[name]
        if isinstance(what, Exception):
            raise what
        try:
            await asyncio.sleep(what)
        except asyncio.CancelledError:
            if "stubborn" not in options:
                raise
        self.made.append(Connection(dsn))
        return self.made[-1]


def servers(patch: pytest.MonkeyPatch, **does: float | Exception) -> Servers:
    made = Servers(**does)
    patch.setattr(asyncpg, "connect", made.connect)
    return made


@pytest.mark.parametrize(
    ("dsn", "each"),
    [
        (BOTH, [ONE, TWO]),
        ("postgresql://a,b:2,[::1]:3/db", ["postgresql://a/db", "postgresql://b:2/db", "postgresql://[::1]:3/db"]),
        ("postgresql://u@a/db", ["postgresql://u@a/db"]),
        ("postgresql:///db", ["postgresql:///db"]),
        ("postgresql:///db?host=a,b&x=y", ["postgresql:/db?host=a&x=y", "postgresql:/db?host=b&x=y"]),
        (
            "postgresql://u:p@/db?host=a,b&port=1,2",
            ["postgresql://u:p@/db?host=a&port=1", "postgresql://u:p@/db?host=b&port=2"],
        ),
        ("postgresql:///db?host=a,b&port=1,2,3", ["postgresql:///db?host=a,b&port=1,2,3"]),
    ],
)
def test_a_url_is_taken_apart_host_by_host(dsn: str, each: list[str]) -> None:
    assert each_host(dsn) == each


def test_hosts_of_the_environment_count_where_the_url_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOST", "a,b")
    monkeypatch.setenv("PGPORT", "5433")
    assert each_host("postgresql:///db") == [f"postgresql:/db?host={name}&port=5433" for name in "ab"]
    assert each_host("postgresql://c/db") == ["postgresql://c/db"]
    assert Hosts("postgresql:///db").several
    assert not Hosts("postgresql://c/db").several


async def test_the_first_that_answers_is_taken_and_asked_alone_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """F22: after a failover nobody waits for the old primary more than once."""
    hosts, answering = Hosts(BOTH), servers(monkeypatch, one=3600, two=0)
    conn: Any = await hosts.connect(BOTH)
    assert conn.dsn == TWO
    assert answering.asked == ["one", "two"]
    await hosts.connect(BOTH)
    assert answering.asked == ["one", "two", "two"]
    assert [made.dropped for made in answering.made] == [False, False]


async def test_when_nobody_is_right_the_first_ones_error_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    servers(monkeypatch, one=ConnectionRefusedError("by one"), two=OSError("by two"))
    with pytest.raises(ConnectionRefusedError, match="by one"):
        await Hosts(BOTH).connect(BOTH)


async def test_an_answer_that_comes_too_late_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    answering = servers(monkeypatch, one=3600, two=0)
    conn = await Hosts(BOTH).connect(BOTH, stubborn=True)
    await asyncio.sleep(0)
    assert {made.dsn: made.dropped for made in answering.made} == {ONE: True, TWO: False}
    assert conn in answering.made


async def test_a_cancelled_connect_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    answering = servers(monkeypatch, one=3600, two=3600)
    connecting = asyncio.create_task(Hosts(BOTH).connect(BOTH, stubborn=True))
    await asyncio.sleep(0.3)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    await asyncio.sleep(0)
    assert [made.dropped for made in answering.made] == [True] * len(answering.made)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(
    ("dsn", "said", "wanted"),
    [
        (BOTH, {}, "read-write"),
        (BOTH + "&target_session_attrs=any", {}, None),
        (BOTH, {"target_session_attrs": "any"}, "any"),
        (ONE, {}, None),
    ],
)
async def test_of_several_servers_one_that_takes_writes_is_wanted_unless_said_otherwise(
    monkeypatch: pytest.MonkeyPatch, dsn: str, said: dict[str, str], wanted: str | None
) -> None:
    """F22, back again: a standby that answers first, once, would be asked first, and do for nothing, ever after."""
    monkeypatch.delenv("PGTARGETSESSIONATTRS", raising=False)
    answering = servers(monkeypatch, one=0, two=0)
    await Hosts(dsn).connect(dsn, **said)
    assert answering.wanted == {wanted}


async def test_what_a_server_said_counts_more_than_that_another_was_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    servers(monkeypatch, one=ConnectionRefusedError("by one"), two=asyncpg.InvalidPasswordError("by two"))
    with pytest.raises(asyncpg.InvalidPasswordError, match="by two"):
        await Hosts(BOTH).connect(BOTH)


@pytest.mark.parametrize("bad", [0, -1])
def test_a_pool_of_no_connections_is_named_as_that(bad: int) -> None:
    with pytest.raises(ValueError, match="pool_size"):
        workq.connect("postgresql://localhost/x", pool_size=bad)
