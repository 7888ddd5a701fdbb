"""The lease protocol as a machine without time: every state is a value, `steps` says what may happen next.

It is this code's protocol: what claims, beats and finishes match and change (workq/_sql), what a holder remembers and
believes (_claim, _held, _heartbeat, _finish), what users and open transactions do meanwhile, and what a crash of the
server undoes. A verdict on a lost reply is the code's own. The fields called ghosts are no part of it: they remember
who may do what, and the promises are judged by them. Where the clock would decide, both ways are gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, cast

from workq import _finish
from workq._task import Lease

FREE, ALIVE, OVER = 0, 1, 2
"""locked_until: null, in the future, in the past."""
FLIGHT, RUNS, ENDED, LOOKS = 0, 1, 2, 3
"""Of what is held: its claim's reply is on the way; the handler runs; its end is to be written; was not, so look."""
USER = 0
"""Whose open transaction: an application's, or that of a run's complete(tx), by the run's claim."""


class Row(NamedTuple):
    """One row of the table, as committed."""

    id: int
    scheduled: bool = False
    keyed: bool = False
    """It has the one key that there is."""
    version: int = 0
    token: int = 0
    lock: int = FREE
    failed: bool = False
    lost: int = 0
    owner: int = 0
    """Ghost: the claim whose result is awaited, 0 for none."""


class Held(NamedTuple):
    """One claimed task in the memory of a node."""

    id: int
    version: int
    token: int
    claim: int
    """Ghost: each claim statement has its number."""
    scheduled: bool
    vanished: int
    """How many holders vanished, as claimed."""
    phase: int = FLIGHT
    ending: str = ""
    unsure: bool = False
    lost: bool = False
    completing: bool = False
    believed: bool = True
    """By the node's own clock its lease is alive."""
    alive: bool = True
    """Ghost: by the promise, nobody else may start it."""
    exempt: bool = False
    """Ghost: a crash of the server may have undone its beats, or a user deleted the row."""
    accepted: bool = False
    """Ghost: the database took its result."""


class Node(NamedTuple):
    """One executor."""

    name: int = 0
    """Only where a faulty fence tells nodes apart: otherwise two that are in the same state are the same."""
    held: tuple[Held, ...] = ()
    unanswered: tuple[int, ...] = ()


class Left(NamedTuple):
    """How often what may go wrong, and what would go on for ever, may still happen."""

    claims: int = 3
    enqueues: int = 0
    users: int = 0
    replies: int = 0
    """That are lost; what was sent is done at once, later or never."""
    deaths: int = 0
    crashes: int = 0


class State(NamedTuple):
    rows: tuple[Row, ...]
    nodes: tuple[Node, ...]
    left: Left
    undone: tuple[tuple[Row, ...], ...] = ()
    """The table as a crash of the server may find it again: before what was committed without waiting for the disk."""
    txs: tuple[tuple[int, int], ...] = ()
    """Rows locked by open transactions that delete or complete them: id and claim."""
    late: tuple[Held, ...] = ()
    """Statements that nobody waits for any more, claims (without a row) and endings."""
    owed: tuple[int, ...] = ()
    """Ghost: tasks that were enqueued, and neither finished nor deleted by a user."""
    next_id: int = 1
    next_claim: int = 1


class World(NamedTuple):
    """What there is, and which mistakes are planted."""

    left: Left
    scheduled: bool = False
    keyed: bool = False
    completes: bool = False
    tasks: int = 1
    max_lost: int = 1
    faults: frozenset[str] = frozenset()


Label: TypeAlias = tuple[str, int]
Step: TypeAlias = tuple[Label, State, str]
"""What happens, what is then, and the promise that this broke."""


def start(world: World) -> State:
    """Two nodes, and some tasks that wait."""
    rows = tuple(
        Row(id, scheduled=world.scheduled and id == 1, keyed=world.keyed and id == 1)
        for id in range(1, world.tasks + 1)
    )
    names = (1, 2) if "fence by id, version and node" in world.faults else (0, 0)
    ids = tuple(row.id for row in rows)
    nodes = tuple(Node(name) for name in names)
    return State(rows, nodes, world.left, owed=ids, next_id=world.tasks + 1)


