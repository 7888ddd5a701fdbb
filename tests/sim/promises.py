"""The promises of workq, judged by what the database and the handlers saw of one story. Pure: a world in, texts out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from sim.database import SECOND, Change
from sim.world import Call, Node, Run, Token, World
from workq_aiosqlite._bind import micros

FINISHES = ("succeed", "settle", "complete", "complete_schedule")
REPAIRS = ("retry", "retry_all", "reschedule", "disable", "delete")
WRITTEN = 1.5
"""Seconds in which the end of a run is in the table, where nothing is in the way."""
NOTICED = 1.0
"""Seconds in which a handler is told that its lease is lost, once a beat has said so."""
RESUMED = 5.0
"""Seconds after the database's return in which every node goes on."""
LONGEST_LEASE = 5.0


@dataclass(eq=False)
class Claim:
    """One claim of one row, and what became of it."""

    token: Token
    call: Call
    at: float
    until: int
    lost: int
    name: str
    schedule: str | None
    """The key of the schedule that it is a run of."""
    ended: tuple[str, float] | None = None
    """What ended it, and when: one of FINISHES or REPAIRS, "taken over", "undone"."""
    successor: Claim | None = None
    undone: bool = False
    """A crash of the server took back the claim, or a beat."""


@dataclass
class History:
    """All claims of a story, from the changes of the rows."""

    world: World
    claims: dict[Token, Claim] = field(default_factory=dict)
    inserted: set[int] = field(default_factory=set)
    changes: list[Change] = field(default_factory=list)
    violations: list[tuple[str, str]] = field(default_factory=list)
    _holders: dict[int, Claim | None] = field(default_factory=dict)
    _tokens: dict[int, int] = field(default_factory=dict)
    _counts: dict[int, int] = field(default_factory=dict)

    def broken(self, promise: str, what: str, change: Change) -> None:
        self.violations.append((promise, f"{what} (at {change.at:.3f} s)"))

    def play(self) -> None:
        self.changes = self.world.database.changes()
        for change in self.changes:
            if change.call == 0:
                self._undone(change)
                continue
            call = self.world.calls[change.call - 1]
            if call.name.startswith("insert"):
                self._inserted(change)
            elif call.name == "claim":
                self._claimed(change, call, change.call)
            elif call.name == "extend":
                self._held(change, call, "beat")
                assert change.new is not None
                claim = self._holders.get(change.new.id)
                if claim is not None:
                    claim.until = change.new.locked_until or 0
            elif call.name in FINISHES:
                self._finished(change, call)
            elif call.name in REPAIRS:
                self._repaired(change, call)

    def _undone(self, change: Change) -> None:
        assert change.old is not None
        assert change.new is not None
        old, new = change.old, change.new
        before = self._holders.get(old.id)
        if before is not None:
            before.undone = True
        after = self.claims.get((new.id, new.version, new.locked_by or 0)) if new.locked_until is not None else None
        if after is not None:
            after.undone, after.ended, after.until = True, None, new.locked_until or 0
        self._holders[old.id] = after

    def _inserted(self, change: Change) -> None:
        assert change.new is not None
        if change.new.id in self.inserted:
            self.broken("fence", f"the id {change.new.id} is given a second time", change)
        self.inserted.add(change.new.id)

    def _claimed(self, change: Change, call: Call, number: int) -> None:
        assert change.old is not None
        assert change.new is not None
        old, new = change.old, change.new
        before = self._holders.get(old.id)
        ours = old.locked_by in call.params["tokens"]
        # A machine's clock may have been set back since the node read it.
        now = change.now if self.world.database.kind == "server" else micros(call.params["now"])
        if old.locked_until is not None and not ours and old.locked_until >= now:
            self.broken("one holder", f"{call.node} claims task {old.id} from a lease that is alive", change)
        if old.failed_at is not None:
            self.broken("fence", f"{call.node} claims task {old.id}, which has failed", change)
        if old.run_at > now:
            self.broken("fence", f"{call.node} claims task {old.id} before it is due", change)
        if new.lost != old.lost + (old.locked_until is not None and not ours):
            self.broken("takeover", f"{call.node} counts {new.lost} vanished holders of task {old.id}", change)
        if new.version != old.version + 1:
            self.broken("fence", f"the claim of task {old.id} does not raise its version", change)
        token = new.locked_by or 0
        if self._tokens.setdefault(token, number) != number:
            self.broken("fence", f"{call.node} claims with a token that was drawn before", change)
        schedule = new.key if new.scheduled else None
        claim = Claim(
            (new.id, new.version, token), call, change.at, new.locked_until or 0, new.lost, new.name, schedule
        )
        if before is not None:
            before.ended, before.successor = ("taken over", change.at), claim
        self.claims[claim.token] = claim
        self._holders[new.id] = claim

    def _held(self, change: Change, call: Call, what: str) -> Claim | None:
        assert change.old is not None
        old = change.old
        claim = self._holders.get(old.id)
        meant = [tuple(lease[:3]) for lease in call.params.get("leases", call.params.get("endings", ()))]
        if not meant:
            meant = [(call.params["id"], call.params["version"], call.params["token"])]
        if claim is None or claim.token not in meant or claim.call.node is not call.node:
            whose = "nobody" if claim is None else str(claim.call.node)
            self.broken("fence", f"a {what} of {call.node} changes task {old.id}, which {whose} holds", change)
            return None
        return claim

    def _finished(self, change: Change, call: Call) -> None:
        assert change.old is not None
        claim = self._held(change, call, call.name)
        if claim is not None:
            claim.ended = (call.name, change.at)
        self._holders[change.old.id] = None
        old, new = change.old, change.new
        if old.scheduled and new is None:
            self.broken("one schedule", f"the row of schedule {old.name!r} is deleted", change)

    def _repaired(self, change: Change, call: Call) -> None:
        assert change.old is not None
        old = change.old
        now = change.now if self.world.database.kind == "server" else micros(call.params["now"])
        alive = old.locked_until is not None and old.locked_until >= now
        if call.name in ("reschedule", "disable") and alive:
            self.broken("one holder", f"{call.name} changes task {old.id}, which is running", change)
        if call.name.startswith("retry") and old.failed_at is None:
            self.broken("fence", f"{call.name} changes task {old.id}, which has not failed", change)
        claim = self._holders.get(old.id)
        if claim is not None:
            claim.ended = (call.name, change.at)
        self._holders[old.id] = None


