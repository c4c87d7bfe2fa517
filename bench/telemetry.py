"""`python -m bench telemetry`: the cost of traces, logs and metrics for tasks and messages.

    python -m bench telemetry [--rounds 20] [--slice-s 2] [--json FILE]

Five processes, each with its own embedded store, its client threads, its workers and its writer:

    off       OpenTelemetry is not imported
    control   the same again: its ratio is the noise of the measurement
    api       the API is imported, no SDK is configured
    sdk       the SDK samples 1 % of the traces
    all       the SDK samples 1 %, JSON log lines from the level info on, and /metrics is read each second

In each round every process works for a slice in turn, in an order that rotates. The ratio of a round is the processor
time of one task (or one message) by that of `off` in the same round, with the writer's processor time included. The
ratio is the median over the rounds. `least` compares the cheapest slices of the two processes: other processes on the
machine only make a slice dearer. `throughput` is the median ratio of items per second.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import holdfast as hf
from bench.peers.processors import used_ns
from bench.place import ROOT, new_directory
from holdfast.ops import log_format
from holdfast.ops.api.universes import UniverseChoice
from holdfast.ops.http.auth import RequestGuard, parse_address
from holdfast.ops.http.served_api import ServedApi
from holdfast.ops.http.server import HttpServer

MODES = ("off", "control", "api", "sdk", "all")
PARTS = ("tasks", "messages")
SAMPLED = 0.01
GOAL = 1.02
THREADS = 8
BATCH = 50
WORLDS = 50
SCRAPE_S = 1.0
HEADER = ("part", "mode", "µs each", "ratio", "quartiles", "least", "throughput")


class BenchCounted(hf.Event):
    pass


class MeasuredWorld(hf.World):
    count: int = 0

    @hf.on(BenchCounted)
    def counted(self, event: BenchCounted, cx: hf.Context) -> None:
        self.count += 1


@hf.task
def measured_task(n: int) -> int:
    return n


APP = hf.App("telemetry", tasks=[measured_task], worlds=[MeasuredWorld])


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    if args.child:
        _serve_child(args.child, args.dir)
        return 0
    rows: list[dict[str, Any]] = []
    with new_directory(args.dir) as directory, ExitStack() as stack:
        children = {mode: stack.enter_context(_child(mode, directory / mode)) for mode in MODES}
        for part in PARTS:
            rows += measure(children, part, args.rounds, args.slice_s)
    print(_line(HEADER))
    for row in rows:
        print(_line(_cells(row)))
    met = all(row["ratio"] < GOAL for row in rows if row["mode"] == "all")
    print(f"\nall of it below {GOAL:.2f}: {'met' if met else 'MISSED'}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    return 0


def measure(
    children: dict[str, MeasuredProcess], part: str, rounds: int, slice_s: float
) -> list[dict[str, Any]]:
    """The medians of the rounds, after one round that counts for nothing."""
    cost_us: dict[str, list[float]] = {mode: [] for mode in MODES}
    per_s: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(rounds + 1):
        start = number % len(MODES)
        for mode in MODES[start:] + MODES[:start]:
            used_us, rate = children[mode].work(part, slice_s)
            if number:
                cost_us[mode].append(used_us)
                per_s[mode].append(rate)
    return [_row(part, mode, cost_us, per_s) for mode in MODES]


def _row(
    part: str, mode: str, cost_us: dict[str, list[float]], per_s: dict[str, list[float]]
) -> dict[str, Any]:
    ratios = [one / off for one, off in zip(cost_us[mode], cost_us["off"], strict=True)]
    rates = [one / off for one, off in zip(per_s[mode], per_s["off"], strict=True)]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return {
        "part": part,
        "mode": mode,
        "us": median(cost_us[mode]),
        "ratio": median(ratios),
        "low": low,
        "high": high,
        "least": min(cost_us[mode]) / min(cost_us["off"]),
        "throughput": median(rates),
    }


class MeasuredProcess:
    """A child that works on request."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self._address: str = json.loads(process.stdout.readline())["address"]

    def work(self, part: str, slice_s: float) -> tuple[float, float]:
        """Return the processor time of each item in µs, and the items per second."""
        stopped = threading.Event()
        scraper = threading.Thread(target=self._scrape, args=(stopped,))
        before = used_ns([self._process.pid])
        if self._address:
            scraper.start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([part, slice_s]) + "\n")
        self._process.stdin.flush()
        done = json.loads(self._process.stdout.readline())
        used = used_ns([self._process.pid]) - before
        stopped.set()
        if self._address:
            scraper.join()
        return used / done["count"] / 1e3, done["count"] / done["seconds"]

    def _scrape(self, stopped: threading.Event) -> None:
        while not stopped.wait(SCRAPE_S):
            with urllib.request.urlopen(self._address, timeout=30) as answer:
                answer.read()


