"""Workers that hang up, report twice, report late, or never: each task ends once, within its budgets."""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path

import pytest

import holdfast as hf
from holdfast import store as stores
from holdfast.ops.http.server import HttpServer
from holdfast.tasks import verify
from tests.ops.http_rig import UNIVERSE, Client, Raw, Rig, request
from tests.process.watch import until

TASKS = 200
WORKERS = 6
LEASE_S = 0.3
# Pauses grow with leases that ran out, too, and a slow machine has many of those.
BACKOFF_MAX_S = 0.2
ATTEMPTS = 4
EXPIRIES_MAX = 50
SECONDS = 60


@hf.task(attempts=ATTEMPTS, backoff_max_s=BACKOFF_MAX_S)
def add() -> None: ...


class Unreliable(threading.Thread):
    def __init__(self, server: HttpServer, seed: int, over: threading.Event) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._dice = random.Random(seed)
        self._over = over
        self.name = f"w-{seed}"
        self.committed: list[str] = []
        self.trouble: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._over.is_set():
                with Client(self._server) as client:
                    self._work(client)
        except BaseException as error:
            self.trouble = error

    def _work(self, client: Client) -> None:
        dice = self._dice
        if dice.random() < 0.1:
            with Raw(self._server) as raw:  # asks, and hangs up
                raw.send(request("/v1/tasks/lease", {"worker": self.name, "limit": 3, "wait_s": 1}))
            return
        for granted in client.lease(self.name, limit=dice.randint(1, 4), wait_s=0.5):
            assert granted["attempt"] <= ATTEMPTS + EXPIRIES_MAX
            what = dice.random()
            if what < 0.1:
                continue  # never says a word again
            if what < 0.2:
                client.fail(
                    granted["lease"], error="no luck", end=dice.choice(["failed", "released"])
                )
                continue
            if what < 0.3:
                client.post("/v1/tasks/heartbeat", {"leases": [{"lease": granted["lease"]}]})
            if what < 0.4:
                # Too late: somebody else may have it by now.
                self._over.wait(LEASE_S * 1.5)
            answers = {
                client.complete(granted["lease"], self.name) for _ in range(dice.randint(1, 3))
            }
            assert len(answers) == 1
            if answers == {"COMMITTED"}:
                self.committed.append(granted["id"])


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 2)
@pytest.mark.parametrize("seed", [1, 2])
def test_each_task_ends_once_whatever_workers_do(tmp_path: Path, seed: int) -> None:
    with stores.open(tmp_path / "store") as store:
        rig = Rig(store)
        over = threading.Event()
        workers: list[Unreliable] = []
        try:
            server = rig.serve(declared={"add": add})
            client = rig.client(server)
            task = {"name": "add", "options": {"lease_s": LEASE_S, "expiries_max": EXPIRIES_MAX}}
            client.post("/v1/tasks", {"tasks": [task] * TASKS})
            workers = [Unreliable(server, seed * 100 + at, over) for at in range(WORKERS)]
            for worker in workers:
                worker.start()

            def left() -> int:
                assert [worker.trouble for worker in workers if worker.trouble] == []
                [queue] = client.get("/v1/queues").document["queues"]
                return int(queue["waiting"] + queue["leased"])

            until(lambda: left() == 0, "all of them have ended", SECONDS)
            over.set()
            for worker in workers:
                worker.join(20)
            [queue] = client.get("/v1/queues").document["queues"]
            failed = client.get("/v1/tasks?state=failed&limit=1000").document["tasks"]
        finally:
            over.set()
            rig.close()
        assert [worker.trouble for worker in workers if worker.trouble] == []
        assert queue["completed"] + queue["failed"] == TASKS
        assert all(one["failures"] == ATTEMPTS for one in failed)
        # Who was told COMMITTED was the only one.
        committed = Counter(id for worker in workers for id in worker.committed)
        assert set(committed.values()) == {1}
        assert len(committed) == queue["completed"]
        assert store.read(lambda txn: list(verify.differences(txn, UNIVERSE))) == []