def broken_promises(world: World, history: History) -> list[tuple[str, str]]:
    """Every promise that the story broke, and how."""
    found = [*world.violations, *history.violations]
    for promise, check in (
        ("no loss", no_loss),
        ("no trace", no_trace),
        ("fence", results),
        ("one holder", one_holder),
        ("takeover", takeover),
        ("one schedule", one_schedule),
        ("clean stop", clean_stop),
        ("back again", back_again),
        ("same value", same_value),
        ("isolation", isolation),
        ("fence", events),
    ):
        found += [(promise, text) for text in check(world, history)]
    return found


def no_loss(world: World, history: History) -> Iterator[str]:
    """A committed enqueue is finished, failed, deleted by a caller, or still there."""
    for n, sent in world.sent.items():
        if sent.became == "stored" and sent.id not in history.inserted:
            yield f"task {n} was acknowledged as {sent.id} and is not in the table"
    ids = Counter(sent.id for sent in world.sent.values() if sent.became == "stored")
    for id, times in ids.items():
        if times > 1:
            yield f"the id {id} was given to {times} tasks"
    for claim in history.claims.values():
        if claim.ended is not None and claim.ended[0] == "succeed":
            run = run_of(world, claim)
            if run is None or (run.how != "done" and not run.node.dead):
                yield f"task {claim.token[0]} was deleted as done, and its run was {'none' if run is None else run.how}"


def no_trace(world: World, history: History) -> Iterator[str]:
    """A rolled-back enqueue or complete has no effect."""
    started = {run.n for run in world.runs}
    for n, sent in world.sent.items():
        if sent.became == "rolled back" and n in started:
            yield f"task {n} was rolled back and ran"
    for claim in history.claims.values():
        if claim.ended is not None and claim.ended[0].startswith("complete"):
            run = run_of(world, claim)
            if run is None or not {"committed", "unknown"} & set(run.completed):
                yield f"task {claim.token[0]} was completed by a transaction that did not commit"
        if claim.ended is not None and claim.ended[0] == "succeed":
            run = run_of(world, claim)
            if run is not None and run.completed:
                yield f"task {claim.token[0]} counts as done although its complete(tx) was rolled back"


def results(world: World, history: History) -> Iterator[str]:
    """Nothing is written of a run that goes on."""
    for claim in history.claims.values():
        if claim.ended is None or claim.ended[0] not in ("succeed", "settle"):
            continue
        run = run_of(world, claim)
        if run is not None and not run.node.dead and (run.ended is None or run.ended > claim.ended[1]):
            yield f"a result of task {claim.token[0]} was written by {run.node} while its handler ran"


