"""`python -m bench console`: the console and its API on a large store.

    python -m bench console [--parts api,browser,idle] [--tasks 1000000] [--worlds 100000] [--dead 10000]
                            [--seconds 30] [--save]

The store is an embedded one, filled by the operations of Holdfast. `holdfast serve` runs in another process.

    api      requests of each list, one after the other, while a process runs tasks at half of the rate that it reaches
             alone: the p95 of the time until the answer, over HTTP on loopback
    browser  Chromium: the time from the navigation to the first data of a page, a scroll through 100,000 rows with the
             number of row elements, and the longest task of the page in Chromium's trace
    idle     the processor time of the server for 100 event streams as the console opens them, all on the page Now, and
             each on another task, beside the server without streams. Nothing changes in the store
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any
from urllib.parse import urlencode

from bench import history
from bench.console_store import DEAD_QUEUE, UNIVERSE, ConsoleSizes, fill
from bench.peers.processors import used_ns
from bench.place import ROOT, end_writer, new_directory
from bench.record import Record, Sample, Target, gather
from holdfast import store as stores

STREAMS = 100
START_S = 60.0
SETTLE_S = 5.0
SHARE = 0.5
REPEATS = 3
PAGE = 200
# The lists that the console reads, with the largest pages that it asks for.
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tasks", {}),
    ("tasks", {"state": "failed"}),
    ("tasks", {"state": "ready", "queue": "picking"}),
    ("tasks", {"name": "ship"}),
    ("tasks", {"queue": "packing", "state": "completed"}),
    ("tasks", {"key": "order-90000"}),
    ("tasks", {"since_ns": 1}),
    ("flows", {}),
    ("flows", {"state": "waiting"}),
    ("worlds", {"type": "Customer"}),
    (f"dead/{DEAD_QUEUE.replace('/', '%2F')}", {}),
    ("errors", {}),
    ("ended", {}),
    ("audit", {}),
    ("budgets", {}),
)
COUNTS = ("queues", "flows/counts", "effects/counts", "readiness", "workers")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    load_before = os.getloadavg()[0]
    sizes = ConsoleSizes(args.tasks, args.worlds, args.dead, args.flows, args.dead)
    with new_directory(args.dir) as directory:
        path = directory / "store"
        began = time.monotonic()
        with stores.open(path) as store:
            fill(store, sizes)
        print(f"filled in {time.monotonic() - began:.0f} s", file=sys.stderr)
        try:
            records = [_part(name, path, args.seconds) for name in args.parts]
        finally:
            end_writer(path)
    for record in records:
        print(json.dumps(record.document(), ensure_ascii=False))
    if args.save:
        run = history.entry(
            [record.document() for record in records],
            budget_s=0,
            load_before=load_before,
            command=f"console --tasks {args.tasks} --worlds {args.worlds} --dead {args.dead}",
        )
        history.save(run, args.save)
    return 0 if all(record.met for record in records) else 1


def _part(name: str, path: Path, seconds: float) -> Record:
    if name == "browser":
        from bench import console_browser

        with serving(path) as (port, _):
            return console_browser.measure(port)
    return {"api": api, "idle": idle}[name](path, seconds)


# -- requests under load -----------------------------------------------------------------------------


def api(path: Path, seconds: float) -> Record:
    with serving(path) as (port, _), load_of(path) as rates:
        times: dict[str, list[float]] = {}
        until = time.monotonic() + seconds
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
        while time.monotonic() < until:
            for label, url in _urls():
                times.setdefault(label, []).append(_timed(connection, url))
        connection.close()
    rate = {name: round(value) for name, value in rates.items()}
    every = [one for found in times.values() for one in found]
    sample: Sample = {"p95_ms": _p95(every), "slowest_p95_ms": max(map(_p95, times.values()))}
    return Record(
        "console_api",
        f"answers of {len(times)} lists and counts while tasks run at half of their rate",
        gather([sample], {"p95_ms": "ms", "slowest_p95_ms": "ms"}),
        (Target("p95_ms", below=100.0), Target("slowest_p95_ms", below=100.0)),
        {
            "requests": len(every),
            **rate,
            "p95_ms": {name: round(_p95(one), 1) for name, one in times.items()},
        },
    )


def _urls() -> Iterator[tuple[str, str]]:
    for route, query in REQUESTS:
        label = f"{route}?{urlencode(query)}" if query else route
        limited = {} if route == "ended" else {"limit": PAGE}
        yield label, f"/v1/{route}?{urlencode({**query, **limited, 'universe': UNIVERSE})}"
    for route in COUNTS:
        yield route, f"/v1/{route}?universe={UNIVERSE}"


def _timed(connection: http.client.HTTPConnection, url: str) -> float:
    began = time.perf_counter()
    connection.request("GET", url)
    answer = connection.getresponse()
    body = answer.read()
    assert answer.status == 200, (url, answer.status, body[:500])
    return (time.perf_counter() - began) * 1e3


def _p95(times: Sequence[float]) -> float:
    return quantiles(times, n=20)[18] if len(times) > 1 else times[0]


@contextlib.contextmanager
def load_of(path: Path) -> Iterator[dict[str, float]]:
    """Run tasks at half of the rate that the machine reaches. The rates are complete at the end."""
    rates: dict[str, float] = {}
    with subprocess.Popen(
        [sys.executable, "-m", "bench.console_load", str(path), str(SHARE)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        rates.update(json.loads(process.stdout.readline()))
        try:
            yield rates
        finally:
            process.stdin.close()
            paced = [json.loads(line)["paced_per_s"] for line in process.stdout]
    rates["paced_per_s"] = sum(paced) / len(paced)


# -- idle streams --------------------------------------------------------------------------------------


def idle(path: Path, seconds: float) -> Record:
    with stores.open(path) as store:
        generation = store.generation
    now = ["subject=counts&also=readiness"] * STREAMS
    tasks = [
        f"subject=task/{generation}-{seq}&also=readiness,counts" for seq in range(1, STREAMS + 1)
    ]
    samples: list[Sample] = []
    for _ in range(REPEATS):
        with serving(path) as (port, pid):
            sample: Sample = {}
            for name, queries in (("none", []), ("now", now), ("tasks", tasks)):
                with streaming(port, queries):
                    time.sleep(SETTLE_S)
                    sample[name] = _share(pid, seconds / REPEATS)
        sample["console"] = max(sample["now"], sample["tasks"]) - sample["none"]
        samples.append(sample)
    units = dict.fromkeys(("console", "none", "now", "tasks"), "% of a core")
    return Record(
        "console_idle",
        f"processor time of the server for {STREAMS} idle consoles",
        gather(samples, units),
        (Target("console", below=5.0),),
    )


def _share(pid: int, seconds: float) -> float:
    """Return the processor time of a process as a percentage of one core."""
    before, began = used_ns([pid]), time.monotonic()
    time.sleep(seconds)
    return (used_ns([pid]) - before) / 1e7 / (time.monotonic() - began)


@contextlib.contextmanager
def streaming(port: int, queries: Sequence[str]) -> Iterator[None]:
    """Open event streams and read the first event of each."""
    with contextlib.ExitStack() as opened:
        for query in queries:
            stream = opened.enter_context(socket.create_connection(("127.0.0.1", port), START_S))
            head = f"GET /v1/events?{query}&universe={UNIVERSE} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"
            stream.sendall(head.encode())
            answer = stream.recv(65_536)
            assert answer.startswith(b"HTTP/1.1 200"), answer[:500]
        yield


# -- the server ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(path: Path) -> Iterator[tuple[int, int]]:
    """Run `holdfast serve`, and yield its port and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    command = [sys.executable, "-m", "holdfast.cli", "serve", "--store", str(path)]
    process = subprocess.Popen([*command, "--http", f"127.0.0.1:{port}"], stdout=subprocess.DEVNULL)
    try:
        _wait_until(lambda: _answers(port))
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(START_S)


def _answers(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except OSError:
        return False


def _wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("the server does not answer")
        time.sleep(0.05)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench console", description=__doc__)
    parser.add_argument(
        "--parts", type=lambda text: text.split(","), default=["api", "browser", "idle"]
    )
    parser.add_argument("--tasks", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--worlds", type=int, default=100_000, metavar="N")
    parser.add_argument("--dead", type=int, default=10_000, metavar="N", help="dead letters")
    parser.add_argument("--flows", type=int, default=10_000, metavar="N")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="of each part")
    parser.add_argument(
        "--dir", type=Path, default=ROOT / "build", help="parent of the store (build)"
    )
    history.add_save_option(parser)
    return parser.parse_args(argv)
