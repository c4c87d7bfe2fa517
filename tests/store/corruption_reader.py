"""Open, read and verify damaged stores, one per line of standard input. See `corruption`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import msgspec

from holdfast.clock import SYSTEM
from holdfast.errors import HoldfastError
from holdfast.ops import catalog_queries, verify, world_replay
from holdfast.ops.decode_errors import as_corrupt
from holdfast.store import schema
from holdfast.store.admin.raw_access import is_backend_row
from holdfast.store.engine import StoreEngine
from holdfast.store.in_process import InProcessStore
from holdfast.store.lmdb.backend import LmdbBackend, prepare_directory, storage_error
from holdfast.store.lmdb.inspection import inspect_store
from holdfast.store.lmdb.integrity_check import check_structure, iter_rows
from holdfast.store.lmdb.writer import open_engine, try_lock

Rows = list[tuple[bytes, bytes]]
UNIVERSE = "corruption"
QUEUE = schema.key_prefix(schema.Space.QUEUE, "mail")
# System rows with fields that no other row repeats: `verify` detects damage to them only if the row cannot be
# decoded or a checked name or number changes. docs/store.md lists them.
WITHOUT_SECOND_SOURCE = {
    "lease log": schema.key_prefix(schema.Space.LEASE_LOG),
    "lease expiry": schema.key_prefix(schema.Space.LEASE, "expiry"),
    "task lease expiry": schema.key_prefix(schema.Space.TASK, UNIVERSE, "x"),
    "world assignment": schema.key_prefix(schema.Space.WORLD, UNIVERSE, "a"),
    "world record": schema.key_prefix(schema.Space.WORLD, UNIVERSE, "w"),
    "times and counts of queued effects": schema.key_prefix(schema.Space.QUEUE),
    "open effect": schema.key_prefix(schema.Space.WORLD, UNIVERSE, "i"),
    "timer": schema.key_prefix(schema.Space.WORLD, UNIVERSE, "t"),
    "references to a blob": schema.key_prefix(schema.Space.BLOB, "refs"),
    "worker": schema.key_prefix(schema.Space.WORKER),
    "declarations of code": schema.key_prefix(schema.Space.APP_STATE, "code"),
    "sequence": schema.key_prefix(schema.Space.SEQUENCE),
    "dedupe": schema.key_prefix(schema.Space.DEDUPE),
    "snapshot time": schema.key_prefix(schema.Space.SNAPSHOT),
}
SPACES = tuple(schema.key_prefix(space) for space in schema.Space)


class OpenEngineStore(InProcessStore):
    """An in-process store on an engine that is already open."""

    def __init__(self, backend: LmdbBackend, engine: StoreEngine) -> None:
        super().__init__("lmdb:", backend, SYSTEM)
        self.engine = engine


@contextmanager
def raising_storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        raise storage_error(error, path) from None


def first_verify_finding(backend: LmdbBackend, engine: StoreEngine) -> str:
    """Return the first finding of `holdfast verify`, or an empty string."""
    try:
        with raising_storage_errors(backend.path):
            check_structure(backend)
            store = OpenEngineStore(backend, engine)
            with as_corrupt("catalog"):
                universes = store.read(catalog_queries.universes)
                targets = [
                    one for name in universes for one in store.read(world_replay.targets, name)
                ]
                for target in targets:
                    finding = world_replay.check_world(store, None, target)
                    if finding.code:
                        return str(finding)
                for difference in store.read(verify.find_differences):
                    return str(difference)
            return ""
    except HoldfastError as error:
        return str(error)


def run_case(home: Path, rows: Rows) -> tuple[str, str]:
    lock = None
    try:
        try:
            with raising_storage_errors(home):
                prepare_directory(home)
                if not (home / "writer.lock").exists():
                    inspect_store(home, bootstrap=False)
                lock = try_lock(home)
                assert lock is not None
                backend, engine = open_engine(home, bootstrap=False)
        except HoldfastError as error:
            return "refused", str(error)
        try:
            try:
                with raising_storage_errors(home):
                    found_rows = [row for row in iter_rows(backend) if not is_backend_row(row[0])]
            except HoldfastError as error:
                return "read", str(error)
            if found_rows == rows:
                return "unchanged", ""
            why = first_verify_finding(backend, engine)
            if why:
                return "verify", why
            changed = {key for key, _ in set(found_rows) ^ set(rows)}
            # System keys begin with the number of their space. Other rows and queue items hold user data.
            ours = sorted(
                key for key in changed if key.startswith(SPACES) and not key.startswith(QUEUE)
            )
            if not ours:
                return "nothing", f"the user's: {sorted(changed)[:2]}"
            unrepeated = tuple(WITHOUT_SECOND_SOURCE.values())
            checked = [key for key in ours if not key.startswith(unrepeated)]
            if checked:
                return "nothing", f"ours: {checked[:2]}"
            kinds = [kind for kind, at in WITHOUT_SECOND_SOURCE.items() if ours[0].startswith(at)]
            return "nothing", f"no second source: {kinds[0]}"
        finally:
            backend.env.close()
    finally:
        if lock is not None:
            lock.close()


def main() -> None:
    for line in sys.stdin:
        home, listed = line.rstrip("\n").split("\t")
        rows = msgspec.msgpack.decode(Path(listed).read_bytes(), type=Rows)
        outcome = run_case(Path(home), rows)
        sys.stdout.write(msgspec.json.encode(outcome).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
