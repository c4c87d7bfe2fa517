"""A prefix of an object store that holds a Parquet output.

- The manifest is one object, which lists its parts, written only over the version of it that was read
  (a conditional put): of two writers that both read it one is refused, and finds that it is fenced.
- A part is put under a name made of its seqs, before the manifest counts it. Its bytes depend on its
  rows alone, so a former writer that puts it late puts the same.
- Credentials are in no manifest (`object_store`).
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
from holdfast.spark.sinks.files import SCRATCH, Step, no_step, write_groups
from holdfast.spark.sinks.location import Location
from holdfast.spark.sinks.manifest import HEAD, LOG, SUCCESS, Head, counting, decoded, encoded
from holdfast.spark.sinks.object_store import library, open_bucket, told
from holdfast.spark.sinks.written import PartFile, WrittenFile

NAMES_SHOWN = 3
BUFFER_BYTES = 10 * 1024 * 1024
PROBE = "_holdfast/writable"


class ObjectPlace:
    def __init__(self, place: Location, *, step: Step = no_step) -> None:
        self.url = place.url
        self._place = place
        self._prefix = place.prefix
        self._step = step
        self._opened: Any = None
        self._tag: str | None = None  # of the head that was read last

    # --- the store ------------------------------------------------------------------------------

    def _store(self) -> Any:
        if self._opened is None:
            self._opened = open_bucket(self._place)
        return self._opened

    def _name(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    @contextlib.contextmanager
    def typed(self) -> Iterator[None]:
        """Errors of the library, as ours. What they say of headers is left out."""
        wrong = library().exceptions
        try:
            yield
        except (wrong.PermissionDeniedError, wrong.UnauthenticatedError) as error:
            raise OutputReadOnly(path=self.url, why=told(error)) from None
        except (wrong.AlreadyExistsError, wrong.PreconditionError):
            raise OutputTaken(path=self.url, why="the manifest was replaced meanwhile") from None
        except wrong.NotFoundError as error:
            raise OutputNotOurs(path=self.url, found=f"no such bucket: {told(error)}") from None
        except (wrong.BaseError, ValueError, OSError) as error:
            raise OutputError(path=self.url, why=told(error)) from None

    def check_writable(self) -> None:
        """Put an object and remove it: a store has no other way to say so."""
        store = self._store()
        library().put(store, self._name(PROBE), b"")
        library().delete(store, self._name(PROBE))

    def found(self) -> str:
        children = library().list_with_delimiter(self._store(), self._prefix)
        names = [one["path"].rpartition("/")[2] for one in children["objects"]]
        names += [one.rstrip("/").rpartition("/")[2] + "/" for one in children["common_prefixes"]]
        names = sorted(set(names) - {""})
        if names == [f"{SCRATCH}/"]:
            probe = self._name(PROBE)
            inside = library().list(self._store(), prefix=self._name(SCRATCH)).collect()
            if all(one["path"].startswith(probe) for one in inside):
                return ""
        more = ", …" if len(names) > NAMES_SHOWN else ""
        return ", ".join(names[:NAMES_SHOWN]) + more

    def refuse_file(self) -> None:
        """An object of this very name is no directory, and in nobody's way."""

    def prepare(self) -> None: ...

    def sweep(self) -> None: ...

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        yield  # the conditional put is the lock

    # --- the manifest ---------------------------------------------------------------------------

    def head(self) -> Head | None:
        name = self._name(f"{SCRATCH}/{HEAD}")
        try:
            found = library().get(self._store(), name)
            data = bytes(found.bytes())
        except (library().exceptions.NotFoundError, FileNotFoundError):
            self._tag = None
            return None
        self._tag = found.meta["e_tag"]
        return decoded(data, f"{self.url}/{SCRATCH}/{HEAD}")

    def files(self, head: Head) -> list[PartFile]:
        return list(head.files)

    def write_head(self, head: Head) -> None:
        mode: Any = "create" if self._tag is None else {"e_tag": self._tag}
        name = self._name(f"{SCRATCH}/{HEAD}")
        self._step("head-before")
        put = library().put(self._store(), name, encoded(head), mode=mode)
        self._tag = put["e_tag"]
        self._step("head-put")

    def append(self, head: Head, files: Sequence[PartFile]) -> None:
        self.write_head(msgspec.structs.replace(counting(head, files), files=[*head.files, *files]))

    def swap(self, head: Head, files: Sequence[PartFile]) -> None:
        self.write_head(msgspec.structs.replace(counting(head, files), files=list(files)))

    def new_log(self, generation: int) -> str:
        return LOG

    # --- objects --------------------------------------------------------------------------------

    def put(self, name: str, part: Part, schema: pa.Schema, *, empty: bool = False) -> PartFile:
        groups = part.groups()
        first = next(groups, None)
        if first is None and not empty:
            return PartFile("", part.lo, part.hi, 0, 0, "")
        given = chain([first] if first is not None else [], groups)
        with _HashedUpload(self._store(), self._name(name)) as upload:
            rows = write_groups(schema, given, pa.PythonFile(upload, "w"))
        self._step("part-put")
        digest = upload.sha256.hexdigest()
        return PartFile(name, part.lo, part.hi, rows, upload.length, digest)

    def write(self, name: str, run_id: str, part: Part, schema: pa.Schema) -> WrittenFile:
        """On an executor: an object whose name has the id of its run. A store has no rename, and an executor of
        another run that was given up must not replace it."""
        if run_id not in name:
            name = f"{name.removesuffix('.parquet')}-{run_id}.parquet"
        return WrittenFile(self.put(name, part, schema))

    def accept(self, written: WrittenFile) -> PartFile:
        return written.file

    def check_writer(self) -> None:
        name = self._name(f"{PROBE}-{SYSTEM.entropy(4).hex()}")
        library().put(self._store(), name, b"")
        library().delete(self._store(), name)

    def settle(self) -> None: ...

    def is_whole(self, part: PartFile) -> bool:
        try:
            found = library().head(self._store(), self._name(part.path))
        except (library().exceptions.NotFoundError, FileNotFoundError):
            return False
        return bool(found["size"] == part.bytes)

    def names(self) -> list[str]:
        children = library().list_with_delimiter(self._store(), self._prefix)
        return sorted(one["path"].rpartition("/")[2] for one in children["objects"])

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(library().exceptions.NotFoundError, FileNotFoundError):
                library().delete(self._store(), self._name(name))

    def mark_success(self) -> None:
        library().put(self._store(), self._name(SUCCESS), b"")


class _HashedUpload:
    """An object under way; it is there as a whole once it is closed without an error, else not."""

    def __init__(self, store: Any, name: str) -> None:
        self._writer = library().open_writer(store, name, buffer_size=BUFFER_BYTES)
        self.sha256 = hashlib.sha256()
        self.length = 0
        self.closed = False

    def __enter__(self) -> _HashedUpload:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._writer.close()
        self._writer = None  # left open, an upload comes to nothing

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
        """Arrow closes its file; the upload ends with the `with` block, which knows of errors."""

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False
