"""Compares the journal of a run with the table that is left: which promises were kept, and how long things took.

Pure: lines and rows in, findings out. Only what is certain counts as a violation: a lease is taken to have begun when
the statement was sent that was answered, a run to have begun when it said so.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from crash.journal import Line

FORGETFUL = 0.6
"""Seconds of claims and beats that a crash of the database server may undo."""
BACK_AGAIN = 5.0
EXIT = 20.0
"""Seconds that a process may need for its own end, on a machine that has other things to do."""
CLOCKS = 0.05
"""Seconds that two readings of clocks may differ by."""
TICK = "tick"
"""The token of a schedule's runs."""


class Row(NamedTuple):
    """What is left of a task in the table."""

    id: int
    token: str
    name: str
    failed: bool
    scheduled: bool


class Settings(NamedTuple):
    """What the nodes of the run were told."""

    lease: float = 1.5
    poll: float = 0.2
    stop: float = 1.0
    interval: float = 0.5
    schedules: int = 1


@dataclass
class Findings:
    """Sentences about each promise that was broken, and the seconds of those that have a bound."""

    violations: dict[str, list[str]] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def broken(self) -> list[str]:
        """All of them, with the promise's name."""
        return [f"{promise}: {text}" for promise, texts in self.violations.items() for text in texts]


@dataclass
class Run:
    """From a start to what ended it, as far as the process could write that down."""

    id: int
    token: str
    name: str
    pid: int
    begun: float
    over: float = math.inf
    how: str = ""
    """end, raised, cancelled or lost; empty: nothing more was heard of it."""


class Hold(NamedTuple):
    """A lease that the database granted or extended: alive until sent + lease, at least."""

    id: int
    pid: int
    sent: float
    received: float


