"""The census of a store: figures by universe, kind and type, taken in steps beside other work."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast as hf
from holdfast import store as stores
from holdfast.app.runtime import census_of
from holdfast.clock import S, SimClock
from holdfast.durable import lease, queue
from holdfast.ops.usage_documents import read_usage
from holdfast.store import schema, tuples
from holdfast.store.api import Row, Store
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend
from holdfast.store.schema import Space, key_prefix
from holdfast.workers import space_census
from holdfast.workers.space_census import OTHER, TYPES_MAX, CensusTaker, SpaceFigure, take_census
from holdfast.workers.space_kinds import _KINDS, KINDS, RowKind, classify, classify_next
from tests.postgres import RIG_STORES_DEEP, reused_url
from tests.workers import shop
from tests.workers.rig import WorkerRig
from tests.world.rig import make_backend

MODULES = (
    "holdfast.workers.space_census",
    "holdfast.workers.space_kinds",
    "holdfast.store.row_sizes",
)


@hf.task(name="pack", queue="mail")
def pack(n: int) -> int:
    return n


@hf.flow(name="sell")
async def sell() -> None:
    await hf.sleep(60)


APP = hf.App(
    "shop", worlds=[shop.Buyer], effects=shop.app.effects.values(), tasks=[pack], flows=[sell]
)


@pytest.fixture(params=["memory:", "lmdb", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    url = {"lmdb": str(tmp_path / "data"), "postgres": ""}.get(request.param, request.param)
    with stores.open(url or reused_url()) as opened:
        yield opened


def fill(store: Store) -> None:
    with APP.open(store, roles=()) as rt:
        rt.submit_many(pack, [(n,) for n in range(30)])
        rt.submit(pack.options(key="k"), 1)
        for _ in range(3):
            rt.start(sell)
        rt.world(shop.Buyer, "ada").send(shop.GoodsOrdered())


def sizes(figures: tuple[SpaceFigure, ...]) -> dict[tuple[str, str, str], tuple[int, int]]:
    return {(one.universe, one.kind, one.type): (one.rows, one.bytes) for one in figures}


def scanned(store: Store) -> Counter[str]:
    rows = store.read(lambda txn: txn.scan(b"\x00", b"\xff" * 481))
    return Counter(rows=len(rows), bytes=sum(len(key) + len(value) for key, value in rows))


@pytest.mark.spec(
    "DESIGN",
    "9. Operate",
    "a census has the rows and bytes of the whole store by universe, kind and type",
)
def test_census_counts_every_row_once(store: Store) -> None:
    fill(store)
    before = scanned(store)
    figures = take_census(store, "test").figures
    assert sum(one.rows for one in figures) == before["rows"]
    assert sum(one.bytes for one in figures) == before["bytes"]
    found = sizes(figures)
    assert found["shop", "tasks", "pack"][0] == 31
    assert found["shop", "tasks", "flow:sell"][0] == 3
    assert found["shop", "flows", "sell"][0] == 6
    assert found["shop", "worlds", "Buyer"][0] == 2
    assert found["shop", "world_inbox", "Buyer"][0] == 1
    assert {one.universe for one in figures} == {"", "shop"}
    assert {one.kind for one in figures} <= set(KINDS) - {"user_rows"}


@pytest.mark.parametrize("on", RIG_STORES_DEEP)
def test_effects_timers_and_dead_letters_have_their_type(on: str) -> None:
    rig = WorkerRig(backend=make_backend(on))
    rig.buyer("ada", shop.GoodsOrdered(), shop.Slept())
    rig.store.transact(queue.add_dead_letter, "shop/effects/pay", b"x", "broken", "why")
    found = sizes(take_census(rig.store, "test").figures)
    assert found["shop", "effects", "pay"][0] >= 2
    assert found["shop", "timers", "timers"][0] >= 2
    assert found["shop", "timers", "Buyer"][0] == 1
    assert found["shop", "dead_letters", "pay"][0] == 2
    assert found["shop", "world_journal", "Buyer"][0] == 3
    assert found["shop", "leases", ""][0] == 3
    rig.store.close()


def test_rows_of_the_user_have_their_own_kind(store: Store) -> None:
    store.transact(lambda txn: txn.put(("ada",), b"5"))
    assert sizes(take_census(store, "test").figures)["", "user_rows", ""] == (1, 6)


def test_rows_of_each_key_space_have_a_kind() -> None:
    assert set(_KINDS) == set(Space)


@pytest.mark.parametrize(
    ("key", "kind", "prefix"),
    [
        ((4, "fence", "u/w"), RowKind("u", "leases"), 3),
        ((6, "tasks/u", "e", 7), RowKind("u", "task_log"), 2),
        ((6, "u/authority", "head"), RowKind("u", "leader_log"), 2),
        ((6, "run/r", "e", 7), RowKind("", "ledger"), 2),
        ((8, "u/effects/fabric.send>v", "i", 1), RowKind("u", "mail", "fabric.send>v"), 3),
        ((8, "u/failed-events", "z", 1), RowKind("u", "dead_letters", "failed-events"), 3),
        ((8, "mail", "i", 1), RowKind("", "queues", "mail"), 3),
        ((9, "inbox", "k", "3:u/w:key"), RowKind("u", "idempotency_keys", "inbox"), 4),
        ((15, "u", "w", "default", 0, 0, 5), RowKind("u", "task_index", "default"), 4),
        ((18, "u", 9), RowKind("u", "audit"), 2),
        ((99, "u"), RowKind("", "user_rows"), 2),
    ],
)  # fmt: skip
def test_key_determines_kind_and_shared_prefix(key: tuples.Key, kind: RowKind, prefix: int) -> None:
    assert classify(tuples.pack(key))[:2] == (kind, tuples.pack(key[:prefix]))


@pytest.mark.parametrize("id", [5, 70_000])
def test_next_row_of_another_subject_has_the_kind_of_the_first(id: int) -> None:
    first = classify(tuples.pack((15, "u", "t", 4)))
    after = tuples.pack((15, "u", "t", id))
    assert classify_next(after, first) == classify(after)
    for other in ((15, "u", "tag", "eu", id), (15, "v", "t", id), (16, "u", "h", id)):
        assert classify_next(tuples.pack(other), first) == classify(tuples.pack(other))


def test_sequence_belongs_to_the_universe_of_its_space() -> None:
    inbox = schema.sequence_key(key_prefix(Space.INBOX, "u/w", "e"))
    assert classify(inbox).kind == RowKind("u", "sequences")
    assert classify(schema.sequence_key(b"\xfe")).kind == RowKind("", "user_rows")


def test_types_beyond_the_bound_are_one_figure() -> None:
    many = [SpaceFigure("u", "tasks", f"t{n:03}", 1, n) for n in range(TYPES_MAX + 10)]
    kept = space_census.largest([*many, SpaceFigure("u", "tasks", OTHER, 5, 1)])
    assert len(kept) == TYPES_MAX + 1
    assert kept[0].type == f"t{TYPES_MAX + 9:03}"
    assert sizes(kept)["u", "tasks", OTHER] == (15, sum(range(10)) + 1)


def test_figures_of_a_walk_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space_census, "FIGURES_MAX", 20)
    with stores.open("memory:") as store:
        for n in range(100):
            store.transact(lambda txn, n=n: txn.put((int(Space.AUDIT), f"u{n}", 1), b""))
            store.transact(queue.put, f"q{n}", b"")
        rows = scanned(store)["rows"]
        figures = take_census(store, "test").figures
        assert len(figures) <= 2 * 20 + len(KINDS)
        assert sum(one.rows for one in figures) == rows
        assert sizes(figures)[OTHER, "audit", OTHER][0] > 0


class ReadCounter(MemoryBackend):
    """A backend that counts the rows that are read from it."""

    rows_read = 0

    def get(self, key: bytes) -> bytes | None:
        self.rows_read += 1
        return super().get(key)

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        rows = super().scan(lo, hi, limit, reverse)
        self.rows_read += len(rows) + 1
        return rows


@pytest.mark.spec("DESIGN", "9. Operate", "the call that shows the space of a store scans nothing")
def test_usage_reads_two_rows() -> None:
    backend = ReadCounter()
    with InProcessStore("memory:", backend, SimClock()) as store:
        fill(store)
        take_census(store, "test")
        backend.rows_read = 0
        assert read_usage(store).census is not None
        assert backend.rows_read == 2


# -- the service -----------------------------------------------------------------------------------


class Site:
    """A store with a simulated clock, and processes that take its census."""

    def __init__(self) -> None:
        self.clock = SimClock()
        self.store = stores.open("memory:", clock=self.clock)
        fill(self.store)

    def taker(self, owner: str) -> CensusTaker:
        taker = CensusTaker(self.store, owner, self.clock)
        taker.sleep_s()  # the start delay
        return taker

    def run(self, taker: CensusTaker, ticks: int) -> None:
        for _ in range(ticks):
            taker.tick()
            self.clock.advance(int(taker.sleep_s() * S))

    def run_to_end(self, taker: CensusTaker) -> None:
        """Run until a walk has ended."""
        self.run(taker, 1)
        while self.progress is not None:
            self.run(taker, 1)

    @property
    def census(self) -> space_census.SpaceCensus | None:
        return self.store.read(space_census.last_census)

    @property
    def progress(self) -> space_census.CensusProgress | None:
        return self.store.read(space_census.progress)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(space_census, "STEP_ROWS", 10)
    made = Site()
    yield made
    made.store.close()


def test_census_is_taken_in_steps_and_again_after_the_interval(site: Site) -> None:
    taker = site.taker("a")
    site.run(taker, 2)
    rows = scanned(site.store)["rows"]
    assert (site.census, site.progress is not None) == (None, True)
    site.run_to_end(taker)
    first = site.census
    assert first is not None
    assert sum(one.rows for one in first.figures) == rows
    assert first.ended_ns - first.started_ns >= rows // 10 * space_census.STEP_PAUSE_S * S
    site.run(taker, 2)
    assert site.progress is None
    site.clock.advance(space_census.INTERVAL_NS)
    site.run_to_end(taker)
    assert site.census is not None
    assert site.census.started_ns > first.ended_ns


def test_first_tick_of_a_process_starts_no_census(site: Site) -> None:
    taker = CensusTaker(site.store, "a", site.clock)
    taker.tick()
    assert (taker.sleep_s(), site.progress) == (space_census.START_DELAY_S, None)
    taker.tick()
    assert site.progress is not None


def test_one_process_walks_at_a_time(site: Site) -> None:
    first, second = site.taker("a"), site.taker("b")
    site.run(first, 2)
    site.run(second, 2)
    assert site.progress is not None
    assert site.progress.owner == "a"


def test_abandoned_walk_is_continued(site: Site) -> None:
    first, second = site.taker("a"), site.taker("b")
    site.run(first, 3)
    saved = first._walk
    assert saved is not None
    site.clock.advance(space_census.SAVE_EVERY_NS)
    site.run(first, 1)
    assert site.progress is not None
    assert sum(one.rows for one in site.progress.figures) == 30
    site.clock.advance(space_census.ABANDONED_NS)
    site.run(second, 100)
    assert site.census is not None
    total = sum(one.rows for one in site.census.figures)
    # The rows of the census changed while it ran.
    assert abs(total - scanned(site.store)["rows"]) <= 2
    # The first process finds that another one has continued.
    site.run(first, 100)
    assert site.progress is None


def test_stopped_process_leaves_its_walk_to_another(site: Site) -> None:
    first, second = site.taker("a"), site.taker("b")
    site.run(first, 3)
    first.shut_down()
    site.run(second, 1)
    assert site.progress is not None
    assert site.progress.owner == "b"
    assert site.progress.cursor > b""


def test_census_ends_while_the_store_is_written(store: Store) -> None:
    fill(store)
    over = threading.Event()

    def write() -> None:
        n = 0
        while not over.is_set():
            n += 1
            store.transact(lambda txn, n=n: txn.put((0, "sim", "churn", n), b"x" * 100))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        figures = take_census(store, "test").figures
    finally:
        over.set()
        writer.join()
    assert sizes(figures)["shop", "tasks", "pack"][0] == 31


def test_runtime_takes_the_census_of_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space_census, "START_DELAY_S", 0.0)
    monkeypatch.setattr(space_census, "STEP_PAUSE_S", 0.0)
    monkeypatch.setattr(space_census, "IDLE_S", 0.01)
    with APP.open(str(tmp_path / "data"), roles=["task"]) as rt:
        rt.submit(pack, 1).result(timeout=60)
        census = census_of(rt)
        assert census is not None
        for _ in range(6000):
            if rt.store.read(space_census.last_census) is not None:
                break
            rt.store.wait("none", 0, 0.01)
        assert rt.store.read(space_census.last_census) is not None
    assert (census.running, census.failure) == (False, None)


def test_runtime_without_roles_takes_no_census(tmp_path: Path) -> None:
    with APP.open(str(tmp_path / "data"), roles=[]) as rt:
        assert census_of(rt) is None
    with APP.open(str(tmp_path / "data"), roles=["world"]) as rt:
        assert census_of(rt) is None


def test_lease_of_a_user_has_no_universe() -> None:
    with stores.open("memory:") as store:
        store.transact(lease.acquire, "w", "a", "1", S)
        assert sizes(take_census(store, "test").figures)["", "leases", ""][0] == 3
