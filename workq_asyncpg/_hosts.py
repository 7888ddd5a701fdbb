"""A URL that names several servers: whichever answers as it should, and none that says nothing is waited for."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlunsplit

import asyncpg

from workq.dialect import split_url

HEAD_START = 0.25
"""Seconds that a server has to answer before the next one is asked, too."""


def each_host(dsn: str) -> list[str]:
    """For every host that the URL (or else PGHOST) names, the URL with that one alone."""
    parts = split_url(dsn)
    login, at, hosts = parts.netloc.rpartition("@")
    if "," in hosts:
        return [urlunsplit(parts._replace(netloc=f"{login}{at}{host}")) for host in hosts.split(",")]
    query = dict(parse_qsl(parts.query))
    names = query.get("host", "" if hosts else os.environ.get("PGHOST", "")).split(",")
    ports = query.get("port", os.environ.get("PGPORT", "")).split(",")
    if len(names) == 1 or len(ports) not in (1, len(names)):
        return [dsn]  # asyncpg says what is wrong with the ports
    each = [
        query | {"host": name} | ({"port": port} if port else {})
        for name, port in zip(names, ports if len(ports) > 1 else ports * len(names), strict=True)
    ]
    return [urlunsplit(parts._replace(query=urlencode(one))) for one in each]


class Hosts:
    """Connects for a pool: `create_pool(dsn, connect=Hosts(dsn).connect)`.

    asyncpg asks one host after the other, and the first may use up the whole time: after a failover, the machine of the
    old primary is often not there to refuse a connection. Where neither the URL nor PGTARGETSESSIONATTRS says which
    server is wanted, it is one that can be written to: a standby that answers first would do for nothing.
    """

    def __init__(self, dsn: str) -> None:
        self._dsns = each_host(dsn)
        said = "target_session_attrs" in dict(parse_qsl(split_url(dsn).query)) or "PGTARGETSESSIONATTRS" in os.environ
        self._wanted: dict[str, Any] = {} if said or not self.several else {"target_session_attrs": "read-write"}

    @property
    def several(self) -> bool:
        """Is there more than one?"""
        return len(self._dsns) > 1

    async def connect(self, dsn: object, /, **options: Any) -> asyncpg.Connection[Any]:
        """A connection to the first that answers as it should. Raises what a server said, if one did, or else the error
        of the first that failed."""
        wanted = self._wanted | options
        attempts = [
            asyncio.create_task(_later(place * HEAD_START, each, wanted)) for place, each in enumerate(self._dsns)
        ]
        chosen: Answer | None = None
        errors: list[Exception] = []
        try:
            for attempt in asyncio.as_completed(attempts):
                try:
                    chosen = await attempt
                    break
                except Exception as error:
                    errors.append(error)
        finally:
            for task in attempts:
                task.cancel()
                task.add_done_callback(partial(_drop, chosen))
            try:
                await asyncio.wait(attempts)
            except asyncio.CancelledError:
                if chosen is not None:
                    chosen.connection.terminate()
                raise
        if chosen is None:
            raise next((error for error in errors if isinstance(error, asyncpg.PostgresError)), errors[0])
        self._dsns.sort(key=chosen.dsn.__ne__)  # it is asked first from now on
        return chosen.connection


class Answer(NamedTuple):
    """A server's."""

    dsn: str
    connection: asyncpg.Connection[Any]


async def _later(seconds: float, dsn: str, options: dict[str, Any]) -> Answer:
    await asyncio.sleep(seconds)
    return Answer(dsn, await asyncpg.connect(dsn, **options))


def _drop(chosen: Answer | None, attempt: asyncio.Task[Answer]) -> None:
    if not attempt.cancelled() and attempt.exception() is None and attempt.result() is not chosen:
        attempt.result().connection.terminate()
