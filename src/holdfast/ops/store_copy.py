"""The store copy with its preconditions: the source is valid and no process uses it.

The copy never disconnects a client, neither of a writer process nor of a PostgreSQL store. A disconnected
worker that may return is detected by its recent heartbeat or its unexpired lease. The operator waits until
these expire, or overrides them with `force`. In both cases the closed source rejects later commits of such
a worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from holdfast.clock import S
from holdfast.config import SCAN_PAGE, WriterLimits
from holdfast.durable import lease as leases
from holdfast.errors import CopyUnfinished, NotFound, StoreBusy, StoreMoved
from holdfast.ops import catalog_queries
from holdfast.store import open as open_store
from holdfast.store import schema, tuples, urls
from holdfast.store.admin import copy as copies
from holdfast.store.admin import raw_access
from holdfast.store.admin.copy import CopyProgressCallback, CopyResult
from holdfast.store.admin.raw_access import RawStore
from holdfast.store.api import Txn
from holdfast.store.lmdb import permissions
from holdfast.store.txn import ClientTxn

# How long to wait for the writer process to exit, beyond its idle timeout.
GRACE_S = 1.0
SHOWN_MAX = 5
# Limits of the writer process that is started only to inspect the source.
_INSPECTION_LIMITS = WriterLimits(idle_exit_s=0.1)


class StoreInUse(StoreBusy):
    code = "store_in_use"
    hint = "stop all processes that use FROM (SIGTERM drains them), then copy again"


class LeasesHeld(StoreBusy):
    code = "leases_held"
    hint = "the holders of these leases may still run: wait until the leases expire, or use --force"


def copy_store(
    source: str,
    target: str,
    *,
    keep: bool = False,
    force: bool = False,
    progress: CopyProgressCallback,
) -> CopyResult:
    """Move a store to another URL, or copy it (`keep`). An existing store is never overwritten."""
    workers = _inspect_source(source)
    # An idle writer process exits after its idle timeout. One with live workers does not.
    timeout_s = GRACE_S if workers else WriterLimits().idle_exit_s + GRACE_S
    with _locked(source, target, workers, timeout_s) as (source_store, target_store):
        if not force:
            require_no_leases(source_store)
        return copies.copy_store(source_store, target_store, keep_source=keep, progress=progress)


def require_no_leases(store: RawStore) -> None:
    """Raise LeasesHeld if a worker has a recent heartbeat or a lease has not expired."""
    meta = store.meta()
    if meta is None:
        return
    now_ns = store.now_ns()
    with store.open_rows() as base:
        txn = ClientTxn(base, snapshot=0, generation=meta.generation, now=lambda: now_ns)
        workers = _live_workers(txn)
        live_leases = list(_live_leases(txn))
    if workers or live_leases:
        until_ns = max((status.expires_ns for _, status in live_leases), default=now_ns)
        raise LeasesHeld(
            url=store.url,
            workers=workers[:SHOWN_MAX],
            leases=len(live_leases),
            of=sorted({status.worker for _, status in live_leases})[:SHOWN_MAX],
            for_s=round((until_ns - now_ns) / S, 1),
        )


# -- inside --------------------------------------------------------------------------------------


def _inspect_source(url: str) -> list[str]:
    """Open the source as a client, which validates it, and return its live workers."""
    if urls.scheme_of(url) == "lmdb":
        permissions.check_access(raw_access.directory_of_url(url).absolute())
    if (
        urls.scheme_of(url) == "lmdb"
        and not (raw_access.directory_of_url(url) / "data.mdb").exists()
    ):
        raise NotFound(what="store", url=url, why="no store exists at this URL")
    try:
        with open_store(url, bootstrap=False, limits=_INSPECTION_LIMITS) as store:
            live_workers: list[str] = store.read(_live_workers)
            return live_workers
    except (StoreMoved, CopyUnfinished):
        return []  # the copy itself handles these states


@contextlib.contextmanager
def _locked(
    source: str, target: str, workers: list[str], timeout_s: float
) -> Iterator[tuple[RawStore, RawStore]]:
    require_different(source, target)
    with contextlib.ExitStack() as closing:
        try:
            source_store = raw_access.open_source(source, lock_wait_s=timeout_s)
        except StoreBusy as busy:
            raise StoreInUse(**busy.fields, workers=workers[:SHOWN_MAX]) from None
        closing.callback(source_store.close)
        try:
            target_store = raw_access.open_target(target, lock_wait_s=GRACE_S)
        except StoreBusy as busy:
            if getattr(source_store, "session", None) in busy.fields.get("sessions", ()):
                raise copies.SameStore(url=urls.redact(source)) from None
            raise
        closing.callback(target_store.close)
        yield source_store, target_store


def require_different(source: str, target: str) -> None:
    """Raise SameStore if both URLs name the same directory: its lock cannot be acquired twice."""
    if urls.scheme_of(source) == urls.scheme_of(target) == "lmdb":
        with contextlib.suppress(OSError):
            if raw_access.directory_of_url(source).samefile(raw_access.directory_of_url(target)):
                raise copies.SameStore(url=source)
    elif source == target:
        raise copies.SameStore(url=urls.redact(source))


def _live_workers(txn: Txn) -> list[str]:
    return [
        f"{row.universe}/{row.record.worker}"
        for row in catalog_queries.worker_rows(txn)
        if row.live
    ]


def _live_leases(txn: Txn) -> Iterator[tuple[str, leases.LeaseStatus]]:
    """Yield the live leases. Scans in pages, because every resource that was ever leased has a row."""
    prefix = schema.key_prefix(schema.Space.LEASE, "expiry")
    at, end = prefix, tuples.prefix_end(prefix)
    while rows := txn.scan(at, end, SCAN_PAGE):
        for key, row in rows:
            if schema.decode_int(row) > txn.now_ns:
                resource = str(tuples.unpack(key)[2])
                lease = leases.current_status(txn, resource)
                if lease is not None and lease.is_live(txn.now_ns, txn.generation):
                    yield resource, lease
        at = rows[-1][0] + b"\x00"