def broken(state: State) -> str:
    """Which promise does this state break by itself?"""
    ids = {row.id for row in state.rows}
    if not ids >= set(state.owed):
        return "no loss: an enqueued task is gone"
    if not ids <= set(state.owed):
        return "fence: a finished task is back"
    if sum(row.keyed and not row.failed for row in state.rows) > 1:
        return "key: two live tasks have it"
    if sum(row.scheduled for row in state.rows) > 1:
        return "one schedule: two rows"
    return ""


def steps(world: World, state: State) -> Iterator[Step]:
    """All that may happen next."""
    for at, node in enumerate(state.nodes):
        yield from _claims(world, state, at, node)
        yield from _replies(world, state, at, node)
        yield from _beats(world, state, at, node)
        for held in node.held:
            yield from _runs(world, state, at, held)
            yield from _writes(world, state, at, held)
        for token in node.unanswered:
            forgot = node._replace(unanswered=tuple(old for old in node.unanswered if old != token))
            yield ("two leases after a claim without a reply", token), _with_node(state, at, forgot), ""
        if state.left.deaths and (node.held or node.unanswered):
            yield _dies(state, at, node)
    yield from _late(world, state)
    yield from _time(state)
    yield from _users(world, state)
    if state.left.crashes:
        yield from _crashes(state)


# Small ways to make the next state.


def _with_node(state: State, at: int, node: Node) -> State:
    nodes = list(state.nodes)
    nodes[at] = node
    return state._replace(nodes=tuple(sorted(nodes)))


def _with_held(state: State, at: int, old: Held, *new: Held) -> State:
    node = state.nodes[at]
    kept = [held for held in node.held if held is not old]
    return _with_node(state, at, node._replace(held=tuple(sorted([*kept, *new]))))


def _stored(state: State, old: Row, new: Row | None, *, durable: bool = True) -> State:
    """The table with one row changed, or gone."""
    rows = tuple(row if row is not old else new for row in state.rows if row is not old or new is not None)
    return _committed(state, cast("tuple[Row, ...]", rows), durable=durable)


def _committed(state: State, rows: tuple[Row, ...], *, durable: bool) -> State:
    # One log: what waits for the disk takes along all that was committed before.
    undone = () if durable or not state.left.crashes else tuple(sorted({*state.undone, state.rows} - {rows}))
    return state._replace(rows=rows, undone=undone)


def _spend(state: State, what: str) -> State:
    return state._replace(left=state.left._replace(**{what: getattr(state.left, what) - 1}))


def _row(state: State, id: int) -> Row | None:
    return next((row for row in state.rows if row.id == id), None)


def _is_locked(state: State, id: int) -> bool:
    return any(tx[0] == id for tx in state.txs)


def _matches(world: World, row: Row, held: Held) -> bool:
    """What every write of a holder says of its row."""
    if "fence by id" in world.faults:
        return row.id == held.id
    if "fence by id and version" in world.faults:
        return (row.id, row.version) == (held.id, held.version)
    if "fence by id and token" in world.faults:
        return (row.id, row.token) == (held.id, held.token)
    return (row.id, row.version, row.token) == (held.id, held.version, held.token)


# Claims.


def _claims(world: World, state: State, at: int, node: Node) -> Iterator[Step]:
    if not state.left.claims or any(held.phase == FLIGHT for held in node.held):
        return  # one claim at a time, on a connection of its own
    due = [row for row in state.rows if _is_due(world, state, row, node.unanswered)]
    pages = [[row] for row in due] + ([due] if len(due) > 1 else [])
    for page in pages:
        claimed, taken = _taken(world, state, page, node.name, node.unanswered)
        held = [Held(row.id, row.version, row.token, row.owner, row.scheduled, row.lost) for row in taken]
        node_after = node._replace(held=tuple(sorted([*node.held, *held])))
        yield ("claim", page[0].id), _with_node(claimed, at, node_after), ""
    if state.left.replies:
        # The node gives up waiting, and remembers the token; the statement comes when it comes.
        claim = state.next_claim
        token = _token(world, node.name, claim)
        sent = Held(0, 0, token, claim, scheduled=False, vanished=node.name)
        after = _spend(_spend(state, "claims"), "replies")._replace(
            late=tuple(sorted([*state.late, sent])), next_claim=claim + 1
        )
        yield (
            ("claim without a reply", claim),
            _with_node(after, at, node._replace(unanswered=tuple(sorted({*node.unanswered, token})))),
            "",
        )


