"""A directory that holds a Parquet output, on a disk that one machine writes to.

- Parts are renamed into place, their lines appended to the log, then the head is replaced. The head is
  the commit: lines behind its `log_bytes` do not count and are overwritten, and the repeat of a commit
  writes the same bytes.
- A commit costs the same for the first part and the ten thousandth. One file that lists all parts,
  rewritten at each commit, would not.
- The lines are chained by hash and the head holds the last link: a changed or missing line is seen.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa

from holdfast.spark.sinks.api import OutputCorrupt, OutputHeld, OutputNotOurs, Part
from holdfast.spark.sinks.files import (
    SCRATCH,
    Step,
    check_scratch,
    check_writable,
    drop_temporaries,
    is_scratch_only,
    is_whole,
    make_directory,
    no_step,
    place_scratch,
    put_part,
    replace_file,
    sync_directory,
    typed,
    write_scratch,
)
from holdfast.spark.sinks.manifest import (
    HEAD,
    LOG,
    SUCCESS,
    Head,
    counting,
    decoded,
    encoded,
    link,
)
from holdfast.spark.sinks.written import PartFile, WrittenFile

LOCK_WAIT_S = 10.0
LOCK_POLL_S = 0.02
NAMES_SHOWN = 3


class LocalPlace:
    def __init__(
        self, path: Path, *, step: Step = no_step, lock_wait_s: float = LOCK_WAIT_S
    ) -> None:
        self.path = path
        self.url = str(path)
        self._step = step
        self._lock_wait_s = lock_wait_s

    def typed(self) -> contextlib.AbstractContextManager[None]:
        return typed(self.path)

    def check_writable(self) -> None:
        check_writable(self.path)

    def found(self) -> str:
        """Names of what lies here, if it is not what a `begin` that was killed can leave."""
        if not self.path.exists():
            return ""
        if not self.path.is_dir():
            return "a file"
        if is_scratch_only(self.path):
            return ""
        names = sorted(os.listdir(self.path))
        more = ", …" if len(names) > NAMES_SHOWN else ""
        return ", ".join(names[:NAMES_SHOWN]) + more

    def prepare(self) -> None:
        make_directory(self.path / SCRATCH)

    def sweep(self) -> None:
        drop_temporaries(self.path / SCRATCH)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One writer at a time on this machine, while the head is read and replaced."""
        handle = os.open(self.path / SCRATCH, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._await_lock(handle)
            yield
        finally:
            os.close(handle)

    def _await_lock(self, handle: int) -> None:
        deadline = time.monotonic() + self._lock_wait_s
        while True:
            try:
                return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OutputHeld(path=self.url, waited_s=self._lock_wait_s) from None
            time.sleep(LOCK_POLL_S)

    # --- the manifest ---------------------------------------------------------------------------

    def head(self) -> Head | None:
        """None where there is no manifest at all."""
        file = self.path / SCRATCH / HEAD
        try:
            data = file.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return decoded(data, str(file))

    def files(self, head: Head) -> list[PartFile]:
        """The lines that the head counts; all else behind them was never committed."""
        if not head.parts:
            return []
        file = self.path / SCRATCH / head.log
        try:
            with open(file, "rb") as log:
                lines = log.read(head.log_bytes).splitlines(keepends=True)
            parts = [msgspec.json.decode(line, type=PartFile) for line in lines]
        except (FileNotFoundError, msgspec.MsgspecError) as error:
            raise OutputCorrupt(path=str(file), why=str(error)) from None
        chain = ""
        for line in lines:
            chain = link(chain, line)
        if len(parts) != head.parts or chain != head.log_chain:
            raise OutputCorrupt(path=str(file), why="its lines are not those that were committed")
        return parts

    def write_head(self, head: Head) -> None:
        scratch = self.path / SCRATCH
        replace_file(scratch / HEAD, encoded(head), scratch=scratch, step=self._step)

    def append(self, head: Head, files: Sequence[PartFile]) -> None:
        """A head that counts `files` too."""
        self.write_head(self._logged(head, files))

    def swap(self, head: Head, files: Sequence[PartFile]) -> None:
        """A head that counts `files` and no others. `head` counts none."""
        self.write_head(self._logged(head, files))
        for log in (self.path / SCRATCH).glob("parts*.jsonl"):
            if log.name != head.log:
                log.unlink()

    def new_log(self, generation: int) -> str:
        return f"parts-{generation}.jsonl" if generation else LOG

    def _logged(self, head: Head, files: Sequence[PartFile]) -> Head:
        """The head that counts `files`, whose lines are in the log when this returns."""
        lines = [msgspec.json.encode(file) + b"\n" for file in files]
        data, chain = b"".join(lines), head.log_chain
        for line in lines:
            chain = link(chain, line)
        handle = os.open(self.path / SCRATCH / head.log, os.O_WRONLY | os.O_CREAT, 0o666)
        with open(handle, "wb") as log:
            log.truncate(head.log_bytes)
            log.seek(head.log_bytes)
            log.write(data)
            log.flush()
            self._step("log-write")
            os.fsync(log.fileno())
        self._step("log-fsync")
        return msgspec.structs.replace(
            counting(head, files), log_bytes=head.log_bytes + len(data), log_chain=chain
        )

    # --- files ----------------------------------------------------------------------------------

    def put(self, name: str, part: Part, schema: pa.Schema, *, empty: bool = False) -> PartFile:
        return put_part(self.path, name, part, schema, step=self._step, empty=empty)

    def write(self, name: str, run_id: str, part: Part, schema: pa.Schema) -> WrittenFile:
        """On an executor: a file in the scratch directory. The ledger service renames it (`accept`), so an executor
        that was given up cannot change what a plain listing shows."""
        return write_scratch(self.path, name, part, schema, step=self._step)

    def accept(self, written: WrittenFile) -> PartFile:
        return place_scratch(self.path, written) if written.scratch else written.file

    def check_writer(self) -> None:
        check_scratch(self.path)

    def settle(self) -> None:
        """What was put is durable."""
        sync_directory(self.path)

    def is_whole(self, part: PartFile) -> bool:
        return is_whole(self.path, part)

    def names(self) -> list[str]:
        return sorted(os.listdir(self.path))

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)
        self.settle()

    def mark_success(self) -> None:
        mark = self.path / SUCCESS
        if not mark.exists():
            mark.touch()
            self.settle()

    def refuse_file(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise OutputNotOurs(path=self.url, found="a file")
