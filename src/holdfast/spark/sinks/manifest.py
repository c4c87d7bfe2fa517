"""The manifest of a Parquet output: whose it is, its version, and the parts that are committed.

A head says everything but the parts. On a local disk these are the lines of a log, chained by hash,
of which the head counts so many bytes; in an object store they are in the head itself.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from holdfast.spark.sinks.api import NOTHING, OutputCorrupt
from holdfast.spark.sinks.written import PartFile

HEAD = "manifest.json"
LOG = "parts.jsonl"
SUCCESS = "_SUCCESS"
FORMAT = "holdfast-output-1"


class Head(msgspec.Struct, frozen=True):
    format: str
    run_id: str
    name: str
    schema: str  # for people
    arrow_schema: str  # the same for programs: base64 of the Arrow message
    generation: int
    version: int
    complete: bool
    parts: int
    rows: int
    log_bytes: int
    log_chain: str
    # The file of the log; a run that succeeds another one has a new one.
    log: str = LOG
    # In an object store: the parts themselves.
    files: list[PartFile] = []


@dataclass(frozen=True)
class Manifest:
    """The committed parts in seq order; `files` in full, parts without a file are left out."""

    path: str
    run_id: str
    name: str
    schema: pa.Schema
    version: int
    complete: bool
    rows: int
    parts: tuple[PartFile, ...]

    @property
    def files(self) -> list[str]:
        return [os.path.join(self.path, part.path) for part in self.parts if part.path]


def first_head(run_id: str, name: str, schema: pa.Schema) -> Head:
    text, message = schema.to_string(), message_of(schema)
    return Head(FORMAT, run_id, name, text, message, 0, NOTHING, False, 0, 0, 0, "")


def counting(head: Head, files: Sequence[PartFile]) -> Head:
    """The head with `files` added to those that it counts; their lines are not its matter."""
    return msgspec.structs.replace(
        head,
        version=files[-1].hi - 1 if files else head.version,
        parts=head.parts + len(files),
        rows=head.rows + sum(file.rows for file in files),
    )


def encoded(head: Head) -> bytes:
    return msgspec.json.format(msgspec.json.encode(head), indent=2) + b"\n"


def decoded(data: bytes, path: str) -> Head:
    try:
        head = msgspec.json.decode(data, type=Head)
    except msgspec.MsgspecError as error:
        raise OutputCorrupt(path=path, why=str(error)) from None
    if head.format != FORMAT:
        raise OutputCorrupt(path=path, why=f"format {head.format}, not {FORMAT}")
    return head


def message_of(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def schema_of(head: Head) -> pa.Schema:
    return schema_from(head.arrow_schema)


def schema_from(message: str) -> pa.Schema:
    """The schema of a text by `message_of`."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(message)))


def link(chain: str, line: bytes) -> str:
    return hashlib.sha256(chain.encode() + line).hexdigest()
