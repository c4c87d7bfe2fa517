"""Processes that load a store. Each prints `ready`, runs when it reads a go line, and answers in JSON.

    with WorkerGroup(role, count, path) as group:
        answers = group.go(seconds=1.0)         all start at once; one answer per process

The processes start Python and open the store before anything is timed. They serve all repeats of a metric.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.place import ROOT, writer_pid
from bench.record import Sample


class WorkerFailed(RuntimeError):
    pass


class Worker:
    def __init__(self, role: str, path: Path, **options: Any) -> None:
        arguments = json.dumps({"role": role, "path": str(path), **options})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.load", arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.pid = self._process.pid

    def await_ready(self) -> None:
        if (line := self._line()) != "ready":
            raise WorkerFailed(f"a worker printed {line!r} instead of ready")

    def go(self, **parameters: Any) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(parameters) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._line())
        return answer

    def close(self) -> None:
        """Close the input, so that the process exits. Kill it if it does not."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _line(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise WorkerFailed(f"a worker ended with code {self._process.wait()}")
        return line.strip()


class WorkerGroup:
    def __init__(self, role: str, count: int, path: Path, **options: Any) -> None:
        self._path = path
        self.members = [Worker(role, path, number=number, **options) for number in range(count)]

    def __enter__(self) -> WorkerGroup:
        try:
            for member in self.members:
                member.await_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def go(self, **parameters: Any) -> list[dict[str, Any]]:
        for member in self.members:
            member.go(**parameters)
        return [member.answer() for member in self.members]

    def rated(self, **parameters: Any) -> Sample:
        """One repeat as a sample: the sum of the rates, and the latencies of the slowest process.

        `client_us` and `writer_us` are processor time per operation, of all clients together and of
        the writer of the store. They show which side is the bottleneck.
        """
        pid = writer_pid(self._path)
        used_ns = cpu_ns(pid)
        answers = self.go(**parameters)
        writer_ns = cpu_ns(pid) - used_ns
        count = sum(answer["count"] for answer in answers)
        return {
            "rate": sum(answer["rate"] for answer in answers),
            "p50_ms": max(answer["p50_ms"] for answer in answers),
            "p99_ms": max(answer["p99_ms"] for answer in answers),
            "client_us": 1e6 * sum(answer["cpu_s"] for answer in answers) / count,
            "writer_us": writer_ns / 1000 / count,
        }

    def close(self) -> None:
        for member in self.members:
            member.close()


def cpu_ns(pid: int) -> int:
    """Processor time of a process so far, in nanoseconds. Clock ticks would be too coarse."""
    return sum(
        int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )
