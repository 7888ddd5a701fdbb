"""The stories: each breaks processes, the database or the network, at moments its seed decides, while tasks come."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from crash import app
from crash.company import PATIENCE
from crash.play import Scene, Story
from faults.nodes import foreign_writer
from faults.proxy import Link, Proxy
from support import eventually
from workq.testing._server import Server, children_of, wait_for_state


async def again_and_again(scene: Scene, least: float, most: float, act: Callable[[], Awaitable[None]]) -> None:
    """Act at random moments while the producers produce, once at least."""
    until = time.monotonic() + scene.plan.seconds * 0.8
    while True:
        await asyncio.sleep(scene.random.uniform(least, most))
        await act()
        if time.monotonic() > until:
            return


async def killed(scene: Scene) -> None:
    """Whoever is killed is replaced: a node, now and then a producer."""
    company, random = scene.company, scene.random

    async def act() -> None:
        if random.random() < 0.1:
            await replace_producer(scene)
            return
        await company.until(lambda: len(company.running()) > 1)  # somebody must be there to take over
        left = random.choice(company.running())
        await company.kill(random.choice([node for node in company.nodes if node is not left]))
        scene.node()

    await again_and_again(scene, 0.2, 1.2, act)


async def replace_producer(scene: Scene) -> None:
    """Whatever it had not committed leaves no trace; another does the rest of its work."""
    company, random = scene.company, scene.random
    victim = random.choice(company.producers)
    await company.kill(victim)
    made = sum(line.what == "acked" and line.pid == victim.pid for line in company.journal.lines())
    scene.producer(f"p{victim.pid}", max(scene.shares[victim.pid] - made, 0))


async def frozen(scene: Scene) -> None:
    """Others take over meanwhile; what the frozen one has to say when it goes on is refused."""
    company, random, lease = scene.company, scene.random, scene.plan.settings.lease

    async def act() -> None:
        some = random.sample(company.nodes, random.choice([1, 1, 2]))
        for node in some:
            await company.freeze(node)
        await asyncio.sleep(lease * random.uniform(1.1, 2))
        for node in some:
            company.thaw(node)

    await again_and_again(scene, 0.2, 1, act)


async def terminated(scene: Scene) -> None:
    """SIGTERM, in the middle of everything; another takes its place."""
    company, random = scene.company, scene.random

    async def act() -> None:
        await company.until(lambda: company.running() != [])
        await company.terminate(random.choice(company.running()))
        scene.node()

    await again_and_again(scene, 0.2, 1, act)


async def killed_and_frozen(scene: Scene) -> None:
    """Both at once: the heir of a dead node may stand still."""
    company, random, lease = scene.company, scene.random, scene.plan.settings.lease

    async def act() -> None:
        await company.until(lambda: len(company.running()) > 2)
        victim, sleeper, *_ = random.sample(company.running(), 2)
        await company.freeze(sleeper)
        await asyncio.sleep(random.uniform(0, lease))
        await company.kill(victim)
        scene.node()
        await asyncio.sleep(random.uniform(0.3, 1.5) * lease)
        company.thaw(sleeper)

    await again_and_again(scene, 0.2, 1, act)


async def writer_held(scene: Scene) -> None:
    """By a foreign process, for longer than the lease: nobody steals what lives."""
    random, lease = scene.random, scene.plan.settings.lease

    async def act() -> None:
        path = Path(scene.place.url.removeprefix("sqlite:///"))
        with foreign_writer(path, lease * random.uniform(1.1, 2)) as writer:
            await asyncio.to_thread(writer.wait)

    await again_and_again(scene, 0.2, 1, act)


def server_of(scene: Scene) -> Server:
    assert scene.place.server is not None
    return scene.place.server


def server_ends(end: Callable[[Server], None], *, crashing: bool) -> Callable[[Scene], Awaitable[None]]:
    """The server goes away, and comes back after a while."""

    async def fault(scene: Scene) -> None:
        pen, server = scene.company.pen, server_of(scene)

        async def act() -> None:
            at = pen.note("down")
            if crashing:
                pen.note("crashing", at=at)
            await asyncio.to_thread(end, server)
            await asyncio.sleep(scene.random.uniform(0, 2.5))  # at times longer than the lease
            await asyncio.to_thread(server.start)
            pen.note("up")

        await again_and_again(scene, 0.5, 2, act)

    return fault


def kill_the_postmaster(server: Server) -> None:
    """It alone: its children notice, each as soon as it waits, and only then may another one take their place."""
    children = children_of(server.pid)
    os.kill(server.pid, signal.SIGKILL)
    wait_for_state(children, "ZX")
    server.kill()


async def backend_killed(scene: Scene) -> None:
    """kill -9 of one of the server's processes: the server ends all the others, and recovers by itself."""
    pen, url, random = scene.company.pen, scene.place.url, scene.random

    async def act() -> None:
        rows = await app.read(url, BACKENDS)
        at = pen.note("down")
        pen.note("crashing", at=at)
        with suppress(ProcessLookupError):
            os.kill(random.choice(rows)[0], signal.SIGKILL)
        await asyncio.sleep(0.05)
        await eventually(answers, PATIENCE)
        pen.note("up")

    async def answers() -> bool:
        with suppress(Exception):
            return bool(await app.read(url, "select 1"))
        return False

    await again_and_again(scene, 0.5, 2, act)


