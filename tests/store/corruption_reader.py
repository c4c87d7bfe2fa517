"""Open, read and verify damaged stores, one for each line of standard input. See `corruption`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import msgspec

from holdfast.clock import SYSTEM
from holdfast.errors import HoldfastError
from holdfast.ops import inventory, recount, verify
from holdfast.ops.unreadable import as_corrupt
from holdfast.store import schema
from holdfast.store.engine import Engine
from holdfast.store.inspection import inspect
from holdfast.store.local import LocalStore
from holdfast.store.places import own
from holdfast.store.readback import check_structure, rows_of
from holdfast.store.rows import LmdbBackend, prepare, storage_error
from holdfast.store.writer import open_engine, take_lock

Rows = list[tuple[bytes, bytes]]
UNIVERSE = "corruption"
QUEUE = schema.prefix(schema.Space.QUEUE, "mail")
# Rows of the system with fields that no other row repeats: `verify` finds damage to them only where the row
# cannot be decoded, or where a name or a number in it is checked. docs/store.md lists them.
WITHOUT_SECOND_SOURCE = {
    "lease log": schema.prefix(schema.Space.LEASE_LOG),
    "lease expiry": schema.prefix(schema.Space.LEASE, "expiry"),
    "task lease expiry": schema.prefix(schema.Space.TASK, UNIVERSE, "x"),
    "world assignment": schema.prefix(schema.Space.WORLD, UNIVERSE, "a"),
    "world record": schema.prefix(schema.Space.WORLD, UNIVERSE, "w"),
    "times and counts of queued effects": schema.prefix(schema.Space.QUEUE),
    "open effect": schema.prefix(schema.Space.WORLD, UNIVERSE, "i"),
    "timer": schema.prefix(schema.Space.WORLD, UNIVERSE, "t"),
    "references to a blob": schema.prefix(schema.Space.BLOB, "refs"),
    "worker": schema.prefix(schema.Space.WORKER),
    "declarations of code": schema.prefix(schema.Space.APP_STATE, "code"),
    "sequence": schema.prefix(schema.Space.SEQUENCE),
    "dedupe": schema.prefix(schema.Space.DEDUPE),
    "snapshot time": schema.prefix(schema.Space.SNAPSHOT),
}
SPACES = tuple(schema.prefix(space) for space in schema.Space)


class Opened(LocalStore):
    """A store on an engine that is there already."""

    def __init__(self, backend: LmdbBackend, engine: Engine) -> None:
        super().__init__("lmdb:", backend, SYSTEM)
        self.engine = engine


@contextmanager
def typed(path: Path) -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        raise storage_error(error, path) from None


def found_by_verify(backend: LmdbBackend, engine: Engine) -> str:
    """What `holdfast verify` finds, in its order; empty if nothing."""
    try:
        with typed(backend.path):
            check_structure(backend)
            store = Opened(backend, engine)
            with as_corrupt("catalog"):
                universes = store.read(inventory.universes)
                targets = [one for name in universes for one in store.read(verify.targets, name)]
                for target in targets:
                    finding = verify.check_world(store, None, target)
                    if finding.code:
                        return str(finding)
                for difference in store.read(recount.recount):
                    return str(difference)
            return ""
    except HoldfastError as error:
        return str(error)


def case(home: Path, rows: Rows) -> tuple[str, str]:
    lock = None
    try:
        try:
            with typed(home):
                prepare(home)
                if not (home / "writer.lock").exists():
                    inspect(home, bootstrap=False)
                lock = take_lock(home)
                assert lock is not None
                backend, engine = open_engine(home, bootstrap=False)
        except HoldfastError as error:
            return "refused", str(error)
        try:
            try:
                with typed(home):
                    found = [row for row in rows_of(backend) if not own(row[0])]
            except HoldfastError as error:
                return "read", str(error)
            if found == rows:
                return "unchanged", ""
            why = found_by_verify(backend, engine)
            if why:
                return "verify", why
            changed = {key for key, _ in set(found) ^ set(rows)}
            # Keys of ours begin with the number of their space. Other rows, and items of queues, are as the
            # user gave them.
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
        outcome = case(Path(home), rows)
        sys.stdout.write(msgspec.json.encode(outcome).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
