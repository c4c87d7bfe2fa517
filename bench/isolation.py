"""`python -m bench isolation`: the cost of rejected submissions for concurrent callers.

    python -m bench isolation [--store postgresql://…] [--callers 64] [--rounds 5]

64 callers submit tasks in alternating rounds: without rejections, and with one call in 100 rejected inside the
operation. For each store and interface it prints the p95 of the valid calls with and without rejections, their
ratio (the target is 2 at most), and the number of valid calls that failed. One failure is an error.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import holdfast as hf
from bench.place import ROOT, new_directory
from holdfast.errors import KeyTooLarge
from holdfast.ops.http.auth import RequestGuard, parse_address
from holdfast.ops.http.server import HttpServer
from holdfast.ops.http.task_routes import TaskApi

CALLERS = 64
CALLS = 50
ROUNDS = 5
REFUSED_EACH = 100
RATIO_MAX = 2.0
HEADER = ("store", "interface", "p95 ms", "with rejections", "ratio", "valid failed")
# Each name is within its limit. The key that holds both exceeds the key limit of the store.
LONG = {"queue": "q" * 200, "limit_key": "l" * 200}


@hf.task
def note(n: int) -> int:
    return n


refused_note = note.options(**LONG)
APP = hf.App("isolation", tasks=[note])


class Calls(NamedTuple):
    """The times of the valid calls, and the number of them that failed."""

    seconds: list[float]
    failed: int


Interface = Callable[[int, bool], Calls]


class Result(NamedTuple):
    store: str
    interface: str
    p95_ms: float
    refusing_p95_ms: float
    failed: int

    @property
    def ratio(self) -> float:
        return self.refusing_p95_ms / self.p95_ms


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    results: list[Result] = []
    print(_line(HEADER), flush=True)
    with new_directory(args.dir) as directory:
        urls = {"memory": "memory:", "lmdb": str(directory / "data")}
        if args.store:
            urls["postgresql"] = args.store
        for store, url in urls.items():
            with APP.open(url, roles=()) as runtime, open_interfaces(runtime) as interfaces:
                for name, interface in interfaces.items():
                    results.append(measure(store, name, interface, args.callers, args.rounds))
                    print(_line(_cells(results[-1])), flush=True)
    if args.json:
        documents = [result._asdict() | {"ratio": result.ratio} for result in results]
        args.json.write_text(json.dumps(documents, indent=1) + "\n", "utf-8")
    return int(any(result.failed for result in results))


def measure(store: str, name: str, interface: Interface, callers: int, rounds: int) -> Result:
    """The medians over alternating rounds."""
    interface(callers, True)
    p95s: dict[bool, list[float]] = {False: [], True: []}
    failed = 0
    for _ in range(rounds):
        for refusing in (False, True):
            calls = interface(callers, refusing)
            p95s[refusing].append(sorted(calls.seconds)[len(calls.seconds) * 95 // 100])
            failed += calls.failed
    plain, refusing_s = (statistics.median(p95s[refusing]) for refusing in (False, True))
    return Result(store, name, plain * 1e3, refusing_s * 1e3, failed)


@contextmanager
def open_interfaces(runtime: hf.Runtime) -> Iterator[dict[str, Interface]]:
    address = parse_address("127.0.0.1:0")
    with HttpServer(
        lambda server: TaskApi(server, runtime.store, APP.name, APP.tasks),
        address=address,
        guard=RequestGuard(address, ""),
    ) as server:
        yield {
            "threads": lambda callers, refusing: _threads(runtime, callers, refusing),
            "coroutines": lambda callers, refusing: _coroutines(runtime, callers, refusing),
            "http": lambda callers, refusing: _http(
                server.address.host, server.address.port, callers, refusing
            ),
        }


def _refused(number: int, refusing: bool) -> bool:
    return refusing and number % REFUSED_EACH == REFUSED_EACH // 2


def _threads(runtime: hf.Runtime, callers: int, refusing: bool) -> Calls:
    def submit(number: int) -> None:
        task = refused_note if _refused(number, refusing) else note
        runtime.submit(task, number)

    return _in_threads(callers, refusing, lambda _: submit)


def _http(host: str, port: int, callers: int, refusing: bool) -> Calls:
    with ExitStack() as stack:

        def caller(_: int) -> Callable[[int], None]:
            connection = http.client.HTTPConnection(host, port, timeout=60)
            stack.callback(connection.close)

            def submit(number: int) -> None:
                options = LONG if _refused(number, refusing) else {}
                body = json.dumps({"name": "note", "args": [number], "options": options})
                connection.request("POST", "/v1/tasks", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                document = json.loads(answer.read())
                if answer.status != 201:
                    raise KeyTooLarge if document["code"] == KeyTooLarge.code else OSError

            return submit

        return _in_threads(callers, refusing, caller)


def _in_threads(
    callers: int, refusing: bool, caller: Callable[[int], Callable[[int], None]]
) -> Calls:
    start = threading.Barrier(callers)
    submits = [caller(number) for number in range(callers)]

    def call(number: int) -> Calls:
        seconds, failed = [], 0
        start.wait()
        for at in range(number * CALLS, (number + 1) * CALLS):
            began = time.perf_counter()
            try:
                submits[number](at)
            except Exception:
                failed += not _refused(at, refusing)
                continue
            seconds.append(time.perf_counter() - began)
        return Calls(seconds, failed)

    with ThreadPoolExecutor(callers) as pool:
        return _merged(list(pool.map(call, range(callers))))


def _coroutines(runtime: hf.Runtime, callers: int, refusing: bool) -> Calls:
    async def call(number: int) -> Calls:
        seconds, failed = [], 0
        for at in range(number * CALLS, (number + 1) * CALLS):
            began = time.perf_counter()
            try:
                task = refused_note if _refused(at, refusing) else note
                await runtime.submit_async(task, at)
            except Exception:
                failed += not _refused(at, refusing)
                continue
            seconds.append(time.perf_counter() - began)
        return Calls(seconds, failed)

    async def all_calls() -> list[Calls]:
        return await asyncio.gather(*map(call, range(callers)))

    return _merged(asyncio.run(all_calls()))


def _merged(parts: Sequence[Calls]) -> Calls:
    return Calls(
        [one for calls in parts for one in calls.seconds], sum(one.failed for one in parts)
    )


def _cells(result: Result) -> Sequence[str]:
    return (
        result.store,
        result.interface,
        f"{result.p95_ms:.2f}",
        f"{result.refusing_p95_ms:.2f}",
        f"{result.ratio:.2f} {'met' if result.ratio <= RATIO_MAX else 'not met'}",
        str(result.failed),
    )


def _line(cells: Sequence[str]) -> str:
    return "  ".join(cell.ljust(15) for cell in cells).rstrip()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench isolation", description=__doc__)
    parser.add_argument("--store", metavar="URL", help="an empty PostgreSQL database for this run")
    parser.add_argument("--callers", type=int, default=CALLERS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument(
        "--dir", type=Path, default=ROOT / "build", help="parent of the temporary directory (build)"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