def _is_due(world: World, state: State, row: Row, mine: Sequence[int]) -> bool:
    if row.failed or _is_locked(state, row.id):
        return False
    if row.lock == FREE or row.token in mine:
        return True
    if "no takeover" in world.faults:
        return False
    return row.lock == OVER or "claims do not look at the lease" in world.faults


def _token(world: World, name: int, claim: int) -> int:
    if "fence by id, version and node" in world.faults:
        return 100 + name
    return 100 if "one token for all claims" in world.faults else claim


def _taken(world: World, state: State, page: Sequence[Row], name: int, mine: Sequence[int]) -> tuple[State, list[Row]]:
    claim = state.next_claim
    token = _token(world, name, claim)
    taken = [
        row._replace(
            token=token,
            lock=ALIVE,
            version=row.version + 1,
            lost=row.lost + (row.lock != FREE and row.token not in mine),
            owner=claim,
        )
        for row in page
    ]
    by_id = {row.id: row for row in taken}
    rows = tuple(by_id.get(row.id, row) for row in state.rows)
    return _spend(_committed(state, rows, durable=False), "claims")._replace(next_claim=claim + 1), taken


def _replies(world: World, state: State, at: int, node: Node) -> Iterator[Step]:
    """A claim's reply is read: what runs here is renewed, the rest begins or, too late or in a stop, is given back."""
    page = [held for held in node.held if held.phase == FLIGHT]
    if not page:
        return
    before = [held for held in node.held if held.phase != FLIGHT]
    for late in (False, True):
        held, wrong = list(before), ""
        for new in page:
            running = _renewable(world, held, new)
            if running is not None:
                held.remove(running)
                held.append(_renewed(running, new))
                continue
            held = [old for old in held if old[:2] != new[:2]]
            if late:
                held.append(new._replace(phase=ENDED, ending="back"))
            elif new.vanished > world.max_lost:
                held.append(new._replace(phase=ENDED, ending="park"))
            elif new.believed or "late replies are started" in world.faults:
                wrong = wrong or _wrong_start(state, at, new)
                held.append(new._replace(phase=RUNS))
            else:
                held.append(new._replace(phase=ENDED, ending="back"))
        after = _with_node(state, at, node._replace(held=tuple(sorted(held))))
        yield ("reply, too late" if late else "reply", page[0].id), after, wrong


def _renewable(world: World, held: Sequence[Held], new: Held) -> Held | None:
    if "a running task is started again" in world.faults:
        return None
    versions = [new.version - 1] if "no renewal at the same version" in world.faults else [new.version - 1, new.version]
    for version in versions:
        for old in held:
            if old[:2] == (new.id, version) and not old.lost:
                return old
    return None


def _renewed(old: Held, new: Held) -> Held:
    return old._replace(
        version=new.version, token=new.token, claim=new.claim, believed=new.believed,
        alive=new.alive, exempt=new.exempt, accepted=False,
    )  # fmt: skip


def _wrong_start(state: State, at: int, new: Held) -> str:
    for number, node in enumerate(state.nodes):
        for held in node.held:
            if held.id != new.id or held.phase != RUNS:
                continue
            if held.alive:
                return "one holder: a second start while the first lease is alive"
            # After a crash that undid two claims of a row, one of them the running one's, it is not known as the same.
            if number == at and not held.lost and held.version in (new.version - 1, new.version):
                return "one holder: a process started what it runs"
    return ""


# What a holder does.