def one_holder(world: World, history: History) -> Iterator[str]:
    """No second start while the first holder's lease is alive, and none is robbed of a lease that it keeps alive."""
    claims = Counter(run.claim for run in world.runs)
    for token, times in claims.items():
        if times > 1:
            yield f"one claim of task {token[0]} was started {times} times"
    for run in world.runs:
        if run.lease != run.claim and claims[run.lease]:
            yield f"a lease of task {run.claim[0]} that was renewed for its handler was started as well"
    for run in world.runs:
        mine = history.claims.get(run.claim)
        heir = None if mine is None or mine.undone else mine.successor
        if mine is None or heir is None or heir.at >= run.at or misled(world, heir):
            continue
        # Where the machine's clock was set meanwhile, the lease was over before its node, which hears late, could know.
        if not any(mine.call.at < step <= heir.at for step in world.steps):
            yield f"task {run.claim[0]} was started on {run.node} after {heir.call.node} took it over ({run.at:.3f} s)"
    for run in world.runs:
        for other in world.runs:
            beside = run is not other and run.claim[0] == other.claim[0] and run.node is other.node
            # From complete(tx) on its transaction is its lease, and it is never cancelled.
            if not beside or run.completed:
                continue
            mine = history.claims.get(run.claim)
            if mine is not None and mine.successor is not None and misled(world, mine.successor):
                continue
            told = [at for at, event in run.node.events if event.kind == "lost" and event.id == run.claim[0]]
            lost = any(run.at <= at <= other.at for at in told)
            if run.at <= other.at < (run.ended or world.loop.time()) and not lost:
                yield f"task {run.claim[0]} was started a second time on {run.node}, where it ran ({other.at:.3f} s)"
    for claim in history.claims.values():
        thief = claim.successor
        if thief is None or claim.undone or thief.call.node is claim.call.node or misled(world, thief):
            continue
        lease = claim.call.params["lease"].total_seconds()
        holder, id = claim.call.node, claim.token[0]
        if world.database.kind == "server" and world.in_the_way(id, thief.at - lease - 1, thief.at):
            continue  # while a transaction has the row, it is the lease: no beat can extend another
        if holder.calm(thief.at - lease - 1, thief.at):
            yield f"{thief.call.node} took task {id} over from {holder}, which was well ({thief.at:.3f} s)"
    for at, run in world.missed:
        told = [when for when in (run.ended, run.cancelled) if when is not None]
        by = at + NOTICED
        if not (told and min(told) <= by) and run.node.calm(at, by) and world.loop.time() > by:
            yield f"the handler of task {run.claim[0]} on {run.node} was not told that its lease was lost ({at:.3f} s)"


def misled(world: World, claim: Claim) -> bool:
    """Was the machine's clock set while the claim was on its way, or just before its executor came?

    Then it took a lease that was over, by the clock that it read.
    """
    since = claim.at - LONGEST_LEASE - 1
    return any(claim.call.at < step <= claim.at or since < step <= claim.call.node.made for step in world.steps)


def takeover(world: World, history: History) -> Iterator[str]:
    """A dead node's tasks start elsewhere within lease + poll_interval + 1 s."""
    for claim, seconds, bound in takeovers(world, history):
        if seconds > bound:
            yield f"task {claim.token[0]} of {claim.call.node} was taken over after {seconds:.2f} s, not {bound:.2f}"


def takeovers(world: World, history: History) -> Iterator[tuple[Claim, float, float]]:
    """Claims of nodes that died, how long until the next one, and how long it may take; where nothing else is wrong."""
    for claim in history.claims.values():
        node = claim.call.node
        if not node.dead or claim.ended is None or claim.ended[0] != "taken over" or claim.successor is None:
            continue
        lease = claim.call.params["lease"].total_seconds()
        taken = claim.successor
        others = [other for other in world.nodes if other is not node and 0 < other.began <= node.died]
        able = [
            other
            for other in others
            if claim.name in other.names
            and (claim.schedule is None or claim.schedule in other.schedules)
            and other.calm(node.died - lease, taken.at)
        ]
        if not able or taken.lost >= 3 or claim.at > node.died or world.in_the_way(claim.token[0], node.died, taken.at):
            continue
        if taken.at < node.died:
            continue  # it had lost it before
        if any(node.died - lease < step <= taken.at for step in world.steps):
            continue  # a machine's clock that is set back makes leases longer
        yield claim, taken.at - node.died, lease + max(other.poll for other in able) + 1


