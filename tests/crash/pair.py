"""A primary and its streaming standby: synchronous, so that what is acknowledged is on both."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import asyncpg

from support import eventually
from workq.testing._server import SETTINGS, Server, free_port, launch, make_home

DURING_TESTS = {"fsync": "off", "synchronous_commit": "on", "wal_receiver_status_interval": "1s"}
"""Processes are killed here, not machines: what is written survives without being flushed."""


class Pair:
    """Two servers. `first` is the primary at the beginning."""

    def __init__(self, first: Server, second: Server) -> None:
        self.first = first
        self.second = second

    def url(self, attributes: str) -> str:
        """One that names both, for the kind of session that is wanted."""
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in (self.first, self.second))
        return f"postgresql://postgres@{hosts}/postgres?target_session_attrs={attributes}"

    async def promote(self) -> None:
        """Make the second one the primary; it is when this returns."""
        assert await value(self.second, "select pg_promote(true, 30)")

    def demote(self) -> None:
        """Stop the first one as one should, and start it as a standby of the second."""
        self.first.stop()
        (self.first.data / "standby.signal").touch()
        with (self.first.data / "postgresql.auto.conf").open("a") as file:
            file.write(f"primary_conninfo = 'host=127.0.0.1 port={self.second.port} user=postgres'\n")
        self.first.start()

    async def close_to_writers(self) -> None:
        """Leave the first one up, its sessions too, and have it refuse every write from now on (25006)."""
        conn = await asyncpg.connect(self.first.url)
        try:
            await conn.execute("alter system set default_transaction_read_only = on")
            await conn.execute("select pg_reload_conf()")
        finally:
            await conn.close()


async def value(server: Server, sql: str) -> object:
    """The one value of a statement."""
    conn = await asyncpg.connect(server.url)
    try:
        return await conn.fetchval(sql)
    finally:
        await conn.close()


@asynccontextmanager
async def pair_of_servers() -> AsyncGenerator[Pair]:
    """Both running, the second in step with the first."""
    first = launch(options=DURING_TESTS)
    try:
        second = Server(first.bin, make_home(), {**SETTINGS, "unix_socket_directories": "", **DURING_TESTS})
        try:
            home = second._home  # pyright: ignore[reportPrivateUsage]
            source = ("-h127.0.0.1", f"-p{first.port}", "-Upostgres")
            copied = home.run(first.bin / "pg_basebackup", *source, f"-D{second.data}", "-R", "-cfast", "--no-sync")
            assert copied == 0, home.log_tail()
            second.port = free_port()
            second.start()
            conn = await asyncpg.connect(first.url)
            try:
                await conn.execute("alter system set synchronous_standby_names = '*'")
                await conn.execute("select pg_reload_conf()")
            finally:
                await conn.close()

            async def in_step() -> bool:
                return await value(first, "select sync_state from pg_stat_replication") == "sync"

            await eventually(in_step)
            yield Pair(first, second)
        finally:
            second.remove()
    finally:
        first.remove()