def _beats(world: World, state: State, at: int, node: Node) -> Iterator[Step]:
    rows, wrong = list(state.rows), ""
    beaten: list[Held] = []
    for held in node.held:
        if held.phase == FLIGHT or held.lost:
            beaten.append(held)
            continue
        number = next((n for n, row in enumerate(rows) if _matches(world, row, held)), None)
        if number is None:
            stays = held.phase != RUNS or held.completing
            beaten.append(held if stays else held._replace(lost=True))
        elif _is_locked(state, held.id):
            beaten.append(held)
        else:
            if rows[number].owner != held.claim:
                wrong = "fence: a beat of a stale holder"
            rows[number] = rows[number]._replace(lock=ALIVE)
            beaten.append(held._replace(believed=True, alive=True, exempt=False))
    after = state if tuple(rows) == state.rows else _committed(state, tuple(rows), durable=False)
    after = _with_node(after, at, node._replace(held=tuple(sorted(beaten))))
    if after != state:
        yield ("beat", at), after, wrong


def _runs(world: World, state: State, at: int, held: Held) -> Iterator[Step]:
    """A handler ends, or calls complete(tx)."""
    if held.phase != RUNS:
        return
    if held.lost:
        yield ("the handler of a lost task ends", held.id), _with_held(state, at, held), ""
        return
    for ending in ("again", "fail", "back") if held.completing else ("done", "again", "fail", "back"):
        yield (f"end: {ending}", held.id), _with_held(state, at, held, held._replace(phase=ENDED, ending=ending)), ""
    row = _row(state, held.id)
    if world.completes and row is not None and _matches(world, row, held) and not _is_locked(state, held.id):
        after = _with_held(state, at, held, held._replace(completing=True))
        yield ("complete(tx)", held.id), after._replace(txs=tuple(sorted([*after.txs, (held.id, held.claim)]))), ""


def _writes(world: World, state: State, at: int, held: Held) -> Iterator[Step]:
    """A finish, or the look at a row that it left out."""
    if held.phase == ENDED:
        row = _row(state, held.id)
        if row is None or not _matches(world, row, held) or _is_locked(state, held.id):
            yield ("finish leaves it out", held.id), _with_held(state, at, held, held._replace(phase=LOOKS)), ""
        else:
            after, wrong = _accepted(world, state, row, held)
            yield ("finish", held.id), _forget(after, at, held), wrong
        if state.left.replies:
            # The entry is sent again; this one comes when it comes.
            after = _with_held(_spend(state, "replies"), at, held, held._replace(unsure=True))
            after = after._replace(late=tuple(sorted([*after.late, held])))
            yield ("finish without a reply", held.id), after, ""
    elif held.phase == LOOKS:
        row = _row(state, held.id)
        seen = None if row is None else (row.version, row.token)
        within = held.believed or "a gone row was always our own doing" in world.faults
        said = verdict(
            Lease(held.id, held.version, held.token),
            seen,
            settled=held.ending != "done" or held.scheduled,
            unsure=held.unsure,
            completing=held.completing,
            scheduled=held.scheduled,
            within_lease=within,
        )
        if held.completing and said == "lost" and "complete(tx) believes any change" in world.faults:
            said = "completed"
        if said == "locked":
            yield ("look: locked", held.id), _with_held(state, at, held, held._replace(phase=ENDED)), ""
        else:
            wrong = _wrong_telling(held, said, row)
            yield (f"look: {said}", held.id), _with_held(state, at, held), wrong


@cache
def verdict(
    lease: Lease,
    seen: tuple[int, int] | None,
    *,
    settled: bool,
    unsure: bool,
    completing: bool,
    scheduled: bool,
    within_lease: bool,
) -> str:
    """What the code makes of a row that its finish left out."""
    held = SimpleNamespace(lease=lease, completing=completing, committed=False, moves_to=() if scheduled else None)
    entry = SimpleNamespace(held=held, ending=SimpleNamespace(settled=() if settled else None), unsure=unsure)
    row = None if seen is None else Lease(lease.id, *seen)
    return _finish.verdict(cast(Any, entry), row, within_lease=within_lease)


def _wrong_telling(held: Held, said: str, row: Row | None) -> str:
    """A result is told as taken that was not."""
    if said == "lost" or held.accepted or held.exempt:
        return ""
    if row is None and held.completing:
        return ""  # nobody can say whose deletion was the first change
    if row is not None and held.scheduled and held.completing and row.version > held.version + 1:
        return ""  # nor whether complete(tx) was the first of several changes
    return f"fence: {said} was told of a result that was not taken"


