"""Worker processes of the demo: start, read their events, kill. None is left behind."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from examples.demo.child_process import environment
from holdfast.durable.lease import Lease
from holdfast.errors import HoldfastError, Timeout

EVENT_S_MAX = 30.0
STOP_S_MAX = 10.0
_EXITED = "ended"


class WorkerEnded(HoldfastError):
    code = "worker_ended"
    hint = "a worker process of the demo ended unexpectedly; see its output above"


class WorkerProcess:
    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "examples.demo.worker", "--store", path, "--name", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            # Ctrl-C goes to the demo. A worker shuts down when its stdin closes.
            start_new_session=True,
        )
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def lease(self) -> Lease:
        """Wait until this worker holds the shop's lease, and return it."""
        return Lease(*self.expect("lease")["lease"])

    def expect(self, event: str) -> dict[str, Any]:
        while True:
            try:
                received = self._events.get(timeout=EVENT_S_MAX)
            except queue.Empty:
                raise Timeout(what=event, worker=self.name, seconds=EVENT_S_MAX) from None
            if received["event"] == event:
                return received
            if received["event"] == _EXITED:
                raise WorkerEnded(worker=self.name, exit_code=self._process.wait())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Let the worker finish its claimed work. Kill it after a time-out."""
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
        self._listener.join()

    def _listen(self) -> None:
        assert self._process.stdout
        with self._process.stdout as out:
            for line in out:
                self._events.put(json.loads(line))
        self._events.put({"event": _EXITED})


class WorkerProcesses:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._workers: list[WorkerProcess] = []

    def start(self, name: str) -> WorkerProcess:
        """Start a worker and return when it is ready."""
        worker = WorkerProcess(self._path, name)
        self._workers.append(worker)
        worker.expect("ready")
        return worker

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self._workers:
            worker.stop()
