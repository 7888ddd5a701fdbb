"""A TCP proxy in front of a server, that can do what bad networks do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit, urlunsplit


class Link:
    """One connection through the proxy."""

    def __init__(self, *ends: asyncio.StreamWriter) -> None:
        self._ends = ends
        self.said = b""
        """What the client sent so far."""
        self.lost = False
        """From now on every byte vanishes, in both directions, and neither end is told."""
        self.mute = False
        """Only what the client sends vanishes."""
        self.deaf = False
        """Only what the server sends vanishes: statements are carried out, and their replies are lost."""

    def loses(self, said: bool) -> bool:
        """Does what the client (or else the server) sends vanish?"""
        return self.lost or (self.mute if said else self.deaf)

    def cut(self) -> None:
        """Reset it, at both ends."""
        for end in self._ends:
            end.transport.abort()


class Proxy:
    """Forwards, late or not at all, as told."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._links: set[Link] = set()
        self.delay = 0.0
        """Seconds each piece is held back."""
        self.swallowing = False
        """New connections are accepted, and lost."""

    @property
    def links(self) -> list[Link]:
        """The open ones."""
        return list(self._links)

    def lose(self, which: Callable[[Link], bool] = lambda link: True) -> int:
        """Lose the open connections that are chosen. Returns how many."""
        chosen = [link for link in self._links if which(link) and not link.lost]
        for link in chosen:
            link.lost = True
        return len(chosen)

    def cut(self) -> None:
        """Reset all connections."""
        for link in self._links:
            link.cut()

    async def serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """Carry one connection from its begin to its end."""
        try:
            server, to_server = await asyncio.open_connection(*self._target)
        except OSError:
            to_client.transport.abort()
            return
        link = Link(to_client, to_server)
        link.lost = self.swallowing
        self._links.add(link)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(link, client, to_server, said=True))
                group.create_task(self._carry(link, server, to_client, said=False))
        finally:
            self._links.discard(link)
            link.cut()

    async def _carry(self, link: Link, source: asyncio.StreamReader, to: asyncio.StreamWriter, *, said: bool) -> None:
        with suppress(OSError):
            while piece := await source.read(65536):
                if said:
                    link.said += piece
                if self.delay:
                    await asyncio.sleep(self.delay)
                if not link.loses(said):
                    to.write(piece)
                    await to.drain()
        if not link.loses(said):
            to.close()


@asynccontextmanager
async def proxy_to(url: str) -> AsyncGenerator[tuple[Proxy, str]]:
    """A proxy to the server of a URL, and the URL through it."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    proxy = Proxy(parts.hostname, parts.port)
    carrying = set[asyncio.Task[None]]()

    def accepted(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(proxy.serve(client, to_client))
        carrying.add(task)
        task.add_done_callback(carrying.discard)

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield proxy, urlunsplit(parts._replace(netloc=f"{parts.username}@127.0.0.1:{port}"))
    finally:
        server.close()
        for task in carrying:
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)
