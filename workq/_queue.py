"""The queue: one table, for those who put tasks in, look after them, or wait for them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from enum import Enum
from functools import partial
from typing import Any, Final, TypeVar, cast, overload

from typing_extensions import Unpack

from workq import _json, _migrate
from workq._checks import (
    check_headers,
    check_id,
    check_instant,
    check_key,
    check_name,
    check_pattern,
    count,
    functions,
    positive,
)
from workq._codec import codec_for
from workq._errors import KeyTaken, PayloadError
from workq._event import Hook
from workq._hub import Hub
from workq._new import NO_PAYLOAD, Item, NewTask, Options, item_of
from workq._place import Callers, Ours, Place
from workq._spec import P, Spec, Target, name_of, runs_on_the_loop
from workq._task import State, TaskRow
from workq._wait import wait_until_done
from workq.dialect import Dialect, Transaction, UniqueViolation
from workq.sqlalchemy import is_sqlalchemy

T = TypeVar("T")


class _Unset(Enum):
    UNCHANGED = 0


UNCHANGED: Final = _Unset.UNCHANGED
ENCODED = "retry does not know what the Spec declares: give payload=json.loads(spec.codec().dumps(value))"


TRIES_ALONE = 10
"""Of one task whose key is taken just after each look."""


class Queue:
    """One table of tasks in your database. Making one does no I/O and needs no running loop.

    db: `workq_asyncpg.Postgres(pool)`, `workq_aiosqlite.SQLite(path)`, or what `workq.connect(url)` gives.
    on_event: functions that are told of every event; they run in the event loop, so keep them fast.
    max_payload: bytes of JSON a payload may have.
    headers: called at every enqueue; what it returns travels to the handler (a trace id, say).
    redact: sees every error text before it is stored, and returns what is to be stored.

    On every writing method `tx` comes first: your connection with an open transaction, which you commit or roll back,
    or None for "on the queue's own connection, committed at once".
    """

    def __init__(
        self,
        db: Dialect,
        /,
        *,
        on_event: Sequence[Hook] = (),
        max_payload: int = 1 << 20,
        headers: Callable[[], Mapping[str, str]] | None = None,
        redact: Callable[[str], str] | None = None,
    ) -> None:
        if not hasattr(db, "sql") or not hasattr(db, "fetch"):
            raise TypeError(
                f"Queue() takes workq_asyncpg.Postgres(pool), workq_aiosqlite.SQLite(path) or what workq.connect(url) "
                f"gives, not {type(db).__module__}.{type(db).__qualname__}"
            )
        hooks = functions("on_event", on_event)
        for hook in hooks:
            if not callable(hook) or runs_on_the_loop(hook):
                raise TypeError(f"an event hook is a plain function (use enqueue_soon in it), not {hook!r:.80}")
        if headers is not None and (not callable(headers) or runs_on_the_loop(headers)):
            raise TypeError(f"headers is a plain function that returns the headers, not {headers!r:.80}")
        if redact is not None and (not callable(redact) or runs_on_the_loop(redact)):
            raise TypeError(f"redact is a plain function from error text to error text, not {redact!r:.80}")
        self._headers = headers
        self.hub: Hub = Hub(db, hooks, count("max_payload", max_payload, least=1), redact)
        """For executors; not meant for applications."""

    def __repr__(self) -> str:
        return f"<Queue {self.hub.dialect.sql.names.table}>"

    async def migrate(self) -> None:
        """Make the table, or bring it up to date. Every process may call it at its start. (Q: Migrate.)

        Raises SchemaError if the table is of a newer workq, and what the database raises for a role without rights.
        """
        await _migrate.migrate(self.hub.dialect)

    def schema_sql(self) -> str:
        """The SQL that makes the whole schema, for migration tools and for roles that may not create tables."""
        return _migrate.schema_sql(self.hub.dialect)

    @overload
    async def enqueue(
        self, tx: Transaction | None, target: Spec[None], /, **options: Unpack[Options]
    ) -> int | None: ...
    @overload
    async def enqueue(
        self, tx: Transaction | None, target: Spec[P], payload: P, /, **options: Unpack[Options]
    ) -> int | None: ...
    @overload
    async def enqueue(
        self, tx: Transaction | None, target: str, payload: object = None, /, **options: Unpack[Options]
    ) -> int | None: ...
    async def enqueue(
        self, tx: Transaction | None, target: Target, payload: object = NO_PAYLOAD, /, **options: Unpack[Options]
    ) -> int | None:
        """Store a task inside your transaction: it exists if and only if that commits.

        target: a Spec, a handler, or a bare name; for a name only JSON values are taken, and the queue is "" unless
        `queue=` names it. Options: delay (seconds) or run_at (aware datetime), key, priority, queue, headers.

        Returns the new id, or None if a live task has the key. While another open transaction holds that key, this
        waits for it.

        Raises PayloadError, ValueError or TypeError, before anything is sent, for what cannot be stored; what the
        database raises; with None, OutcomeUnknown if its reply was lost.
        """
        self._check_tx(tx)
        item = self._item(_new(target, payload, options))
        if tx is None:
            return await self.hub.send(item)
        (id,) = await self.hub.store.insert(Callers(self.hub.dialect, tx), [item])
        self.hub.enqueued([(item, id)], tx)
        return id

    async def enqueue_many(self, tx: Transaction | None, tasks: Iterable[NewTask], /) -> list[int | None]:
        """Store many tasks with one statement. Returns the id of each, None for one whose key a live task has.

        Raises as `enqueue`; if one task cannot be stored, none is.
        """
        self._check_tx(tx)
        common = self._common_headers()
        items: list[Item] = []
        for place, task in enumerate(tasks):
            if not isinstance(task, NewTask):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"enqueue_many takes workq.NewTask(target, payload, ...), not {task!r:.80}")
            try:
                items.append(item_of(task, self.hub.max_payload, common))
            except Exception as error:
                error.add_note(f"in the task at position {place}")
                raise
        if tx is not None:
            ids = await self.hub.store.insert(Callers(self.hub.dialect, tx), items)
        else:
            ids = await self.hub.own(
                lambda connection: self.hub.store.insert(Ours(connection, self.hub.inserts), items), unsure=True
            )
        self.hub.enqueued(zip(items, ids, strict=True), tx)
        return ids

    @overload
    def enqueue_soon(self, target: Spec[None], /, **options: Unpack[Options]) -> None: ...
    @overload
    def enqueue_soon(self, target: Spec[P], payload: P, /, **options: Unpack[Options]) -> None: ...
    @overload
    def enqueue_soon(self, target: str, payload: object = None, /, **options: Unpack[Options]) -> None: ...
    def enqueue_soon(self, target: Target, payload: object = NO_PAYLOAD, /, **options: Unpack[Options]) -> None:
        """Store a task shortly, for hooks and other synchronous code in the event loop.

        It is in no transaction, and lost if the process dies first; `stop()` and leaving `connect` wait for it, and a
        failure is logged. Raises as `enqueue` for what cannot be stored, and RuntimeError outside a running loop.
        """
        item = self._item(_new(target, payload, options))
        self.hub.soon(item)

    async def retry(
        self,
        tx: Transaction | None,
        id: int,
        /,
        *,
        run_at: datetime | None = None,
        payload: object = UNCHANGED,
    ) -> bool:
        """Set a failed task free: it is waiting again, its error, attempts and lost count cleared.

        run_at: when; None: now. payload: another one, as plain JSON, or a typed value encoded by its own type; for any
        other, `json.loads(spec.codec().dumps(value))`. (W: Retry; Q: Enable, Requeue, ReplacePayloadJSON.) Returns
        False if there is no such failed task.

        Raises KeyTaken if a live task has its key (your transaction stays usable), and as `enqueue`.
        """
        self._check_tx(tx)
        checked = check_id(id)
        at = None if run_at is None else check_instant("run_at", run_at)
        text = None if payload is UNCHANGED else self.hub.checked(_json_text(payload))
        try:
            repaired = await self._do(tx, lambda place: self.hub.store.retry(place, checked, at, text))
            if repaired is None:
                row = await self._do(tx, lambda place: self.hub.store.get(place, checked))
                if row is None or row.state != "failed" or row.key is None or row.scheduled:
                    return False
                raise UniqueViolation
        except UniqueViolation:
            raise KeyTaken(
                f"task {checked} cannot be retried while a live task has its key (find(key=...) shows it): "
                "wait for its end, or delete one of the two"
            ) from None
        self.hub.repaired([repaired], tx)
        return True

    async def retry_all(
        self,
        tx: Transaction | None,
        /,
        *,
        target: Target | None = None,
        queue: str | None = None,
        error_like: str | None = None,
        limit: int = 1000,
    ) -> int:
        """Set failed tasks free, the longest failed first, at most `limit`. Returns how many.

        error_like: only those whose error matches this SQL pattern (`%timeout%`), whatever the case. Of several with
        one key only one is set free, and none whose key a live task has. Where others enqueue these keys meanwhile,
        it goes on in smaller groups; with None as tx each of them is committed by itself.

        Raises KeyTaken if even a single task meets its key taken again and again.
        """
        self._check_tx(tx)
        name = None if target is None else name_of(target)
        if queue is not None:
            check_name("queue", queue, empty=True)
        if error_like is not None:
            check_pattern(error_like)
        most = _limit(limit)
        done, group, refused = 0, most, 0
        while done < most:
            asked = min(group, most - done)
            try:
                repaired = await self._do(
                    tx,
                    partial(self.hub.store.retry_all, name=name, queue=queue, error_like=error_like, limit=asked),
                )
            except UniqueViolation:
                # Someone committed one of the keys after the statement had looked: nothing was done, and the next look
                # sees it. Half as many meet half as many of those.
                refused = refused + 1 if asked == 1 else 0
                if refused == TRIES_ALONE:
                    raise KeyTaken("the key of a failed task is enqueued again all the time") from None
                group = max(asked // 2, 1)
                continue
            self.hub.repaired(repaired, tx)
            done += len(repaired)
            if len(repaired) < asked:
                break
            group, refused = 2 * group, 0
        return done

    async def reschedule(self, tx: Transaction | None, id: int, /, *, run_at: datetime | None = None) -> bool:
        """Move a waiting task to another time; None: now. Returns False if there is no such waiting task."""
        self._check_tx(tx)
        checked = check_id(id)
        at = None if run_at is None else check_instant("run_at", run_at)
        queue = await self._do(tx, lambda place: self.hub.store.reschedule(place, checked, at))
        if queue is None:
            return False
        self.hub.ring(queue, tx)
        return True

    async def disable(self, tx: Transaction | None, id: int, /) -> bool:
        """Park a waiting task: failed, with the error "disabled", until `retry`. Frees its key; no event.

        Returns False if there is no such waiting task. (Q: a disabled task.)
        """
        self._check_tx(tx)
        checked = check_id(id)
        return await self._do(tx, lambda place: self.hub.store.disable(place, checked))

    async def delete(self, tx: Transaction | None, id: int, /) -> bool:
        """Delete a task, also a running one: what its handler still does ends in nothing. Returns False if none."""
        self._check_tx(tx)
        checked = check_id(id)
        return await self._do(tx, lambda place: self.hub.store.delete(place, checked))

    async def get(self, id: int, /, *, tx: Transaction | None = None) -> TaskRow | None:
        """The task as it stands, or None."""
        self._check_tx(tx)
        checked = check_id(id)
        return await self._do(tx, lambda place: self.hub.store.get(place, checked))

    async def find(
        self,
        *,
        state: State | None = None,
        target: Target | None = None,
        queue: str | None = None,
        key: str | None = None,
        limit: int = 100,
        after: int = 0,
        tx: Transaction | None = None,
    ) -> list[TaskRow]:
        """Tasks by id, those of this state, name, queue and key; `after=` the last id of the page before."""
        self._check_tx(tx)
        if state not in (None, "waiting", "running", "failed"):
            raise ValueError(f"state is 'waiting', 'running' or 'failed', not {state!r:.80}")
        name = None if target is None else name_of(target)
        if queue is not None:
            check_name("queue", queue, empty=True)
        if key is not None:
            check_key(key)
        most, first = _limit(limit), check_id(after)
        return await self._do(
            tx,
            lambda place: self.hub.store.find(
                place, state=state, name=name, queue=queue, key=key, limit=most, after=first
            ),
        )

    async def wait(self, *targets: Target, timeout: float | None = None) -> None:
        """Wait until no committed, due, unfailed task of these kinds is left (none given: of any), in any queue.

        Waiting and running ones count; failed, backing-off and future ones do not, nor a schedule that nobody here
        serves. The hooks of this process have run for them when it returns. For tests, and for draining.

        timeout: seconds; None: for as long as it takes.

        Raises TimeoutError, saying what is left and whether an executor here serves it.
        """
        names = {name_of(target) for target in targets} or None
        self.hub.in_loop()
        await wait_until_done(self.hub, names, None if timeout is None else positive("timeout", timeout, zero=True))

    def _check_tx(self, tx: object) -> None:
        if tx is not None and not hasattr(tx, "execute"):
            is_sqlalchemy(tx)  # which knows better what is wrong with an engine or a session maker
            raise TypeError(
                f"the first argument is your transaction's connection, or None to commit at once, not {tx!r:.80}"
            )

    def _common_headers(self) -> Mapping[str, str] | None:
        return None if self._headers is None else check_headers(self._headers())

    def _item(self, task: NewTask) -> Item:
        return item_of(task, self.hub.max_payload, self._common_headers())

    async def _do(self, tx: Transaction | None, work: Callable[[Place], Awaitable[T]]) -> T:
        if tx is not None:
            return await work(Callers(self.hub.dialect, tx))
        return await self.hub.own(lambda connection: work(Ours(connection)))


def _new(target: Target, payload: object, options: Options) -> NewTask:
    return NewTask(cast(Any, target), payload, **options)


def _json_text(payload: object) -> str:
    """A payload given to `retry`: plain JSON, or a typed value encoded by its own type."""
    kind: type[Any] = type(payload)
    plain = payload is None or kind in (bool, int, float, str, list, dict)
    try:
        return _json.dumps(payload) if plain else codec_for(kind).dumps(payload)
    except TypeError as error:
        raise TypeError(f"a {kind.__qualname__} cannot be encoded by its own type. {ENCODED}") from error
    except PayloadError as error:
        found, declares, _ = str(error).partition(f" Give {_json.NATIVE}")
        if declares:
            raise PayloadError(f"{found} {ENCODED}") from None
        raise


def _limit(limit: object) -> int:
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise TypeError(f"limit must be an int, not {limit!r:.80}")
    if not 1 <= limit <= 1_000_000:
        raise ValueError(f"limit must be from 1 to 1,000,000, not {limit}")
    return limit
