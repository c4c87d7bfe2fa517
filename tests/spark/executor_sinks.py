"""Parquet sinks that fail when executors write their parts, or record a full disk. A stage opens them by their
spec (`module:Class`)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from holdfast.spark.sinks import OutputCorrupt, OutputFull, OutputReadOnly, Part, WrittenPart
from holdfast.spark.sinks.parquet import ParquetSink


class FailingParquetSink(ParquetSink):
    """Raises `times` failures of the kind `how` (denied, full, corrupt, killed, slow). All processes count the failures in files beside the output."""

    def __init__(self, path: str, how: str = "", times: int = 0, **options: Any) -> None:
        super().__init__(path, **options)
        self._how, self._times = how, times

    def spec(self) -> Any:
        spec = {**super().spec(), "how": self._how, "times": self._times}
        return {**spec, "kind": f"{type(self).__module__}:{type(self).__name__}"}

    def check_writer(self, writer: bytes) -> None:
        if self._how == "denied" and self._take_failure():
            raise OutputReadOnly(path=str(self.path), why="not from this executor")
        super().check_writer(writer)

    def write_part(self, writer: bytes, part: Part) -> WrittenPart:
        if self._how == "full" and self._take_failure():
            raise OutputFull(path=str(self.path), why="no space")
        if self._how == "corrupt" and self._take_failure():
            raise OutputCorrupt(path=str(self.path), why="it is broken")
        written = super().write_part(writer, part)
        if self._how == "killed" and self._take_failure():
            os.kill(os.getpid(), signal.SIGKILL)
        if self._how == "slow":
            (Path(f"{self.path}.failures") / "writing").touch()
            while not (Path(f"{self.path}.failures") / "go").exists():
                time.sleep(0.02)
        return written

    def _take_failure(self) -> bool:
        """Take one of the remaining failures. False when none is left."""
        directory = Path(f"{self.path}.failures")
        directory.mkdir(exist_ok=True)
        for n in range(self._times):
            try:
                (directory / str(n)).touch(exist_ok=False)
                return True
            except FileExistsError:
                continue
        return False


class FullDiskMarkerSink(ParquetSink):
    """Creates a marker file when a commit raises OutputFull."""

    def __init__(self, path: str, told: str = "", **options: Any) -> None:
        super().__init__(path, **options)
        self._marker = told

    def spec(self) -> Any:
        kind = f"{type(self).__module__}:{type(self).__name__}"
        return {**super().spec(), "told": self._marker, "kind": kind}

    def commit_many(self, parts: Any) -> int:
        try:
            return super().commit_many(parts)
        except OutputFull:
            Path(self._marker).touch()
            raise
