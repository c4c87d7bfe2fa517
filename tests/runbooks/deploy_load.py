"""Two workers of a former version under load: messages, tasks and slow tasks, with the time of each answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import holdfast as hf
from tests.process.watch import until
from tests.runbooks.alert_faults import Exists
from tests.runbooks.fault_scene import FaultScene
from tests.runbooks.shelf_app import Counted, Shelf, count_slowly, count_stock

LEASE_S = 60
SHELVES = 8
RESULT_S = 120.0


class ServiceGap:
    """Repeats a call, and records the longest time between two answers."""

    def __init__(self, call: Callable[[int], None]) -> None:
        self.answers = 0
        self.longest_s = 0.0
        self.failure: BaseException | None = None
        self._call = call
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> ServiceGap:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.monotonic()
        try:
            while not self._stopped.wait(0.01):
                self._call(self.answers)
                now = time.monotonic()
                self.longest_s, last = max(self.longest_s, now - last), now
                self.answers += 1
        except BaseException as error:
            self.failure = error


def two_workers_under_load(scene: FaultScene) -> Exists:
    """`Exists` is whether a worker of the former version runs. At the end it judges the load."""
    rt = scene.client()
    former = [scene.up("shop:app", "--lease-s", str(LEASE_S)) for _ in range(2)]
    for worker, name in zip(former, ("OLD", "OLD_2"), strict=True):
        scene.env |= {name: worker.lines[0].split()[-1], f"{name}_PID": str(worker.pid)}
    shelves = [rt.world(Shelf, f"s{n}") for n in range(SHELVES)]
    slow = [rt.submit(count_slowly, "a") for _ in range(4)]

    def ask(n: int) -> None:
        answer = shelves[n % SHELVES].ask(Counted(), timeout=RESULT_S)
        assert answer == n // SHELVES + 1, f"message {n} was lost or repeated"

    def run_task(n: int) -> None:
        if n % 20 == 0:
            slow.append(rt.submit(count_slowly, f"{n}"))
        assert rt.submit(count_stock, f"{n}").result(timeout=RESULT_S) == f"{n} is counted"

    services = {
        "messages": scene.enter(ServiceGap(ask)),
        "tasks": scene.enter(ServiceGap(run_task)),
    }

    def former_runs() -> bool:
        for service in services.values():
            wanted = service.answers + 20
            until(lambda s=service, w=wanted: s.failure or s.answers >= w, "answers", RESULT_S)  # type: ignore[misc]
            assert service.failure is None, service.failure
        if any(worker.running for worker in former):
            return True
        judge(slow, services)
        return False

    return former_runs


def judge(slow: list[hf.TaskHandle[str]], services: dict[str, ServiceGap]) -> None:
    for task in list(slow):
        assert task.result(timeout=RESULT_S) == "counted"
        assert task.status().attempt == 1, "no task was interrupted"
    for name, service in services.items():
        print(f"{name}: {service.answers} answers, longest gap {service.longest_s:.2f} s")
        # A gap of a lease would mean that a world or a task was taken over and not handed over.
        assert service.longest_s < LEASE_S / 2, name
