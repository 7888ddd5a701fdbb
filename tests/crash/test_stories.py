"""The short set: each story on each database, small, with a few seeds. The long set is tests/crash/long.py."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest

from crash.play import Place, Plan, Scene, Story, play
from crash.stories import STORIES, killed

_numbers = itertools.count(1)
SEEDS = (1, 2)


def named(value: object) -> str | None:
    return value.name if isinstance(value, Story) else None


@pytest.fixture
def place(on: str, request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A file, or a schema on a server that may be broken."""
    if on == "SQLite":
        return Place(f"sqlite:///{tmp_path}/test.db")
    server = request.getfixturevalue("server")
    return Place(server.url, f"crash{next(_numbers)}", server)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("on", "story"), [(on, story) for story in STORIES for on in story.on], ids=named)
async def test_promises_are_kept_whatever_is_broken(place: Place, story: Story, seed: int, tmp_path: Path) -> None:
    """F01, F02, F04, F05, F09, F10, F17, F18, F21, F22, F36: no loss, no trace, fence, one holder, takeover,
    one schedule, clean stop, back again, isolation, by what real processes wrote down."""
    journal = tmp_path / "journal"
    journal.mkdir()
    played = await play(story, place, journal, seed, Plan(tasks=250, seconds=3, producers=1 + seed % 2))
    assert played.findings.broken == [], played.printed
    assert played.tasks >= 250


@pytest.mark.parametrize("on", ["SQLite", "PostgreSQL"])
async def test_where_nothing_is_broken_every_way_of_enqueueing_is_taken(place: Place, tmp_path: Path) -> None:
    """no loss, no trace: or the stories would tell less than they seem to."""

    async def nothing(scene: Scene) -> None: ...

    journal = tmp_path / "journal"
    journal.mkdir()
    played = await play(Story("nothing", nothing), place, journal, 1, Plan(tasks=600, seconds=3))
    assert played.findings.broken == [], played.printed
    ways = Counter(line.note for line in played.lines if line.what == "acked")
    assert {*ways} == {"at once", "many", "in a transaction", "and delete"}
    kinds = {line.note.split()[-1] for line in played.lines if line.what == "start"}
    assert kinds == {"fast", "slow", "flaky", "broken", "pay", "tick"}
    whats = {line.what for line in played.lines}
    assert {"open", "deleted", "raised", "claimed", "beat", "completed", "failed"} <= whats


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("on", ["SQLite", "PostgreSQL"])
async def test_handlers_that_do_not_end_in_their_transaction_are_found_out(place: Place, tmp_path: Path) -> None:
    """fence, no loss: at least once is all that a separate end can promise, and the stories can tell the difference."""
    journal = tmp_path / "journal"
    journal.mkdir()
    story = Story("nodes killed in their own transactions", killed, pay=1, apart=True)
    played = await play(story, place, journal, 1, Plan(tasks=1000, seconds=20))
    assert [text for text in played.findings.violations["fence"] if text.endswith("in the ledger 2 times")] != []
