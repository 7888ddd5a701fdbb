"""What the stories of crashes stand on: the server and the processes of tests/faults."""

from __future__ import annotations

from faults.conftest import breakable_server, mortal, nodes, server

__all__ = ["breakable_server", "mortal", "nodes", "server"]