BACKENDS = "select pid from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()"


async def sessions_terminated(scene: Scene) -> None:
    """By pg_terminate_backend: some, wherever they are in their statements."""
    company, random = scene.company, scene.random
    company.pen.note("disturbed")

    async def act() -> None:
        share = random.choice([0.2, 0.5, 1])
        await app.read(
            scene.place.url,
            f"select pg_terminate_backend(pid) from ({BACKENDS}) as b where random() < {share}",
        )

    await again_and_again(scene, 0.05, 0.5, act)


async def server_frozen(scene: Scene) -> None:
    """It answers nothing and closes nothing, for longer than the beats' deadline, and goes on."""
    pen, server, random = scene.company.pen, server_of(scene), scene.random

    async def act() -> None:
        pen.note("down")
        await asyncio.to_thread(server.freeze)
        # Now and then longer than every statement's deadline.
        await asyncio.sleep(11 if random.random() < 0.1 else random.uniform(0.6, 3))
        await asyncio.to_thread(server.thaw)
        pen.note("up")

    await again_and_again(scene, 0.5, 1.5, act)


def network(
    least: float, most: float, act: Callable[[Scene, Proxy], Awaitable[None]]
) -> Callable[..., Awaitable[None]]:
    """Something is done, again and again, to the proxy between the server and all nodes but one."""

    async def fault(scene: Scene) -> None:
        assert scene.proxy is not None
        scene.company.pen.note("disturbed")
        proxy = scene.proxy
        await again_and_again(scene, least, most, lambda: act(scene, proxy))

    return fault


async def cut(scene: Scene, proxy: Proxy) -> None:
    """Connections are reset."""
    share = scene.random.choice([0.3, 1])
    for link in proxy.links:
        if scene.random.random() < share:
            link.cut()


async def slow(scene: Scene, proxy: Proxy) -> None:
    """Everything takes longer."""
    proxy.delay = scene.random.uniform(0.005, 0.08)
    await asyncio.sleep(scene.random.uniform(0.3, 1))
    proxy.delay = 0


async def swallowed(scene: Scene, proxy: Proxy) -> None:
    """Every byte vanishes for a while; the connections of that time stay dead, and nobody is told."""
    proxy.swallowing = True
    proxy.lose()
    await asyncio.sleep(scene.plan.settings.lease * scene.random.uniform(0.5, 2))
    proxy.swallowing = False


async def one_way(scene: Scene, proxy: Proxy) -> None:
    """In some connections replies vanish, in others what is asked."""

    def lose(link: Link) -> None:
        way = scene.random.choice(["deaf", "mute", ""])
        if way:
            setattr(link, way, True)

    for link in proxy.links:
        lose(link)
    await asyncio.sleep(scene.random.uniform(0.5, 2))


POSTGRES = ("PostgreSQL",)

STORIES = [
    Story("nodes killed", killed),
    Story("nodes killed in their own transactions", killed, pay=0.1),
    Story("nodes frozen beyond the lease", frozen),
    Story("nodes asked to end", terminated),
    Story("nodes killed while others are frozen", killed_and_frozen),
    Story("the writer held for longer than the lease", writer_held, ("SQLite",)),
    Story("server stopped", server_ends(Server.stop, crashing=False), POSTGRES),
    Story("server stopped at once", server_ends(lambda server: server.stop("immediate"), crashing=True), POSTGRES),
    Story("server killed", server_ends(Server.kill, crashing=True), POSTGRES),
    Story("the postmaster alone killed", server_ends(kill_the_postmaster, crashing=True), POSTGRES),
    Story("one of the server's processes killed", backend_killed, POSTGRES),
    Story("sessions terminated", sessions_terminated, POSTGRES),
    Story("server frozen", server_frozen, POSTGRES),
    Story("connections cut", network(0.1, 0.8, cut), POSTGRES, proxied=True),
    Story("network slow", network(0.1, 0.5, slow), POSTGRES, proxied=True),
    Story("network swallows everything", network(0.5, 2, swallowed), POSTGRES, proxied=True),
    Story("network loses one direction", network(0.5, 2, one_way), POSTGRES, proxied=True),
]
