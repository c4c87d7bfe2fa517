"""Parquet storage in a local directory with one writing machine.

- A commit renames parts into place, appends their lines to the log, then replaces the head. The
  head is the commit point: lines behind its `log_bytes` do not count and are overwritten. A
  repeated commit writes the same bytes.
- The cost of a commit is independent of the number of parts. One file with all parts, rewritten at
  each commit, would grow.
- The lines form a hash chain, and the head has the last hash. A changed or missing line is
  detected.
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
from holdfast.spark.sinks.manifest import (
    LOG_NAME,
    MANIFEST_NAME,
    SUCCESS_NAME,
    ManifestHead,
    chain_hash,
    decode_head,
    encode_head,
    head_with_files,
)
from holdfast.spark.sinks.parquet_files import (
    SCRATCH,
    StepHook,
    check_scratch,
    check_writable,
    ignore_step,
    is_intact,
    is_scratch_only,
    make_directory,
    place_scratch,
    put_part,
    remove_temporaries,
    replace_file,
    sync_directory,
    translate_os_errors,
    write_scratch,
)
from holdfast.spark.sinks.part_files import PartFile, WrittenFile

LOCK_WAIT_S = 10.0
LOCK_POLL_S = 0.02
NAMES_SHOWN = 3


class LocalParquetStorage:
    def __init__(
        self, path: Path, *, step: StepHook = ignore_step, lock_wait_s: float = LOCK_WAIT_S
    ) -> None:
        self.path = path
        self.url = str(path)
        self._step = step
        self._lock_wait_s = lock_wait_s

    def translate_errors(self) -> contextlib.AbstractContextManager[None]:
        return translate_os_errors(self.path)

    def check_writable(self) -> None:
        check_writable(self.path)

    def list_existing(self) -> str:
        """Return the names of existing files, except the remains of an interrupted `begin`."""
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

    def remove_temporaries(self) -> None:
        remove_temporaries(self.path / SCRATCH)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the output against other writers on this machine while the head is read and
        replaced.
        """
        handle = os.open(self.path / SCRATCH, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._acquire_lock(handle)
            yield
        finally:
            os.close(handle)

    def _acquire_lock(self, handle: int) -> None:
        deadline = time.monotonic() + self._lock_wait_s
        while True:
            try:
                return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OutputHeld(path=self.url, waited_s=self._lock_wait_s) from None
            time.sleep(LOCK_POLL_S)

    # --- manifest -------------------------------------------------------------------------------

    def head(self) -> ManifestHead | None:
        """Return the head, or None without a manifest."""
        file = self.path / SCRATCH / MANIFEST_NAME
        try:
            data = file.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return decode_head(data, str(file))

    def files(self, head: ManifestHead) -> list[PartFile]:
        """Return the parts in the lines that the head covers. Later lines were never committed."""
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
            chain = chain_hash(chain, line)
        if len(parts) != head.parts or chain != head.log_chain:
            raise OutputCorrupt(
                path=str(file), why="the lines of the file differ from the committed lines"
            )
        return parts

    def write_head(self, head: ManifestHead) -> None:
        scratch = self.path / SCRATCH
        replace_file(scratch / MANIFEST_NAME, encode_head(head), scratch=scratch, step=self._step)

    def append_files(self, head: ManifestHead, files: Sequence[PartFile]) -> None:
        """Write a head that also lists `files`."""
        self.write_head(self._append_to_log(head, files))

    def replace_files(self, head: ManifestHead, files: Sequence[PartFile]) -> None:
        """Write a head that lists exactly `files`. `head` lists none."""
        self.write_head(self._append_to_log(head, files))
        for log in (self.path / SCRATCH).glob("parts*.jsonl"):
            if log.name != head.log:
                log.unlink()

    def log_name(self, generation: int) -> str:
        return f"parts-{generation}.jsonl" if generation else LOG_NAME

    def _append_to_log(self, head: ManifestHead, files: Sequence[PartFile]) -> ManifestHead:
        """Append the lines of `files` to the log durably; return the head that covers them."""
        lines = [msgspec.json.encode(file) + b"\n" for file in files]
        data, chain = b"".join(lines), head.log_chain
        for line in lines:
            chain = chain_hash(chain, line)
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
            head_with_files(head, files), log_bytes=head.log_bytes + len(data), log_chain=chain
        )

    # --- files ----------------------------------------------------------------------------------

    def put_part(
        self, name: str, part: Part, schema: pa.Schema, *, empty: bool = False
    ) -> PartFile:
        return put_part(self.path, name, part, schema, step=self._step, empty=empty)

    def write_uncommitted(
        self, name: str, run_id: str, part: Part, schema: pa.Schema
    ) -> WrittenFile:
        """On an executor: write a file to the scratch directory. The ledger service renames it
        (`accept_written`), so an abandoned executor cannot change a plain listing.
        """
        return write_scratch(self.path, name, part, schema, step=self._step)

    def accept_written(self, written: WrittenFile) -> PartFile:
        return place_scratch(self.path, written) if written.scratch else written.file

    def check_writer(self) -> None:
        check_scratch(self.path)

    def sync(self) -> None:
        """Make the files durable."""
        sync_directory(self.path)

    def is_intact(self, part: PartFile) -> bool:
        return is_intact(self.path, part)

    def list_names(self) -> list[str]:
        return sorted(os.listdir(self.path))

    def remove_files(self, names: Sequence[str]) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)
        self.sync()

    def mark_success(self) -> None:
        mark = self.path / SUCCESS_NAME
        if not mark.exists():
            mark.touch()
            self.sync()

    def refuse_file(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise OutputNotOurs(path=self.url, found="a file")
