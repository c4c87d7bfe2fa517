"""HTTP workers that disconnect, report twice, late or never: each task ends once, within its budgets."""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path

import pytest

import holdfast as hf
from holdfast import store as stores
from holdfast.ops.http.server import HttpServer
from holdfast.tasks import replay_check
from tests.ops.http_rig import UNIVERSE, HttpRig, JsonClient, RawHttpConnection, post_request
from tests.process.watch import until

TASKS = 200
WORKERS = 6
LEASE_S = 0.15
# Lease expiries increase the backoff too, and a slow machine has many of them.
BACKOFF_MAX_S = 0.1
ATTEMPTS = 4
EXPIRIES_MAX = 50
SECONDS = 60


@hf.task(attempts=ATTEMPTS, backoff_max_s=BACKOFF_MAX_S)
def add() -> None: ...


class UnreliableHttpWorker(threading.Thread):
    def __init__(self, server: HttpServer, seed: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._random = random.Random(seed)
        self._stop_requested = stop
        self.name = f"w-{seed}"
        self.committed: list[str] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._stop_requested.is_set():
                with JsonClient(self._server) as client:
                    self._lease_and_report(client)
        except BaseException as error:
            self.error = error

    def _lease_and_report(self, client: JsonClient) -> None:
        random_source = self._random
        if random_source.random() < 0.1:
            with RawHttpConnection(self._server) as raw:  # requests a lease and disconnects
                raw.send(
                    post_request("/v1/tasks/lease", {"worker": self.name, "limit": 3, "wait_s": 1})
                )
            return
        for granted in client.lease(self.name, limit=random_source.randint(1, 4), wait_s=0.5):
            assert granted["attempt"] <= ATTEMPTS + EXPIRIES_MAX
            choice = random_source.random()
            if choice < 0.1:
                continue  # never reports
            if choice < 0.2:
                client.fail(
                    granted["lease"],
                    error="no luck",
                    end=random_source.choice(["failed", "released"]),
                )
                continue
            if choice < 0.3:
                client.post("/v1/tasks/heartbeat", {"leases": [{"lease": granted["lease"]}]})
            if choice < 0.4:
                # Report after the lease expired: another worker may hold the task.
                self._stop_requested.wait(LEASE_S * 1.5)
            answers = {
                client.complete(granted["lease"], self.name)
                for _ in range(random_source.randint(1, 3))
            }
            assert len(answers) == 1
            if answers == {"COMMITTED"}:
                self.committed.append(granted["id"])


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 2)
@pytest.mark.parametrize("seed", [1, 2])
def test_each_task_ends_once_with_unreliable_http_workers(tmp_path: Path, seed: int) -> None:
    with stores.open(tmp_path / "store") as store:
        rig = HttpRig(store)
        stop = threading.Event()
        workers: list[UnreliableHttpWorker] = []
        try:
            server = rig.serve(declared={"add": add})
            client = rig.client(server)
            task = {"name": "add", "options": {"lease_s": LEASE_S, "expiries_max": EXPIRIES_MAX}}
            client.post("/v1/tasks", {"tasks": [task] * TASKS})
            workers = [UnreliableHttpWorker(server, seed * 100 + at, stop) for at in range(WORKERS)]
            for worker in workers:
                worker.start()

            def open_tasks() -> int:
                assert [worker.error for worker in workers if worker.error] == []
                [queue] = client.get("/v1/queues").document["queues"]
                return int(queue["waiting"] + queue["leased"])

            until(lambda: open_tasks() == 0, "all of them have ended", SECONDS)
            stop.set()
            for worker in workers:
                worker.join(20)
            [queue] = client.get("/v1/queues").document["queues"]
            failed = client.get("/v1/tasks?state=failed&limit=1000").document["tasks"]
        finally:
            stop.set()
            rig.close()
        assert [worker.error for worker in workers if worker.error] == []
        assert queue["completed"] + queue["failed"] == TASKS
        assert all(task_row["failures"] == ATTEMPTS for task_row in failed)
        # Exactly one worker got COMMITTED for each completed task.
        committed = Counter(id for worker in workers for id in worker.committed)
        assert set(committed.values()) == {1}
        assert len(committed) == queue["completed"]
        assert store.read(lambda txn: list(replay_check.find_differences(txn, UNIVERSE))) == []
