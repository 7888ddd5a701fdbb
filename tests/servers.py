"""The PostgreSQL servers of the tests: that of the machine, and that of the wheel."""

from __future__ import annotations

import os

import pytest

from crash.bouncer import Bouncer, find_pgbouncer
from workq.testing._server import Server, ServerMissing, launch

SOURCES = ("machine", "wheel")
POOLED = os.environ.get("WORKQ_TEST_POOLER") == "pgbouncer"
"""Everything goes through pgbouncer in transaction mode: tests/pgbouncer.sh."""


class Servers:
    """One PostgreSQL server for each source, started when first asked for."""

    def __init__(self) -> None:
        self._servers: dict[str, Server] = {}
        self._bouncers: dict[str, Bouncer] = {}

    def url(self, source: str) -> str:
        if source not in self._servers:
            self._servers[source] = self._launch(source)
            if POOLED:
                self._bouncers[source] = self._before(self._servers[source])
        return (self._bouncers if POOLED else self._servers)[source].url

    def _before(self, server: Server) -> Bouncer:
        program = find_pgbouncer()
        assert program is not None, "WORKQ_TEST_POOLER=pgbouncer, and there is none"
        bouncer = Bouncer(program, server.url, size=40)
        bouncer.start()
        return bouncer

    def _launch(self, source: str) -> Server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WORKQ_TEST_POSTGRES", source)
            try:
                return launch()
            except ServerMissing as missing:
                # A machine without a server of its own is no reason to fail: the wheel is what CI must have.
                if os.environ.get("CI") and source == "wheel":
                    raise
                pytest.skip(str(missing))

    def remove(self) -> None:
        for bouncer in self._bouncers.values():
            bouncer.remove()
        for server in self._servers.values():
            server.remove()
