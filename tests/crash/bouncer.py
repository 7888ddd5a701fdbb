"""pgbouncer in transaction mode before a server of tests: started, restarted, killed, removed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from support import SOON
from workq.testing._server import delete, free_port, make_home

CONFIGURATION = """\
[databases]
* = host={host} port={port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen}
unix_socket_dir =
pool_mode = transaction
default_pool_size = {size}
max_client_conn = 1000
auth_type = trust
auth_file = {folder}/users
logfile = {folder}/log
server_login_retry = 1
"""


def find_pgbouncer() -> Path | None:
    """The program, where Debian puts it or on the path."""
    found = shutil.which("pgbouncer", path=os.pathsep.join((*os.get_exec_path(), "/usr/sbin")))
    return None if found is None else Path(found)


class Bouncer:
    """One pgbouncer on one port, until the block of `bouncing` ends."""

    def __init__(self, program: Path, url: str, size: int) -> None:
        parts = urlsplit(url)
        self.port = free_port()
        self.url = f"postgresql://{parts.username}@127.0.0.1:{self.port}{parts.path}"
        self._program = program
        self._home = make_home()
        self._process: subprocess.Popen[bytes] | None = None
        self._write("users", f'"{parts.username}" ""\n')
        filled = {"host": parts.hostname, "port": parts.port, "listen": self.port, "folder": self._home.folder}
        self._write("ini", CONFIGURATION.format(size=size, **filled))

    def _write(self, name: str, text: str) -> None:
        path = self._home.folder / name
        path.write_text(text)
        path.chmod(0o644)

    def start(self) -> None:
        """Return when it takes connections."""
        command = [str(self._program), "-q", str(self._home.folder / "ini")]
        if setpriv := shutil.which("setpriv"):
            command = [setpriv, "--pdeathsig", "KILL", *command]  # it outlives no test that was killed
        self._process = self._home.spawn(Path(command[0]), *command[1:])
        deadline = time.monotonic() + SOON
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"pgbouncer did not start:\n{self._home.log_tail()}")
            time.sleep(0.01)

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def stop(self) -> None:
        """SIGTERM: it cuts its clients at once, whatever they are doing."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(SOON)

    def remove(self) -> None:
        """Leave nothing."""
        self.kill()
        delete(self._home.folder)


@contextmanager
def bouncing(program: Path, url: str, *, size: int = 20) -> Generator[Bouncer]:
    """A pgbouncer before the server of a URL, with so many connections to it."""
    bouncer = Bouncer(program, url, size)
    try:
        bouncer.start()
        yield bouncer
    finally:
        bouncer.remove()
