"""`store copy`, with what it asks before: is the source sound, and has everybody let go of it?

Nobody who is connected is put out: not a writer process with clients, not a session of a PostgreSQL
store. Those who are cut off and may come back are told by what they left: a worker that spoke a moment
ago, a lease that has not run out. Either is waited out or overruled (`force`): what such a holder commits
later is refused by the closed source in any case.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from holdfast.clock import S
from holdfast.config import SCAN_PAGE, WriterLimits
from holdfast.durable import lease as leases
from holdfast.errors import CopyUnfinished, NotFound, StoreBusy, StoreMoved
from holdfast.ops import inventory
from holdfast.store import access, places, schema, tuples, urls
from holdfast.store import copy as copies
from holdfast.store import open as open_store
from holdfast.store.api import Txn
from holdfast.store.copy import Copied, Progress
from holdfast.store.places import Place
from holdfast.store.txn import ClientTxn

# A writer that nobody needs leaves after a while; how much longer than that it is waited for.
GRACE_S = 1.0
SHOWN_MAX = 5
# The writer that is started to look at the source stays no longer than that.
_LOOKING = WriterLimits(linger_s=0.1)


class InUse(StoreBusy):
    code = "store_in_use"
    hint = "stop what runs on FROM (SIGTERM lets it finish), then copy again"


class LeasesHeld(StoreBusy):
    code = "leases_held"
    hint = (
        "whoever held these may still work: wait until they run out, or overrule them with --force"
    )


def copy(
    source: str, target: str, *, keep: bool = False, force: bool = False, progress: Progress
) -> Copied:
    """Move the store at one URL to another, or copy it (`keep`). What is there is never overwritten."""
    workers = _look(source)
    # Whoever works there does not leave by itself.
    patience_s = GRACE_S if workers else WriterLimits().linger_s + GRACE_S
    with _held(source, target, workers, patience_s) as (here, there):
        if not force:
            refuse_holders(here)
        return copies.copy(here, there, keep=keep, progress=progress)


def refuse_holders(place: Place) -> None:
    """LeasesHeld if a worker spoke lately, or a lease has not run out."""
    meta = place.meta()
    if meta is None:
        return
    now_ns = place.now_ns()
    with place.reading() as base:
        txn = ClientTxn(base, snapshot=0, generation=meta.generation, now=lambda: now_ns)
        workers = _live_workers(txn)
        held = list(_live_leases(txn))
    if workers or held:
        until_ns = max((status.expires_ns for _, status in held), default=now_ns)
        raise LeasesHeld(
            url=place.url,
            workers=workers[:SHOWN_MAX],
            leases=len(held),
            of=sorted({status.worker for _, status in held})[:SHOWN_MAX],
            for_s=round((until_ns - now_ns) / S, 1),
        )


# -- inside --------------------------------------------------------------------------------------


def _look(url: str) -> list[str]:
    """Open the source as everybody does, which finds what is wrong with it; who works there."""
    if urls.scheme_of(url) == "lmdb":
        access.check(places.path_of(url).absolute())
    if urls.scheme_of(url) == "lmdb" and not (places.path_of(url) / "data.mdb").exists():
        raise NotFound(what="store", url=url, why="none here")
    try:
        with open_store(url, bootstrap=False, limits=_LOOKING) as store:
            found: list[str] = store.read(_live_workers)
            return found
    except (StoreMoved, CopyUnfinished):
        return []  # it is for the copy to say what that means


@contextlib.contextmanager
def _held(
    source: str, target: str, workers: list[str], patience_s: float
) -> Iterator[tuple[Place, Place]]:
    refuse_same(source, target)
    with contextlib.ExitStack() as closing:
        try:
            here = places.source(source, patience_s=patience_s)
        except StoreBusy as busy:
            raise InUse(**busy.fields, workers=workers[:SHOWN_MAX]) from None
        closing.callback(here.close)
        try:
            there = places.target(target, patience_s=GRACE_S)
        except StoreBusy as busy:
            if getattr(here, "session", None) in busy.fields.get("sessions", ()):
                raise copies.SameStore(url=urls.shown(source)) from None
            raise
        closing.callback(there.close)
        yield here, there


def refuse_same(source: str, target: str) -> None:
    """SameStore for two names of one directory: its lock cannot be taken twice."""
    if urls.scheme_of(source) == urls.scheme_of(target) == "lmdb":
        with contextlib.suppress(OSError):
            if places.path_of(source).samefile(places.path_of(target)):
                raise copies.SameStore(url=source)
    elif source == target:
        raise copies.SameStore(url=urls.shown(source))


def _live_workers(txn: Txn) -> list[str]:
    return [f"{row.universe}/{row.record.worker}" for row in inventory.crew(txn) if row.live]


def _live_leases(txn: Txn) -> Iterator[tuple[str, leases.Status]]:
    """Page by page: every resource that was ever leased has a row."""
    prefix = schema.prefix(schema.Space.LEASE, "expiry")
    at, end = prefix, tuples.after(prefix)
    while rows := txn.scan(at, end, SCAN_PAGE):
        for key, row in rows:
            if schema.int_of(row) > txn.now_ns:
                resource = str(tuples.unpack(key)[2])
                found = leases.current(txn, resource)
                if found is not None and found.live(txn.now_ns, txn.generation):
                    yield resource, found
        at = rows[-1][0] + b"\x00"