def one_schedule(world: World, history: History) -> Iterator[str]:
    """One row per schedule, and its payload counts its runs."""
    rows = Counter(row[8] for row in world.database.rows("scheduled"))
    for key, times in rows.items():
        if times > 1:
            yield f"the schedule {key!r} has {times} rows"
    for key in world.schedules - set(rows):
        yield f"the schedule {key!r} has no row"
    for change in history.changes:
        if change.call == 0 or change.old is None or change.new is None or not change.old.scheduled:
            continue
        before, after = world.count_of(change.old.payload), world.count_of(change.new.payload)
        if after not in (before, before + 1):
            yield f"a schedule's payload went from {before} to {after}"
        name = world.calls[change.call - 1].name
        moved = name == "complete_schedule" or (name == "settle" and after == before + 1)
        if moved and change.new.run_at <= change.now - 60 * SECOND:
            yield "a schedule's next run lies in the past"


def clean_stop(world: World, history: History) -> Iterator[str]:
    """stop(t) returns within t + 1 s, and leaves nothing in the loop."""
    for node, at, patience, seconds in world.stops:
        if seconds > patience + 1.0001 and not any(since < at + seconds and until > at for since, until in node.frozen):
            yield f"stop({patience}) of {node} took {seconds:.3f} s ({at:.3f} s)"


def back_again(world: World, history: History) -> Iterator[str]:
    """After the database returns, work resumes within 5 s."""
    for _, _, until in world.outages:
        if any(since < until + RESUMED and end > until for _, since, end in world.outages):
            continue
        for node in world.nodes:
            if node.executor is None or not node.lives(until, until + RESUMED) or world.loop.time() < until + RESUMED:
                continue
            if any(begin < until + RESUMED and end > until for begin, end in node.troubles):
                continue
            # One whose workers are all busy has nothing to claim, and beats.
            loops = ("claim", "extend")
            later = [at for at, other, name in world.replies if other is node and name in loops and at > until]
            if 0 < node.began < until and not (later and later[0] <= until + RESUMED):
                yield f"{node} did not go on within {RESUMED:g} s after the database came back ({until:.3f} s)"


def same_value(world: World, history: History) -> Iterator[str]:
    """What enqueue accepted came back equal."""
    for run in world.runs:
        sent = world.sent.get(run.n)
        if sent is not None and run.payload != sent.payload:
            yield f"task {run.n} got {run.payload!r} instead of {sent.payload!r}"


def isolation(world: World, history: History) -> Iterator[str]:
    """The end of a run is written at once, whatever others do."""
    for run in world.runs:
        if run.ended is None or run.node.dead or world.in_the_way(run.claim[0], run.ended, run.ended + WRITTEN):
            continue
        if not run.node.calm(run.ended - 1, run.ended + WRITTEN) or world.loop.time() < run.ended + WRITTEN:
            continue
        claim = history.claims.get(run.lease)
        if claim is None or (claim.ended is not None and claim.ended[1] <= run.ended + WRITTEN):
            continue
        yield f"the end of task {run.claim[0]} on {run.node} was not written within {WRITTEN} s ({run.ended:.3f} s)"


def events(world: World, history: History) -> Iterator[str]:
    """`completed` is told once, of what is done and committed."""
    done: defaultdict[tuple[Node, int], list[Claim]] = defaultdict(list)
    for claim in history.claims.values():
        if claim.ended is not None and claim.ended[0] in FINISHES:
            done[claim.call.node, claim.token[0]].append(claim)
    schedules = world.schedule_ids()
    for node in world.nodes:
        told = Counter(event.id for _, event in node.events if event.kind == "completed")
        for id, times in told.items():
            if id in world.deleted or id in schedules:
                continue
            if (node, id) not in done and not world.crashed:
                yield f"{node} told that task {id} was completed, and it was not"
            if times > 1 and not world.crashed:
                yield f"{node} told {times} times that task {id} was completed"
        for (owner, id), claims in done.items():
            last = claims[-1]
            assert last.ended is not None
            if owner is not node or last.ended[0] not in ("succeed", "complete") or id in told:
                continue
            if node.calm(last.at, last.ended[1] + 3) and world.loop.time() > last.ended[1] + 3:
                run = run_of(world, last)
                lease = last.call.params["lease"].total_seconds()
                if run is not None and run.how != "done" and run.ended is not None:
                    late = run.ended > last.ended[1] + lease / 3
                    if late or world.in_the_way(id, run.ended, run.ended + lease / 3):
                        continue  # committed, and then an error, seen after the lease was over: workq cannot know
                if run is not None and run.ended is not None and node.calm(last.at, run.ended + 3):
                    yield f"{node} did not tell that task {id} was completed"


def run_of(world: World, claim: Claim) -> Run | None:
    """The run that a claim led to, or was renewed for."""
    for run in reversed(world.runs):
        if claim.token in (run.claim, run.lease):
            return run
    return None