@contextmanager
def _child(mode: str, directory: Path) -> Iterator[MeasuredProcess]:
    command = [sys.executable, "-m", "bench", "telemetry", "--child", mode, "--dir", str(directory)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            yield MeasuredProcess(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


# -- in the child --------------------------------------------------------------------------------


def _serve_child(mode: str, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if mode in ("api", "sdk", "all"):
            use_opentelemetry(with_sdk=mode != "api")
        if mode == "all":
            lines = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            log_format.configure("json", "info", {"worker": "bench"}, lines)
        roles = ("orchestrator", "world", "task")
        rt = stack.enter_context(APP.open(str(directory / "data"), roles=roles))
        address = stack.enter_context(_metrics_server(rt)) if mode == "all" else ""
        threads = stack.enter_context(ThreadPoolExecutor(THREADS))
        print(json.dumps({"address": address}), flush=True)
        for line in sys.stdin:
            part, slice_s = json.loads(line)
            print(json.dumps(work(rt, threads, part, slice_s)), flush=True)


def use_opentelemetry(*, with_sdk: bool) -> None:
    from opentelemetry import trace

    if not with_sdk:
        return
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    class DiscardExporter(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(SAMPLED)))
    provider.add_span_processor(BatchSpanProcessor(DiscardExporter()))
    trace.set_tracer_provider(provider)


@contextmanager
def _metrics_server(rt: hf.Runtime) -> Iterator[str]:
    address = parse_address("127.0.0.1:0")
    universes = UniverseChoice(rt.store, {rt.universe: APP}, rt.universe)
    with HttpServer(
        lambda server: ServedApi(server, rt.store, universes),
        address=address,
        guard=RequestGuard(address, ""),
    ) as server:
        yield f"http://{server.address.host}:{server.address.port}/metrics"


def work(rt: hf.Runtime, threads: ThreadPoolExecutor, part: str, slice_s: float) -> dict[str, Any]:
    """Work for this time in batches of all threads, each item by its own call."""
    call = _run_tasks if part == "tasks" else _send_messages
    began = time.perf_counter()
    count = 0
    while time.perf_counter() - began < slice_s:
        count += sum(threads.map(lambda at: call(rt, at), range(THREADS)))
    if part == "messages":
        _settle(rt)
    logging.getLogger("bench").info("%s: %s", part, count)
    return {"count": count, "seconds": time.perf_counter() - began}


def _run_tasks(rt: hf.Runtime, at: int) -> int:
    for handle in [rt.submit(measured_task, at) for _ in range(BATCH)]:
        handle.result(60)
    return BATCH


def _send_messages(rt: hf.Runtime, at: int) -> int:
    for number in range(BATCH):
        rt.world(MeasuredWorld, f"w{(at * BATCH + number) % WORLDS}").send(BenchCounted())
    return BATCH


def _settle(rt: hf.Runtime) -> None:
    """Wait until the sent events are handled: a reply follows all events before it."""
    for number in range(WORLDS):
        world = rt.world(MeasuredWorld, f"w{number}")
        seq = world.send(BenchCounted())
        world.wait_for(lambda state, seq=seq: state.count >= seq)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["part"],
        row["mode"],
        f"{row['us']:.1f}",
        f"{row['ratio']:.3f}",
        f"{row['low']:.3f}–{row['high']:.3f}",
        f"{row['least']:.3f}",
        f"{row['throughput']:.3f}",
    )


def _line(cells: Sequence[str]) -> str:
    return "  ".join(cell.rjust(12) for cell in cells)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench telemetry", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each part (20)")
    parser.add_argument("--slice-s", type=float, default=2.0, help="seconds of a slice (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    parser.add_argument(
        "--dir", type=Path, default=ROOT / "build", help="parent of the temporary directory (build)"
    )
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
