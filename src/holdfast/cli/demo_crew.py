"""The demo's worker processes: started, heard, killed; none is left behind."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from holdfast.durable.lease import Lease
from holdfast.errors import HoldfastError, Timeout

ANSWER_S_MAX = 30.0
LEAVE_S_MAX = 10.0
_ENDED = "ended"


class WorkerEnded(HoldfastError):
    code = "worker_ended"
    hint = "a worker of the demo ended by itself; what it said stands above"


class Worker:
    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli", "demo-worker", "--store", path, "--name", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C is for the demo; a worker leaves because its input ends.
            start_new_session=True,
        )
        self._said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def lease(self) -> Lease:
        """The shop's lease, as soon as it is this worker's."""
        return Lease(*self.expect("lease")["lease"])

    def expect(self, event: str) -> dict[str, Any]:
        while True:
            try:
                said = self._said.get(timeout=ANSWER_S_MAX)
            except queue.Empty:
                raise Timeout(what=event, worker=self.name, seconds=ANSWER_S_MAX) from None
            if said["event"] == event:
                return said
            if said["event"] == _ENDED:
                raise WorkerEnded(worker=self.name, exit_code=self._process.wait())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def leave(self) -> None:
        """Let it finish what it has in hand; kill it if it does not."""
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(LEAVE_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
        self._listener.join()

    def _listen(self) -> None:
        assert self._process.stdout
        with self._process.stdout as out:
            for line in out:
                self._said.put(json.loads(line))
        self._said.put({"event": _ENDED})


class Crew:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._workers: list[Worker] = []

    def start(self, name: str) -> Worker:
        """Start a worker and return when it is ready."""
        worker = Worker(self._path, name)
        self._workers.append(worker)
        worker.expect("ready")
        return worker

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self._workers:
            worker.leave()
