"""A process that runs tasks of a store: first as fast as it can, then at a share of that rate. It prints both rates.

python -m bench.console_load STORE_URL SHARE
"""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import holdfast as hf
from bench.console_store import UNIVERSE

BATCH = 200
THREADS = 4
FULL_S = 5.0
ANSWER_S = 60.0


@hf.task(queue="load", retain_s=60)
def load_task(number: int) -> int:
    return number


app = hf.App(UNIVERSE, tasks=[load_task])


class PacedLoad:
    """Threads that submit batches and wait for their results."""

    def __init__(self, rt: hf.Runtime) -> None:
        self._rt = rt
        self._lock = threading.Lock()
        self.done = 0

    def run(self, seconds: float, rate_per_s: float = 0.0) -> float:
        """Run tasks for a time, and return their rate. 0: as fast as they run."""
        before, began = self.done, time.monotonic()
        with ThreadPoolExecutor(THREADS) as threads:
            for running in [
                threads.submit(self._submit, began + seconds, rate_per_s / THREADS)
                for _ in range(THREADS)
            ]:
                running.result()
        return (self.done - before) / (time.monotonic() - began)

    def _submit(self, until_s: float, rate_per_s: float) -> None:
        began, own = time.monotonic(), 0
        while time.monotonic() < until_s:
            assert len(list(self._rt.map(load_task, range(BATCH), timeout=ANSWER_S))) == BATCH
            own += BATCH
            with self._lock:
                self.done += BATCH
            if rate_per_s:
                time.sleep(max(began + own / rate_per_s - time.monotonic(), 0.0))


def main(url: str, share: float) -> int:
    with app.open(url, roles=("task",)) as rt:
        load = PacedLoad(rt)
        full = load.run(FULL_S)
        print(json.dumps({"full_per_s": full}), flush=True)
        ended = threading.Event()
        # The parent ends the load by closing stdin.
        threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
        while not ended.is_set():
            paced = load.run(1.0, full * share)
            print(json.dumps({"paced_per_s": paced}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
