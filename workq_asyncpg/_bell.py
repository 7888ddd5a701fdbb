"""Wake-ups: when does a caller's transaction end, and who rang? All of it hints; polling alone suffices."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workq.dialect import Statement, Unreachable, Urgency
from workq_asyncpg._connection import PostgresConnection, end, ended

if TYPE_CHECKING:
    import asyncpg
    from asyncpg.pool import PoolConnectionProxy

logger = logging.getLogger("workq")

ALIVE = Statement("select pg_catalog.current_setting('transaction_read_only') = 'off'", writes=False)
LOOK_EVERY = 0.001
"""Seconds between looks at the open transactions of callers, if they are few."""
LOOKS_AT_COMMIT = 5
"""Looks that find COMMIT under way before a ring: it may be over, and a transaction begun by hand have followed it."""
ALIVE_EVERY = 10.0
"""Seconds between round trips on the listening connection: a dead one never reports anything by itself."""


class Doorbell:
    """Calls back when a transaction of the caller's is over.

    A look every millisecond at all of them costs some microseconds each. It compares asyncpg's object for the
    transaction: `is_in_transaction()` alone misses rings for seconds on a connection that is used again at once. A
    transaction begun by hand has no such object; there asyncpg tells of every statement, which costs 30 us. NOTIFY
    inside the caller's transaction takes a lock of the whole database at commit (8,000 commits a second without, 3,700
    with it, 8,300 with this).
    """

    def __init__(self) -> None:
        self._told: weakref.WeakKeyDictionary[Any, list[Callable[[], None]]] = weakref.WeakKeyDictionary()
        self._watched: dict[int, _Watched] = {}
        self._timer: asyncio.TimerHandle | None = None

    def after(self, conn: asyncpg.Connection[Any] | PoolConnectionProxy[Any], callback: Callable[[], None]) -> None:
        """Call `callback` after the statement that ends the connection's transaction."""
        raw: Any = getattr(conn, "_con", conn)  # the proxy dies at release, the connection below it lives on
        transaction = getattr(raw, "_top_xact", None)
        if transaction is None:
            self._be_told(raw, callback)
            return
        watched = self._watched.get(id(raw))
        if watched is None or watched.transaction is not transaction:
            if watched is not None:
                watched.ring()
            self._watched[id(raw)] = _Watched(raw, transaction, [callback])
        elif callback not in watched.callbacks:
            watched.callbacks.append(callback)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY, self._look)

    def _look(self) -> None:
        self._timer = None
        for key, watched in list(self._watched.items()):
            if watched.is_over():
                del self._watched[key]
                watched.ring()
        if self._watched:
            # A look at many costs more, and comes more rarely.
            pause = LOOK_EVERY * (1 + len(self._watched) // 16)
            self._timer = asyncio.get_running_loop().call_later(pause, self._look)

    def _be_told(self, raw: Any, callback: Callable[[], None]) -> None:
        waiting = self._told.get(raw)
        if waiting is not None:
            if callback not in waiting:
                waiting.append(callback)
            return
        self._told[raw] = [callback]
        reference = weakref.ref(raw)

        def logged(query: Any) -> None:
            connection = reference()
            if connection is None or (connection.is_in_transaction() and not ends_transaction(query.query)):
                return
            # asyncpg does not clear these at release.
            connection.remove_query_logger(logged)
            for ring in self._told.pop(connection, ()):
                ring()

        raw.add_query_logger(logged)


@dataclass(slots=True)
class _Watched:
    """A transaction of the caller's, and whom to call after it."""

    connection: Any
    transaction: object
    callbacks: list[Callable[[], None]]
    commits: int = 0
    """Looks at which COMMIT seemed to be under way."""

    def is_over(self) -> bool:
        raw = self.connection
        if raw.is_closed():
            return True
        if raw._top_xact is not None:
            return raw._top_xact is not self.transaction
        # asyncpg forgets the object before it sends COMMIT. Or that is over, and somebody began another one by hand.
        self.commits += 1
        if self.commits == LOOKS_AT_COMMIT:
            self.ring()
        return not raw.is_in_transaction()

    def ring(self) -> None:
        for callback in self.callbacks:
            try:
                callback()
            except Exception:
                logger.exception("a ring failed")


def ends_transaction(text: str) -> bool:
    """Was this a COMMIT or ROLLBACK? (The next transaction may have begun before the callback runs.)"""
    words = text[:40].upper().split()
    return bool(words) and words[0].rstrip(";") in ("COMMIT", "ROLLBACK", "END") and "TO" not in words[1:3]


async def listen_on(pool: asyncpg.Pool[Any], channel: str, heard: Callable[[str | None], None]) -> None:
    """LISTEN until cancelled; on a connection that breaks, say so by a ring (something may have been missed)."""

    def notified(conn: object, pid: int, channel: str, payload: object) -> None:
        heard(str(payload))

    connection = PostgresConnection(pool, "listen")
    pause = 0.1
    while True:
        try:
            raw = await connection.raw()
            try:
                async with asyncio.timeout(5):
                    await raw.add_listener(channel, notified)
                heard(None)
                pause = 0.1
                while not ended(raw):
                    await asyncio.sleep(ALIVE_EVERY)
                    ((takes_writes,),) = await connection.fetch(ALIVE, {}, Urgency(timeout=5))
                    if not takes_writes:
                        end(raw)  # a demoted primary: nobody rings there any more,
                        await pool.expire_connections()  # and the pool's other connections lead there, too
            finally:
                # Nobody else may get it as it is; and it is not thrown away, or the pool would connect anew at once.
                alarm = asyncio.get_running_loop().call_later(0.1, end, raw)
                try:
                    await raw.remove_listener(channel, notified)
                except Exception:
                    end(raw)
                finally:
                    alarm.cancel()
                await connection.close()
        except Unreachable:
            pass  # the executors' own loops report it
        except Exception as error:
            logger.debug("listening was interrupted: %s", type(error).__name__)
        await asyncio.sleep(pause)
        pause = min(pause * 2, 2)
