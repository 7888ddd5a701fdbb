"""The PostgreSQL servers of the tests: that of the machine, and that of the wheel."""

from __future__ import annotations

import os

import pytest

from workq.testing._server import Server, ServerMissing, launch

SOURCES = ("machine", "wheel")


class Servers:
    """One PostgreSQL server for each source, started when first asked for."""

    def __init__(self) -> None:
        self._servers: dict[str, Server] = {}

    def url(self, source: str) -> str:
        if source not in self._servers:
            self._servers[source] = self._launch(source)
        return self._servers[source].url

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
        for server in self._servers.values():
            server.remove()
