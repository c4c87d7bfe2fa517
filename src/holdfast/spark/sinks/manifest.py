"""The manifest of a Parquet output: its run, its version and its committed parts.

The head has everything except the parts. On a local disk the parts are lines of a hash-chained log,
and the head records its committed length in bytes. In an object store they are in the head.
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
from holdfast.spark.sinks.part_files import PartFile

MANIFEST_NAME = "manifest.json"
LOG_NAME = "parts.jsonl"
SUCCESS_NAME = "_SUCCESS"
FORMAT = "holdfast-output-1"


class ManifestHead(msgspec.Struct, frozen=True):
    format: str
    run_id: str
    name: str
    schema: str  # human-readable
    arrow_schema: str  # machine-readable: base64 of the Arrow message
    generation: int
    version: int
    complete: bool
    parts: int
    rows: int
    log_bytes: int
    log_chain: str
    # The log file. A run that succeeds another one starts a new file.
    log: str = LOG_NAME
    # Only in an object store: the parts.
    files: list[PartFile] = []


@dataclass(frozen=True)
class Manifest:
    """The committed parts in seq order. `files` are full paths, without parts that have no file."""

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


def first_head(run_id: str, name: str, schema: pa.Schema) -> ManifestHead:
    text, message = schema.to_string(), encode_schema(schema)
    return ManifestHead(
        format=FORMAT,
        run_id=run_id,
        name=name,
        schema=text,
        arrow_schema=message,
        generation=0,
        version=NOTHING,
        complete=False,
        parts=0,
        rows=0,
        log_bytes=0,
        log_chain="",
    )


def head_with_files(head: ManifestHead, files: Sequence[PartFile]) -> ManifestHead:
    """Return the head with `files` added to its counts. The log lines are written separately."""
    return msgspec.structs.replace(
        head,
        version=files[-1].hi - 1 if files else head.version,
        parts=head.parts + len(files),
        rows=head.rows + sum(file.rows for file in files),
    )


def encode_head(head: ManifestHead) -> bytes:
    return msgspec.json.format(msgspec.json.encode(head), indent=2) + b"\n"


def decode_head(data: bytes, path: str) -> ManifestHead:
    try:
        head = msgspec.json.decode(data, type=ManifestHead)
    except msgspec.MsgspecError as error:
        raise OutputCorrupt(path=path, why=str(error)) from None
    if head.format != FORMAT:
        raise OutputCorrupt(path=path, why=f"format {head.format}, not {FORMAT}")
    return head


def encode_schema(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def head_schema(head: ManifestHead) -> pa.Schema:
    return decode_schema(head.arrow_schema)


def decode_schema(message: str) -> pa.Schema:
    """Decode a schema encoded by `encode_schema`."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(message)))


def chain_hash(chain: str, line: bytes) -> str:
    return hashlib.sha256(chain.encode() + line).hexdigest()
