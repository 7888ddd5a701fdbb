"""Faults to plant in workq, each of which some story must find: the proof that the simulator can fail."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import sim.database
from sim.database import Database, WriterBusy
from workq import _claim, _ending, _finish, _workers
from workq._caution import Caution
from workq._claim import Claimer
from workq._heartbeat import Heartbeat
from workq._settings import Settings
from workq._steady import Steady
from workq._workers import Workers
from workq.dialect import Statement, Statements

FENCED = (
    " and w.version = json_extract(h.value, '$[1]') and w.locked_by = json_extract(h.value, '$[2]')",
    " and t.version = json_extract(d.value, '$[1]') and t.locked_by = json_extract(d.value, '$[2]')",
    " and version = :version and locked_by = :token",
)


@dataclass(frozen=True)
class Plant:
    """One fault: in the statements, or in the code."""

    name: str
    promises: frozenset[str]
    """Which of them a story sees broken."""
    seed: int
    """A story that does: it is tried first, and if it has changed, all the others."""
    statements: Callable[[Statements], Statements] = lambda sql: sql
    code: Callable[[pytest.MonkeyPatch], None] = lambda patch: None


def spaced(part: str) -> re.Pattern[str]:
    """A part of a statement, whatever spaces it is written with."""
    return re.compile(r"\s+".join(map(re.escape, part.split())))


def rewritten(part: str, instead: str = "") -> Callable[[Statement], Statement]:
    """The statement with another part in the place of one that must have been there."""

    def change(statement: Statement) -> Statement:
        found = spaced(part)
        assert found.search(statement.text + statement.page), part
        text, page = (found.sub(lambda match: instead, text) for text in (statement.text, statement.page))
        return replace(statement, text=text, page=page)

    return change


def unfenced(statement: Statement) -> Statement:
    """The statement as it would be without version and token."""
    text, page = statement.text, statement.page
    for fence in FENCED:
        text, page = spaced(fence).sub("", text), spaced(fence).sub("", page)
    assert text != statement.text
    return replace(statement, text=text, page=page)


def changed(name: str, change: Callable[[Statement], Statement]) -> Callable[[Statements], Statements]:
    """All statements, one of them changed."""
    return lambda sql: replace(sql, **{name: change(getattr(sql, name))})


def nothing(*args: Any, **options: Any) -> None:
    """In the place of what should be done."""


def no(*args: Any, **options: Any) -> bool:
    """In the place of a question."""
    return False


def yes(*args: Any, **options: Any) -> bool:
    """In the place of a question."""
    return True


def hands_back_what_runs(patch: pytest.MonkeyPatch) -> None:
    hand_back = Workers.hand_back

    def planted(self: Any, *, older_than: float = 0) -> int:
        for held in self._holding if older_than == 0 else ():
            if held.running and not held.ended:
                self._put(_finish.Entry(held, _ending.hand_back(held.claimed), None))
        return hand_back(self, older_than=older_than)

    patch.setattr(Workers, "hand_back", planted)


def ignores_the_answer(patch: pytest.MonkeyPatch) -> None:
    begin = Heartbeat.__init__

    def planted(self: Any, *args: Any) -> None:
        begin(self, *args)
        self._lost = nothing

    patch.setattr(Heartbeat, "__init__", planted)


def one_token(patch: pytest.MonkeyPatch) -> None:
    class Same:
        @staticmethod
        def getrandbits(bits: int) -> int:
            return 1

    patch.setattr(_claim, "random", Same)


def never_begins_again(patch: pytest.MonkeyPatch) -> None:
    cursor = _claim.next_cursor

    def planted(before: Any, page: Sequence[Any], asked: int) -> Any:
        return cursor(before, page, min(asked, len(page)))

    patch.setattr(Claimer, "due", no)
    patch.setattr(_claim, "next_cursor", planted)


def waits_for_foreign_rows(patch: pytest.MonkeyPatch) -> None:
    skipping = Database._skipping  # pyright: ignore[reportPrivateUsage]

    def planted(self: Any, name: str, call: int, statement: Statement, params: Any) -> Any:
        if name != "extend" and any(lease[0] in self.locks for lease in params.get("leases", params.get("endings"))):
            raise WriterBusy
        return skipping(self, name, call, statement, params)

    patch.setattr(Database, "_skipping", planted)


def reuses_ids(patch: pytest.MonkeyPatch) -> None:
    made = sim.database.template

    def planted(folder: Path) -> Path:
        path = folder / "reusing" / "template.db"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            with pytest.MonkeyPatch.context() as inner:
                sqlite = sim.database.sqlite

                def reusing(names: Any) -> Statements:
                    sql = sqlite(names)
                    (table, *others), *later = sql.migrations
                    return replace(sql, migrations=((table.replace(" autoincrement", ""), *others), *later))

                inner.setattr(sim.database, "sqlite", reusing)
                made(path.parent)
        return path

    patch.setattr(sim.database, "template", planted)


def believes_what_was_rolled_back(patch: pytest.MonkeyPatch) -> None:
    complete = _workers.complete

    async def planted(held: Any, *args: Any) -> None:
        await complete(held, *args)
        held.wants_completion = False

    patch.setattr(_workers, "complete", planted)


def ends_at_the_first_error(patch: pytest.MonkeyPatch) -> None:
    async def planted(self: Any, once: Callable[[], Any]) -> Any:
        return await once(), 0

    patch.setattr(Steady, "attempt", planted)


PLANTS = (
    Plant(
        "a finish that looks at the id alone",
        frozenset({"fence", "no loss"}),
        92,
        statements=changed("succeed", unfenced),
    ),
    Plant(
        "a retry that looks at the id alone",
        frozenset({"fence"}),
        9,
        statements=changed("settle", unfenced),
    ),
    Plant(
        "a complete(tx) that looks at the id alone",
        frozenset({"fence"}),
        82,
        statements=changed("complete", unfenced),
    ),
    Plant("a stop that hands back what still runs", frozenset({"fence"}), 5, code=hands_back_what_runs),
    Plant("a beat that ignores its answer", frozenset({"one holder"}), 23, code=ignores_the_answer),
    Plant(
        "a beat that extends nothing",
        frozenset({"one holder"}),
        0,
        statements=changed("extend", rewritten("locked_until = :now + :lease", "locked_until = locked_until")),
    ),
    Plant("a claim that draws no new token", frozenset({"fence", "one holder", "takeover"}), 0, code=one_token),
    Plant(
        "a claim of leases that are alive",
        frozenset({"one holder"}),
        0,
        statements=changed("claim", rewritten("w.locked_until < :now", "w.locked_until < :now + 9000000")),
    ),
    Plant(
        "a reschedule of what runs",
        frozenset({"one holder"}),
        6,
        statements=changed("reschedule", rewritten(" and (locked_until is null or locked_until < :now)")),
    ),
    Plant("a cursor that never begins again", frozenset({"no loss", "takeover"}), 170, code=never_begins_again),
    Plant("a finish that waits for foreign rows", frozenset({"isolation"}), 106, code=waits_for_foreign_rows),
    Plant("ids that are given twice", frozenset({"fence", "no loss"}), 0, code=reuses_ids),
    Plant(
        "a takeover without caution",
        frozenset({"one holder"}),
        51,
        code=lambda patch: patch.setattr(Caution, "may_take_over", yes),
    ),
    Plant(
        "a complete(tx) believed though it rolled back", frozenset({"no trace"}), 2, code=believes_what_was_rolled_back
    ),
    Plant(
        "a schedule that ends with its first success",
        frozenset({"one schedule"}),
        0,
        code=lambda patch: patch.setattr(Settings, "when", nothing),
    ),
    Plant("a loop that ends at its first error", frozenset({"isolation"}), 0, code=ends_at_the_first_error),
)
