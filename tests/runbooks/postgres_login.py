"""A PostgreSQL server that asks for passwords, and a worker under load that reads its password from a file."""

from __future__ import annotations

import contextlib
import os
import threading
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import holdfast as hf
from tests.pgcluster import PostgresCluster
from tests.process.watch import until
from tests.processes import Proc
from tests.runbooks.alert_faults import Exists
from tests.runbooks.fault_scene import FaultScene
from tests.runbooks.shelf_app import count_stock

ROLE, DATABASE = "app", "jobs"
RESULT_S = 60.0


class TaskLoad:
    """Submits tasks one after the other, and waits for each result."""

    def __init__(self, rt: hf.Runtime) -> None:
        self.completed = 0
        self.failure: BaseException | None = None
        self._rt = rt
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> TaskLoad:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopped.wait(0.02):
                result = self._rt.submit(count_stock, "a").result(timeout=RESULT_S)
                assert result == "a is counted"
                self.completed += 1
        except BaseException as error:
            self.failure = error

    def await_more(self, count: int) -> None:
        wanted = self.completed + count
        until(lambda: self.failure or self.completed >= wanted, "results", RESULT_S)
        assert self.failure is None, self.failure


@contextlib.contextmanager
def server_with_passwords(password: str) -> Iterator[Any]:
    with PostgresCluster(standby=False) as cluster:
        server = cluster.primary
        (server.data / "pg_hba.conf").write_text(
            "local all all trust\nhost all all all scram-sha-256\n"
        )
        with server.admin() as connection:
            connection.execute(f"CREATE ROLE {ROLE} LOGIN PASSWORD '{password}'")
            connection.execute(f"CREATE DATABASE {DATABASE} OWNER {ROLE}")
            connection.execute("SELECT pg_reload_conf()")
        yield server


def write_password(path: Path, password: str) -> Path:
    path.write_text(f"*:*:*:{ROLE}:{password}\n")
    path.chmod(0o600)
    return path


def worker_with_a_former_password(scene: FaultScene) -> Exists:
    server = scene.enter(server_with_passwords("former-password"))
    passfile = write_password(scene.directory / "pgpass", "former-password")
    scene.enter(unittest.mock.patch.dict(os.environ, PGPASSFILE=str(passfile)))
    new_file = write_password(scene.directory / "pgpass.new", "new-password")
    scene.env |= {
        "NEW_PASSWORD": "new-password", "NEW_PASSFILE": str(new_file), "PGPASSFILE": str(passfile),
    }  # fmt: skip
    scene.use_store(f"postgresql://{ROLE}@127.0.0.1:{server.port}/{DATABASE}")
    scene.admin = server.admin
    worker = scene.up("shop:app")
    load = scene.enter(TaskLoad(scene.client()))
    load.await_more(3)

    def uses_former_password() -> bool:
        load.await_more(3)
        assert worker.running
        return new_file.exists()

    return uses_former_password


def refused_worker(scene: FaultScene) -> Proc:
    """A worker whose connections ended between the change of the password and of the file."""
    worker_with_a_former_password(scene)
    worker = scene.workers[-1]
    scene.run_sql(f"ALTER ROLE {ROLE} PASSWORD 'new-password'")
    scene.run_sql(
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{ROLE}'"
    )
    return worker
