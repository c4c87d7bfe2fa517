"""A Spark driver in a separate process that a test or a benchmark can kill (see `tests.spark.job_driver`)."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from tests.processes import ROOT, Proc
from tests.spark.clusters import service_pids
from tests.spark.hosts import PYTHON, WORK, NamespaceHost
from tests.spark.job_driver import Done, Job, Session

MODULE = "tests.spark.job_driver"
START_TIMEOUT_S = 120.0
RUN_TIMEOUT_S = 300.0


class Driver:
    """A driver process on a cluster (or a local master), which runs jobs one at a time."""

    def __init__(
        self, master: str, config: dict[str, str], host: NamespaceHost | None = None
    ) -> None:
        if host is None:
            path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
            self.proc = Proc.spawn(
                [sys.executable, "-m", MODULE],
                ready=None,
                env={"PYTHONPATH": path, "SPARK_LOCAL_IP": "127.0.0.1"},
                cwd=ROOT,
            )
        else:
            env = {"PYSPARK_PYTHON": PYTHON, "SPARK_LOCAL_IP": host.address}
            directory = f"{WORK}/driver"
            self.proc = host.spawn(PYTHON, "-m", MODULE, directory=directory, env=env, ready=None)
        self._send(Session(master, config))
        self.app_id = ""

    def ready(self) -> Driver:
        self.app_id = self.proc.expect("ready", START_TIMEOUT_S).split()[1]
        return self

    def begin(self, job: Job) -> None:
        self._send(job)

    def end(self) -> Done:
        line = self.proc.expect("done ", RUN_TIMEOUT_S)
        return msgspec.json.decode(line.removeprefix("done "), type=Done)

    def service(self) -> int:
        """The pid of the ledger service of this driver."""
        pids = service_pids(self.proc.pid)
        return pids[-1] if pids else 0

    def _send(self, message: Any) -> None:
        self.proc.send(msgspec.json.encode(message).decode())