class Story:
    """The lines, put in order."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.lines = sorted(lines, key=lambda line: line.at)
        self.by_what: defaultdict[str, list[Line]] = defaultdict(list)
        for line in self.lines:
            self.by_what[line.what].append(line)
        self.runs = list(self._runs())
        self.runs_of: defaultdict[int, list[Run]] = defaultdict(list)
        for run in self.runs:
            self.runs_of[run.id].append(run)
        self.token_of = {run.id: run.token for run in self.runs}
        self.crashes = list(self._windows("crashing", "up"))
        self.outages = list(self._windows("down", "up"))
        self.frozen = list(self._windows("frozen", "thawed"))
        self.given_back: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        for line in self.by_what["released"]:
            self.given_back[line.pid, line.id].append(line.at)
        self.holds: defaultdict[tuple[int, int], list[Hold]] = defaultdict(list)
        for line in self.by_what["claimed"] + self.by_what["beat"]:
            hold = Hold(line.id, line.pid, line.at, float(line.note))
            if not self.forgotten(hold.sent, hold.received):
                self.holds[hold.pid, hold.id].append(hold)

    def tokens(self, *whats: str) -> set[str]:
        """Of all lines of these kinds."""
        return {line.token for what in whats for line in self.by_what[what]}

    def forgotten(self, since: float, until: float) -> bool:
        """Might a crash of the server have undone a claim or a beat of that time?"""
        return any(since < up and until > crashed - FORGETFUL for crashed, up in self.crashes)

    def was_quiet(self, since: float, until: float) -> bool:
        """Was the database away, or a process frozen (which may hold SQLite's writer), in that time?"""
        return any(begin < until and end > since for begin, end in (*self.outages, *self.frozen))

    def _windows(self, begin: str, end: str) -> Iterator[tuple[float, float]]:
        ends = [line.at for line in self.by_what[end]]
        for line in self.by_what[begin]:
            yield line.at, next((at for at in ends if at > line.at), math.inf)

    def _runs(self) -> Iterator[Run]:
        open: dict[tuple[int, int], Run] = {}
        for line in self.lines:
            place = line.pid, line.id
            if line.what == "start":
                name = line.note.split()[-1]
                open[place] = run = Run(line.id, line.token, name, line.pid, line.at)
                yield run
            elif line.what in ("end", "raised", "cancelled", "lost") and place in open:
                run = open.pop(place)
                run.over, run.how = line.at, line.what


def check(lines: Iterable[Line], rows: Sequence[Row], ledger: Sequence[str], settings: Settings) -> Findings:
    """Check every promise. `rows`: the table when all was done; `ledger`: the tokens in the application's own table."""
    story, findings = Story(lines), Findings()
    for promise, texts in {
        "no loss": lost(story, rows, ledger),
        "no trace": traces(story, rows, ledger),
        "fence": accepted_twice(story, rows, ledger),
        "one holder": second_holders(story, settings),
        "one schedule": wrong_schedules(story, rows, settings),
        "same value": other_values(story, rows),
        "isolation": wrongly_failed(rows),
    }.items():
        findings.violations[promise] = list(texts)
    taken, bound = list(takeovers(story, settings)), settings.lease + settings.poll + 1
    findings.times["takeover"] = [each.seconds for each in taken]
    findings.violations["takeover"] = [
        f"{each.text}: {each.seconds:.2f} s" for each in taken if each.seconds > bound + each.excuse
    ]
    findings.counts["takeovers made late by a stall"] = sum(each.seconds > bound for each in taken)
    for promise, measured, limit in (
        ("clean stop", stops(story), settings.stop + 1 + CLOCKS),
        ("back again", returns(story), BACK_AGAIN),
    ):
        measured = list(measured)
        findings.times[promise] = [seconds for seconds, _ in measured]
        findings.violations[promise] = [f"{text}: {seconds:.2f} s" for seconds, text in measured if seconds > limit]
    findings.violations["clean stop"] += leftovers(story)
    findings.counts.update({what: len(found) for what, found in story.by_what.items()})
    return findings


def lost(story: Story, rows: Sequence[Row], ledger: Sequence[str]) -> Iterator[str]:
    """no loss: what was acknowledged has ended, or is there still (failed, or a caller deleted it)."""
    there = {row.token for row in rows}
    waiting = [row for row in rows if not row.failed and not row.scheduled]
    paid = set(ledger)
    completed = {story.token_of.get(line.id, "?") for line in story.by_what["completed"]}
    perhaps = {run.token for run in story.runs if run.how == "end" and _may_have_ended(story, run)}
    pays = {run.token for run in story.runs if run.name == "pay"}
    ended = (completed | perhaps) - pays | paid
    for token in sorted(story.tokens("acked") - there - ended - story.tokens("deleting")):
        yield f"{token} was acknowledged, and is gone without having ended"
    for token in sorted(pays & completed - paid - story.tokens("deleting")):
        yield f"{token} is said to be completed, and what its transaction wrote is not there"
    for row in waiting:
        yield f"{row.token} ({row.name}, id {row.id}) was still waiting when everything should have been done"


def _may_have_ended(story: Story, run: Run) -> bool:
    """Its handler returned; the end may have been written and not been heard of."""
    killed = any(line.pid == run.pid for line in story.by_what["killed"])
    return killed or bool(story.outages or story.by_what["disturbed"])


def traces(story: Story, rows: Sequence[Row], ledger: Sequence[str]) -> Iterator[str]:
    """no trace: nothing exists whose commit was never sent, or that was refused, or whose deletion was answered."""
    possible = story.tokens("sent") - story.tokens("refused") | {TICK}
    seen = {run.token for run in story.runs} | {row.token for row in rows if not row.scheduled} | {*ledger}
    for token in sorted(seen - possible):
        yield f"{token} was never committed, and is there"
    for token in sorted(story.tokens("deleted") & {row.token for row in rows}):
        yield f"{token} was deleted, and is there"


def accepted_twice(story: Story, rows: Sequence[Row], ledger: Sequence[str]) -> Iterator[str]:
    """fence: one accepted end for each claim."""
    for token, times in Counter(ledger).items():
        if times > 1:
            yield f"{token} is in the ledger {times} times"
    for token in sorted({*ledger} & {row.token for row in rows}):
        yield f"{token} is in the ledger, and was not completed with it"
    # A claim that the crash undid ends unsurely: its row is gone, because another completed it.
    unsure = {run.id for run in story.runs if story.forgotten(run.begun, run.over)}
    completed = Counter(line.id for line in story.by_what["completed"] if story.token_of.get(line.id) != TICK)
    for id, times in completed.items():
        if times > 1 and id not in unsure:
            yield f"{story.token_of.get(id)} (id {id}) was completed {times} times"
    for (id, attempt), times in Counter((line.id, line.note) for line in story.by_what["failed"]).items():
        if times > 1 and story.token_of.get(id) != TICK:
            yield f"attempt {attempt} of {story.token_of.get(id)} (id {id}) failed {times} times"


def second_holders(story: Story, settings: Settings) -> Iterator[str]:
    """one holder: no second start while the first one runs and its lease is alive."""
    for id, runs in story.runs_of.items():
        for at, run in enumerate(runs):
            for second in runs[at + 1 :]:
                until = _alive_until(story, run, second.begun, settings.lease)
                if second.begun < min(run.over, until - CLOCKS):
                    yield (
                        f"{run.token} (id {id}) was started by {second.pid} at {second.begun:.3f} while {run.pid} "
                        f"ran it since {run.begun:.3f}, with a lease until {until:.3f} at least"
                    )


def _alive_until(story: Story, run: Run, before: float, lease: float) -> float:
    # It may have handed back a claim of later; what it told of that may come a moment after others knew.
    given_back = max((at for at in story.given_back[run.pid, run.id] if at < before + 5), default=-math.inf)
    sent = [hold.sent for hold in story.holds[run.pid, run.id] if given_back < hold.sent and hold.received < before]
    return max(sent, default=-math.inf) + lease


class Takeover(NamedTuple):
    """One that happened."""

    seconds: float
    excuse: float
    """Seconds by which it may have come later, because claims had to wait."""
    text: str


def takeovers(story: Story, settings: Settings) -> Iterator[Takeover]:
    """takeover: from the death of a node to the start elsewhere of each task that it held.

    Counted from where somebody is there to take over. Left out: what had ended, or a caller deleted; where the heir
    died in its turn, or somebody stood still, or the database was away; suspects, which run one at a time; and what
    older tasks were before it that had to wait for a worker, too.
    """
    limit = settings.lease + settings.poll + 1
    acked = {line.id: line.at for line in story.by_what["acked"]}
    first = {id: min((run.begun for run in story.runs_of[id]), default=math.inf) for id in acked}
    nodes = Nodes(story)
    settled = defaultdict[tuple[int, int], list[float]](list)
    for what in ("completed", "failed", "released", "end", "raised", "cancelled", "lost"):
        for line in story.by_what[what]:
            settled[line.pid, line.id].append(line.at)
    claims: defaultdict[int, list[Line]] = defaultdict(list)
    for line in story.by_what["claimed"]:
        claims[line.id].append(line)
    deleted = {line.id for line in story.by_what["deleting"]}
    for death in story.by_what["killed"]:
        for id, lines in claims.items():
            before = [line for line in lines if line.at < death.at]
            vanished = {line.pid for line in before if line.pid in nodes.gone_at}
            if not before or before[-1].pid != death.pid or id in deleted or len(vanished) > 2:
                continue
            if any(at > before[-1].at for at in settled[death.pid, id]):
                continue
            start = next((run for run in story.runs_of[id] if run.begun > death.at), None)
            heir = next((line for line in lines if line.at > death.at), None)
            if start is None or heir is None or start.pid != heir.pid or story.was_quiet(death.at, start.begun):
                continue
            since = max(death.at, nodes.first_alive(start.begun))
            if any(other < id and acked[other] < death.at and first[other] > since + limit for other in acked):
                continue
            waits = [float(line.note) for line in story.by_what["waited"] if since < line.at < start.begun]
            # An executor that saw a stall takes nothing over for one beat interval: "later by that much then".
            excuse = settings.lease / 3 * (1 + len(waits)) + sum(waits) if waits else 0.0
            yield Takeover(
                start.begun - since,
                excuse,
                f"{start.token} (id {id}) of {death.pid}, killed, started in {start.pid}",
            )


class Nodes:
    """When each node was there."""

    def __init__(self, story: Story) -> None:
        self._there_at: dict[int, float] = {}
        for line in story.by_what["claimed"] + story.by_what["ready"]:
            if line.note != "producer":
                self._there_at[line.pid] = min(line.at, self._there_at.get(line.pid, math.inf))
        self.gone_at = {line.pid: line.at for what in ("killed", "terminated") for line in story.by_what[what]}

    def first_alive(self, until: float) -> float:
        """Since when one was there that still is at this time."""
        return min(at for pid, at in self._there_at.items() if self.gone_at.get(pid, math.inf) >= until)


def stops(story: Story) -> Iterator[tuple[float, str]]:
    """clean stop: from the call of stop() to its return."""
    stopping = {line.pid: line.at for line in reversed(story.by_what["stopping"])}
    stopped = {line.pid: line.at for line in story.by_what["stopped"]}
    for asked in story.by_what["terminated"]:
        began = stopping.get(asked.pid, asked.at)
        yield stopped.get(asked.pid, math.inf) - began, f"stop() in process {asked.pid}"


def leftovers(story: Story) -> Iterator[str]:
    """clean stop: the process ends well, and soon: leaving connect() has a second, and the interpreter needs some."""
    stopped = {line.pid: line.at for line in story.by_what["stopped"]}
    for line in story.by_what["exited"]:
        late = line.at - stopped.get(line.pid, -math.inf)
        if line.note != "0":
            yield f"process {line.pid} ended with {line.note}"
        elif late > EXIT:
            yield f"process {line.pid} ended {late:.2f} s after its executor had stopped"


def returns(story: Story) -> Iterator[tuple[float, str]]:
    """back again: from the database's return, or from when there was something to do, to the first completed task.

    Not where it went away once more before that was due: then its next return counts.
    """
    acked_at = {line.id: line.at for line in reversed(story.by_what["acked"])}
    completed = [(line.at, acked_at.get(line.id, math.inf)) for line in story.by_what["completed"]]
    for line in story.by_what["up"]:
        later = [(at, acked) for at, acked in completed if at > line.at]
        in_time = line.at + BACK_AGAIN
        if later and not any(line.at < down.at < min(later[0][0], in_time) for down in story.by_what["down"]):
            due = min(acked for _, acked in later)
            yield later[0][0] - min(max(line.at, due), later[0][0]), "the first task after the database's return"


def wrong_schedules(story: Story, rows: Sequence[Row], settings: Settings) -> Iterator[str]:
    """one schedule: one row, and after an accepted run the next one not before its time."""
    there = sum(row.scheduled for row in rows)
    if there != settings.schedules:
        yield f"{there} rows for {settings.schedules} schedules"
    ticks = [run for run in story.runs if run.token == TICK]
    for run, following in zip(ticks, ticks[1:], strict=False):
        accepted = [line for line in story.by_what["completed"] if line.id == run.id and line.pid == run.pid]
        if run.how != "end" or not any(run.over <= line.at < following.begun for line in accepted):
            continue
        # The end counts from the database's time at the claim, and the seconds since its reply was seen.
        hold = max((hold for hold in story.holds[run.pid, run.id] if hold.received <= run.begun), default=None)
        if hold is None:
            continue
        earliest = run.over + settings.interval - (run.begun - hold.sent) - CLOCKS
        if following.begun < earliest:
            yield f"a tick came {following.begun - run.over:.3f} s after one that was accepted"


def other_values(story: Story, rows: Sequence[Row]) -> Iterator[str]:
    """same value: each id comes back with the payload that was stored under it."""
    stored = {line.id: line.token for line in story.by_what["acked"] if line.id}
    came = [(run.id, run.token) for run in story.runs] + [(row.id, row.token) for row in rows]
    for id, token in came:
        if stored.get(id, token) != token:
            yield f"task {id} holds {token}, and {stored[id]} was stored"


def wrongly_failed(rows: Sequence[Row]) -> Iterator[str]:
    """isolation: only those fail that raise."""
    for row in rows:
        if row.failed and row.name != "broken":
            yield f"{row.token} ({row.name}, id {row.id}) failed"
