"""Parquet outputs that fail where executors write their parts, or tell of a full disk. A stage finds them by their
spec (`module:Class`)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from holdfast.spark.sinks import OutputCorrupt, OutputFull, OutputReadOnly, Part, WrittenPart
from holdfast.spark.sinks.parquet import ParquetSink


class Failing(ParquetSink):
    """`how` it fails: `times` times over all processes, which count in files beside the output."""

    def __init__(self, path: str, how: str = "", times: int = 0, **options: Any) -> None:
        super().__init__(path, **options)
        self._how, self._times = how, times

    def spec(self) -> Any:
        spec = {**super().spec(), "how": self._how, "times": self._times}
        return {**spec, "kind": f"{type(self).__module__}:{type(self).__name__}"}

    def check_writer(self, writer: bytes) -> None:
        if self._how == "denied" and self._left():
            raise OutputReadOnly(path=str(self.path), why="not from this executor")
        super().check_writer(writer)

    def write_part(self, writer: bytes, part: Part) -> WrittenPart:
        if self._how == "full" and self._left():
            raise OutputFull(path=str(self.path), why="no space")
        if self._how == "corrupt" and self._left():
            raise OutputCorrupt(path=str(self.path), why="it is broken")
        written = super().write_part(writer, part)
        if self._how == "killed" and self._left():
            os.kill(os.getpid(), signal.SIGKILL)
        if self._how == "slow":
            (Path(f"{self.path}.failures") / "writing").touch()
            while not (Path(f"{self.path}.failures") / "go").exists():
                time.sleep(0.02)
        return written

    def _left(self) -> bool:
        """Whether it is to fail once more."""
        home = Path(f"{self.path}.failures")
        home.mkdir(exist_ok=True)
        for n in range(self._times):
            try:
                (home / str(n)).touch(exist_ok=False)
                return True
            except FileExistsError:
                continue
        return False


class Telling(ParquetSink):
    """Makes the file `told` when a commit finds the disk full."""

    def __init__(self, path: str, told: str = "", **options: Any) -> None:
        super().__init__(path, **options)
        self._told = told

    def spec(self) -> Any:
        kind = f"{type(self).__module__}:{type(self).__name__}"
        return {**super().spec(), "told": self._told, "kind": kind}

    def commit_many(self, parts: Any) -> int:
        try:
            return super().commit_many(parts)
        except OutputFull:
            Path(self._told).touch()
            raise