def _accepted(world: World, state: State, row: Row, held: Held) -> tuple[State, str]:
    """The database takes a holder's result."""
    wrong = ""
    if row.owner != held.claim:
        wrong = "fence: the result of a stale holder was taken"
    durable = "finishes do not wait for the disk" not in world.faults
    new = _written(world, row, held.ending)
    after = _stored(state, row, new, durable=durable)
    if new is None:
        after = after._replace(owed=tuple(id for id in state.owed if id != row.id or row.scheduled))
    return _marked(after, held), wrong


def _written(world: World, row: Row, ending: str) -> Row | None:
    after = row._replace(lock=FREE, version=row.version + 1, owner=0)
    match ending:
        case "done" if not row.scheduled or "a schedule's success deletes it" in world.faults:
            return None
        case "done" | "again":
            return after._replace(lost=0)
        case "fail":
            return after._replace(lost=0, failed=True)
        case "back":
            return after
        case _:
            return after._replace(failed=True)


def _marked(state: State, done: Held) -> State:
    """Wherever this claim is held, its result was taken: the promise of its lease is over."""
    nodes = tuple(
        node._replace(
            held=tuple(
                held._replace(accepted=True, alive=False) if (held.id, held.claim) == (done.id, done.claim) else held
                for held in node.held
            )
        )
        for node in state.nodes
    )
    return state._replace(nodes=nodes)  # in their order, by which callers know them


def _forget(state: State, at: int, done: Held) -> State:
    node = state.nodes[at]
    kept = tuple(held for held in node.held if (held.id, held.claim) != (done.id, done.claim))
    return _with_node(state, at, node._replace(held=kept))


# What happens to them.


def _dies(state: State, at: int, node: Node) -> Step:
    claims = {held.claim for held in node.held}
    after = _spend(_with_node(state, at, Node(node.name)), "deaths")
    return ("a node dies", at), after._replace(txs=tuple(tx for tx in state.txs if tx[1] not in claims)), ""


def _late(world: World, state: State) -> Iterator[Step]:
    """A statement arrives that nobody waits for any more, or never will."""
    for sent in state.late:
        without = list(state.late)
        without.remove(sent)
        rest = state._replace(late=tuple(without))
        yield ("a statement is lost", sent.claim), rest, ""
        if sent.id:
            row = _row(state, sent.id)
            if row is not None and _matches(world, row, sent) and not _is_locked(state, sent.id):
                after, wrong = _accepted(world, rest, row, sent)
                yield ("a late finish", sent.id), after, wrong
            continue
        for row in state.rows:
            if _is_due(world, state, row, ()):
                # Its number was drawn and paid for when it was sent.
                before = rest._replace(next_claim=sent.claim, left=rest.left._replace(claims=rest.left.claims + 1))
                after, _ = _taken(world, before, [row], sent.vanished, ())
                yield ("a late claim", row.id), after._replace(next_claim=state.next_claim), ""


def _time(state: State) -> Iterator[Step]:
    """Leases run out: in the table, and on the clocks of the nodes, which are never behind it."""
    for row in state.rows:
        if row.lock != ALIVE:
            continue
        over = _stored(state, row, row._replace(lock=OVER))._replace(undone=state.undone)
        nodes = tuple(
            node._replace(
                held=tuple(
                    held._replace(believed=held.exempt and held.believed, alive=False)
                    if held[:3] == (row.id, row.version, row.token)
                    else held
                    for held in node.held
                )
            )
            for node in state.nodes
        )
        yield ("a lease runs out", row.id), over._replace(nodes=tuple(sorted(nodes))), ""
    for at, node in enumerate(state.nodes):
        for held in node.held:
            if not held.believed:
                continue
            row = _row(state, held.id)
            if held.exempt or row is None or held[:3] != (row.id, row.version, row.token):
                doubts = held._replace(believed=False, alive=False)
                yield ("a lease runs out, by the node's clock", held.id), _with_held(state, at, held, doubts), ""


def _users(world: World, state: State) -> Iterator[Step]:
    if world.scheduled and ("start makes a row each time" in world.faults or not any(r.scheduled for r in state.rows)):
        yield ("start makes the schedule", state.next_id), _inserted(world, state, scheduled=True), ""
    if state.left.enqueues:
        after = _inserted(world, _spend(state, "enqueues"))
        taken = world.keyed and any(row.keyed and not row.failed for row in state.rows)
        if not taken or "enqueue does not look at the key" in world.faults:
            yield ("enqueue", state.next_id), after, ""
    for tx in state.txs:
        yield from _tx_ends(world, state, tx)
    if not state.left.users:
        return
    spent = _spend(state, "users")
    for row in state.rows:
        if _is_locked(state, row.id):
            continue  # it waits
        yield ("delete", row.id), _deleted(spent, row), ""
        yield ("delete in a transaction", row.id), spent._replace(txs=tuple(sorted([*state.txs, (row.id, USER)]))), ""
        if row.failed:
            taken = row.keyed and any(other.keyed and not other.failed for other in state.rows)
            if not taken or "retry does not look at the key" in world.faults:
                yield ("retry", row.id), _stored(spent, row, _repaired(world, row, "retry", failed=False)), ""
            continue
        if row.lock != ALIVE or "repairs do not look at the lease" in world.faults:
            yield ("reschedule", row.id), _stored(spent, row, _repaired(world, row, "reschedule", failed=False)), ""
            yield ("disable", row.id), _stored(spent, row, _repaired(world, row, "disable", failed=True)), ""


def _deleted(state: State, row: Row) -> State:
    """By a user: no result of a run is owed any more."""
    gone = _stored(state, row, None)._replace(owed=tuple(id for id in state.owed if id != row.id))
    nodes = [
        node._replace(
            held=tuple(
                sorted(held._replace(alive=False, exempt=True) if held.id == row.id else held for held in node.held)
            )
        )
        for node in state.nodes
    ]
    return gone._replace(nodes=tuple(sorted(nodes)))


def _inserted(world: World, state: State, *, scheduled: bool = False) -> State:
    id = state.next_id
    if "ids are used again" in world.faults:
        id = max((row.id for row in state.rows), default=0) + 1
    rows = (*state.rows, Row(id, scheduled=scheduled, keyed=world.keyed and not scheduled))
    durable = "enqueues do not wait for the disk" not in world.faults
    after = _committed(state, tuple(sorted(rows)), durable=durable)
    return after._replace(owed=tuple(sorted({*state.owed, id})), next_id=state.next_id + 1)


def _repaired(world: World, row: Row, what: str, *, failed: bool) -> Row:
    if what == "reschedule" and "reschedule without a fence" in world.faults:
        return row._replace(lock=FREE, owner=0)
    token = row.token if f"{what} leaves the token" in world.faults else 0
    lost = 0 if what == "retry" else row.lost
    return row._replace(version=row.version + 1, token=token, lock=FREE, failed=failed, lost=lost, owner=0)


def _tx_ends(world: World, state: State, tx: tuple[int, int]) -> Iterator[Step]:
    """An open transaction is committed or rolled back: a user's delete, or a run's complete."""
    id, claim = tx
    rest = state._replace(txs=tuple(other for other in state.txs if other != tx))
    yield ("rollback", id), rest, ""
    row = _row(state, id)
    assert row is not None
    if claim == USER:
        yield ("commit", id), _deleted(rest, row), ""
        return
    held = Held(id, row.version, row.token, claim, row.scheduled, 0, ending="done")
    after, wrong = _accepted(world, rest, row, held)
    yield ("commit", id), after, wrong


def _crashes(state: State) -> Iterator[Step]:
    """The server: open transactions, replies and statements on the way are gone, and what had not reached the disk."""
    for rows in {*state.undone, state.rows}:
        found = {row.id: row for row in rows}
        nodes: list[Node] = []
        for node in state.nodes:
            held: list[Held] = []
            unanswered = {*node.unanswered}
            for old in node.held:
                if old.phase == FLIGHT:
                    unanswered.add(old.token)
                    continue
                kept = found.get(old.id) == _row(state, old.id)
                held.append(old._replace(exempt=True, alive=old.alive and kept))
            nodes.append(Node(node.name, tuple(sorted(held)), tuple(sorted(unanswered))))
        after = _spend(state, "crashes")._replace(rows=rows, nodes=tuple(sorted(nodes)), undone=(), txs=(), late=())
        yield ("the server crashes", len(state.undone)), after, ""
