"""Parquet storage in an object store: a prefix with parts and a manifest.

- The manifest is one object that lists its parts. It is written with a conditional put over the
  version that was read. Of two writers that read the same version one is refused and finds that it
  is fenced.
- A part is put under a name derived from its seqs before the manifest lists it. Its bytes depend on
  its rows alone, so a late put of a former writer has the same content.
- No manifest contains credentials (`object_store`).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec
import pyarrow as pa

from holdfast.clock import SYSTEM
from holdfast.spark.sinks.api import OutputError, OutputNotOurs, OutputReadOnly, OutputTaken, Part
from holdfast.spark.sinks.location import Location
from holdfast.spark.sinks.manifest import (
    LOG_NAME,
    MANIFEST_NAME,
    SUCCESS_NAME,
    ManifestHead,
    decode_head,
    encode_head,
    head_with_files,
)
from holdfast.spark.sinks.object_store import error_text, obstore_library, open_bucket
from holdfast.spark.sinks.parquet_files import SCRATCH, StepHook, ignore_step, write_groups
from holdfast.spark.sinks.part_files import PartFile, WrittenFile

NAMES_SHOWN = 3
BUFFER_BYTES = 10 * 1024 * 1024
WRITE_PROBE_NAME = "_holdfast/writable"


class ObjectParquetStorage:
    def __init__(self, place: Location, *, step: StepHook = ignore_step) -> None:
        self.url = place.url
        self._location = place
        self._prefix = place.prefix
        self._step = step
        self._bucket: Any = None
        self._head_etag: str | None = None  # ETag of the last head read

    # --- bucket ---------------------------------------------------------------------------------

    def _open_bucket(self) -> Any:
        if self._bucket is None:
            self._bucket = open_bucket(self._location)
        return self._bucket

    def _object_name(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    @contextlib.contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Translate errors of the library. Request headers are removed from the texts."""
        wrong = obstore_library().exceptions
        try:
            yield
        except (wrong.PermissionDeniedError, wrong.UnauthenticatedError) as error:
            raise OutputReadOnly(path=self.url, why=error_text(error)) from None
        except (wrong.AlreadyExistsError, wrong.PreconditionError):
            raise OutputTaken(path=self.url, why="the manifest was replaced meanwhile") from None
        except wrong.NotFoundError as error:
            raise OutputNotOurs(
                path=self.url, found=f"no such bucket: {error_text(error)}"
            ) from None
        except (wrong.BaseError, ValueError, OSError) as error:
            raise OutputError(path=self.url, why=error_text(error)) from None

    def check_writable(self) -> None:
        """Put an object and delete it: object stores have no other test."""
        store = self._open_bucket()
        obstore_library().put(store, self._object_name(WRITE_PROBE_NAME), b"")
        obstore_library().delete(store, self._object_name(WRITE_PROBE_NAME))

    def list_existing(self) -> str:
        children = obstore_library().list_with_delimiter(self._open_bucket(), self._prefix)
        names = [one["path"].rpartition("/")[2] for one in children["objects"]]
        names += [one.rstrip("/").rpartition("/")[2] + "/" for one in children["common_prefixes"]]
        names = sorted(set(names) - {""})
        if names == [f"{SCRATCH}/"]:
            probe = self._object_name(WRITE_PROBE_NAME)
            inside = (
                obstore_library()
                .list(self._open_bucket(), prefix=self._object_name(SCRATCH))
                .collect()
            )
            if all(one["path"].startswith(probe) for one in inside):
                return ""
        more = ", …" if len(names) > NAMES_SHOWN else ""
        return ", ".join(names[:NAMES_SHOWN]) + more

    def refuse_file(self) -> None:
        """Do nothing: an object of this exact name does not conflict with the prefix."""

    def prepare(self) -> None: ...

    def remove_temporaries(self) -> None: ...

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        yield  # the conditional put is the lock

    # --- the manifest ---------------------------------------------------------------------------

    def head(self) -> ManifestHead | None:
        name = self._object_name(f"{SCRATCH}/{MANIFEST_NAME}")
        try:
            found = obstore_library().get(self._open_bucket(), name)
            data = bytes(found.bytes())
        except (obstore_library().exceptions.NotFoundError, FileNotFoundError):
            self._head_etag = None
            return None
        self._head_etag = found.meta["e_tag"]
        return decode_head(data, f"{self.url}/{SCRATCH}/{MANIFEST_NAME}")

    def files(self, head: ManifestHead) -> list[PartFile]:
        return list(head.files)

    def write_head(self, head: ManifestHead) -> None:
        mode: Any = "create" if self._head_etag is None else {"e_tag": self._head_etag}
        name = self._object_name(f"{SCRATCH}/{MANIFEST_NAME}")
        self._step("head-before")
        put = obstore_library().put(self._open_bucket(), name, encode_head(head), mode=mode)
        self._head_etag = put["e_tag"]
        self._step("head-put")

    def append_files(self, head: ManifestHead, files: Sequence[PartFile]) -> None:
        self.write_head(
            msgspec.structs.replace(head_with_files(head, files), files=[*head.files, *files])
        )

    def replace_files(self, head: ManifestHead, files: Sequence[PartFile]) -> None:
        self.write_head(msgspec.structs.replace(head_with_files(head, files), files=list(files)))

    def log_name(self, generation: int) -> str:
        return LOG_NAME

    # --- objects --------------------------------------------------------------------------------

    def put_part(
        self, name: str, part: Part, schema: pa.Schema, *, empty: bool = False
    ) -> PartFile:
        groups = part.groups()
        first = next(groups, None)
        if first is None and not empty:
            return PartFile("", part.lo, part.hi, 0, 0, "")
        all_groups = chain([first] if first is not None else [], groups)
        with _HashedUpload(self._open_bucket(), self._object_name(name)) as upload:
            rows = write_groups(schema, all_groups, pa.PythonFile(upload, "w"))
        self._step("part-put")
        digest = upload.sha256.hexdigest()
        return PartFile(name, part.lo, part.hi, rows, upload.length, digest)

    def write_uncommitted(
        self, name: str, run_id: str, part: Part, schema: pa.Schema
    ) -> WrittenFile:
        """On an executor: put an object whose name contains the run id. Object stores have no
        rename, and an abandoned executor of another run must not replace it.
        """
        if run_id not in name:
            name = f"{name.removesuffix('.parquet')}-{run_id}.parquet"
        return WrittenFile(self.put_part(name, part, schema))

    def accept_written(self, written: WrittenFile) -> PartFile:
        return written.file

    def check_writer(self) -> None:
        name = self._object_name(f"{WRITE_PROBE_NAME}-{SYSTEM.entropy(4).hex()}")
        obstore_library().put(self._open_bucket(), name, b"")
        obstore_library().delete(self._open_bucket(), name)

    def sync(self) -> None: ...

    def is_intact(self, part: PartFile) -> bool:
        try:
            found = obstore_library().head(self._open_bucket(), self._object_name(part.path))
        except (obstore_library().exceptions.NotFoundError, FileNotFoundError):
            return False
        return bool(found["size"] == part.bytes)

    def list_names(self) -> list[str]:
        children = obstore_library().list_with_delimiter(self._open_bucket(), self._prefix)
        return sorted(one["path"].rpartition("/")[2] for one in children["objects"])

    def remove_files(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(obstore_library().exceptions.NotFoundError, FileNotFoundError):
                obstore_library().delete(self._open_bucket(), self._object_name(name))

    def mark_success(self) -> None:
        obstore_library().put(self._open_bucket(), self._object_name(SUCCESS_NAME), b"")


class _HashedUpload:
    """An upload in progress. The object exists only after a close without an error."""

    def __init__(self, store: Any, name: str) -> None:
        self._writer = obstore_library().open_writer(store, name, buffer_size=BUFFER_BYTES)
        self.sha256 = hashlib.sha256()
        self.length = 0
        self.closed = False

    def __enter__(self) -> _HashedUpload:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._writer.close()
        self._writer = None  # an upload that is not closed creates no object

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.sha256.update(view)
        self.length += view.nbytes
        self._writer.write(bytes(view))
        return view.nbytes

    def tell(self) -> int:
        return self.length

    def flush(self) -> None: ...

    def close(self) -> None:
        """Do nothing: Arrow closes its file, but the `with` block ends the upload and handles
        errors.
        """

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False
