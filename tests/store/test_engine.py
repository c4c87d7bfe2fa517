"""The commit engine: each transaction of a batch fails alone; lost answers are found again."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from holdfast import codec
from holdfast.clock import S, SimClock
from holdfast.config import OUTCOMES_KEPT, RING_COMMITS_MAX
from holdfast.errors import NotFound, SchemaMismatch, StoreFull
from holdfast.store import engine as engines
from holdfast.store import schema
from holdfast.store.api import Row
from holdfast.store.engine import Answer, Engine, Request
from holdfast.store.memory import MemoryBackend, MemoryTxn

MODULES = ("holdfast.store.engine",)


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend()


@pytest.fixture
def engine(backend: MemoryBackend) -> Engine:
    return Engine(backend, SimClock())


def request(engine: Engine, no: int, **parts: object) -> Request:
    return Request(no, b"client-a", engine._backend.last_id(), **parts)  # type: ignore[arg-type]


def codes(answers: list[Answer]) -> list[str | None]:
    return [None if answer.error is None else answer.error[0] for answer in answers]


def test_a_batch_is_one_commit(engine: Engine, backend: MemoryBackend) -> None:
    before = backend.id
    engine.commit([request(engine, no, puts={b"k%d" % no: b"v"}) for no in range(1, 6)])
    assert backend.id == before + 1
    assert engine.commit_no == 1


def test_of_two_that_read_the_same_key_the_second_conflicts(engine: Engine) -> None:
    both = [request(engine, no, reads=[b"k"], puts={b"k": b"%d" % no}) for no in (1, 2)]
    assert codes(engine.commit(both)) == [None, "conflict"]


def test_an_absent_key_that_was_read_is_guarded_too(engine: Engine) -> None:
    reader = request(engine, 2, reads=[b"absent"], puts={b"x": b"1"})
    engine.commit([request(engine, 1, puts={b"absent": b"now here"})])
    assert codes(engine.commit([reader])) == ["conflict"]


@pytest.mark.parametrize("key", [b"b", b"bz"])
def test_a_write_inside_a_scanned_range_conflicts(engine: Engine, key: bytes) -> None:
    reader = request(engine, 2, ranges=[(b"b", b"c")], puts={b"x": b"1"})
    engine.commit([request(engine, 1, puts={key: b"new"})])
    assert codes(engine.commit([reader])) == ["conflict"]


@pytest.mark.parametrize("key", [b"a", b"c", b"cz"])
def test_a_write_outside_a_scanned_range_does_not(engine: Engine, key: bytes) -> None:
    reader = request(engine, 2, ranges=[(b"b", b"c")], puts={b"x": b"1"})
    engine.commit([request(engine, 1, puts={key: b"new"})])
    assert codes(engine.commit([reader])) == [None]


def test_a_deletion_conflicts_with_its_reader(engine: Engine) -> None:
    reader = request(engine, 2, reads=[b"k"], puts={b"x": b"1"})
    engine.commit([request(engine, 1, deletes=[b"k"])])
    assert codes(engine.commit([reader])) == ["conflict"]


def test_a_snapshot_older_than_the_ring_is_refused_not_trusted(engine: Engine) -> None:
    reader = request(engine, 1, reads=[b"untouched"], puts={b"x": b"1"})
    for no in range(2, RING_COMMITS_MAX + 4):
        engine.commit([request(engine, no, puts={b"k": b"v"})])
    assert codes(engine.commit([reader])) == ["conflict"]


def test_a_refused_transaction_leaves_its_batch_alone(
    engine: Engine, backend: MemoryBackend
) -> None:
    unknown = [("holdfast.store.probe:missing", msgspec.Raw(codec.pack([])))]
    batch = [
        request(engine, 1, puts={b"a": b"1"}),
        request(engine, 2, puts={b"b": b"1"}, calls=unknown),
        request(engine, 3, puts={b"c": b"1"}),
    ]
    assert codes(engine.commit(batch)) == [None, "invalid", None]
    assert [backend.get(key) for key in (b"a", b"b", b"c")] == [b"1", None, b"1"]


@pytest.mark.parametrize(
    "name", ["os:system", "holdfast.errors:Invalid", "holdfast.nowhere:x", "builtins:eval", ""]
)
def test_only_operations_of_this_package_can_be_named(engine: Engine, name: str) -> None:
    call = [(name, msgspec.Raw(codec.pack([])))]
    assert codes(engine.commit([request(engine, 1, calls=call)])) == ["invalid"]


def test_arguments_that_do_not_fit_an_operation_are_invalid(engine: Engine) -> None:
    call = [("holdfast.store.probe:twice", msgspec.Raw(codec.pack(["three", []])))]
    assert codes(engine.commit([request(engine, 1, calls=call)])) == ["invalid"]


def test_a_defect_in_one_request_does_not_fail_the_others(
    engine: Engine, backend: MemoryBackend
) -> None:
    # A counter that is not eight bytes is the nearest thing to a bug that data can be.
    engine.commit([request(engine, 1, puts={b"odd": b"not a counter"})])
    batch = [
        request(engine, 2, puts={b"a": b"1"}),
        request(engine, 3, adds={b"odd": 1}),
        request(engine, 4, puts={b"b": b"1"}),
    ]
    before = backend.id
    assert codes(engine.commit(batch)) == [None, "invalid", None]
    assert [backend.get(key) for key in (b"a", b"b")] == [b"1", b"1"]
    # In one commit: nothing was applied a second time.
    assert backend.id == before + 1


def test_a_full_disk_fails_the_batch_and_keeps_nothing_of_it(
    engine: Engine, backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: MemoryTxn) -> None:
        self.abort()
        raise StoreFull(path="p")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryTxn, "commit", full)
        with pytest.raises(StoreFull):
            engine.commit([request(engine, 1, puts={b"a": b"1"})])
    assert backend.get(b"a") is None
    assert codes(engine.commit([request(engine, 2, puts={b"a": b"2"})])) == [None]
    assert backend.get(b"a") == b"2"


# -- lost answers --------------------------------------------------------------------------------


def resent(original: Request) -> Request:
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(original), type=Request)
    again.resent = True
    return again


def test_a_resent_transaction_gets_its_first_answer_and_is_not_done_twice(
    engine: Engine, backend: MemoryBackend
) -> None:
    original = request(engine, 7, appends=[(b"log", b"x")], adds={b"n": 1})
    [first] = engine.commit([original])
    [second] = engine.commit([resent(original)])
    assert second == first
    assert schema.int_of(backend.get(b"n") or b"") == 1


def test_the_next_writer_knows_the_outcomes_of_the_one_before(
    engine: Engine, backend: MemoryBackend
) -> None:
    original = request(engine, 7, adds={b"n": 1})
    [first] = engine.commit([original])
    successor = Engine(backend, SimClock())
    [second] = successor.commit([resent(original)])
    assert second == first
    assert schema.int_of(backend.get(b"n") or b"") == 1


def test_a_resent_transaction_that_never_arrived_is_done_now(engine: Engine) -> None:
    successor = Engine(engine._backend, SimClock())
    lost = request(successor, 7, adds={b"n": 1})
    assert codes(successor.commit([resent(lost)])) == [None]


def test_an_outcome_too_old_to_be_looked_up_is_unknown_not_guessed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "OUTCOMES_KEPT", 4)
    original = request(engine, 1, adds={b"n": 1})
    engine.commit([original])
    for no in range(2, 9):
        engine.commit([request(engine, no, puts={b"k": b"v"})])
    assert codes(engine.commit([resent(original)])) == ["commit_unknown"]
    successor = Engine(engine._backend, SimClock())
    assert codes(successor.commit([resent(original)])) == ["commit_unknown"]


def test_outcomes_take_a_bounded_number_of_rows(
    engine: Engine, backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert OUTCOMES_KEPT >= 1024
    monkeypatch.setattr(engines, "OUTCOMES_KEPT", 4)
    for no in range(1, 20):
        engine.commit([request(engine, no, puts={b"k": b"v"})])
    assert len(backend.scan(schema.OUTCOME, schema.OUTCOME + b"\xff", None, False)) == 4


# -- opening -------------------------------------------------------------------------------------


def guard(found: bytes | None, *, bootstrap: bool) -> None:
    engines.guard_schema(found, (0, 1), bootstrap=bootstrap)


@pytest.mark.spec("001", "Schema-version guard", "a matching marker lets the store open")
def test_a_matching_marker_goes_on() -> None:
    guard(b"RSV0\x00\x00\x01\x00", bootstrap=False)


@pytest.mark.spec("001", "Schema-version guard", "any other marker refuses, nothing is written")
@pytest.mark.parametrize(
    "marker",
    [
        b"RSV0\x00\x00\x01\x00",
        b"RSV0\x00\x00\x03\x00",
        b"RSV0\x01\x00\x01\x00",
        b"RSV1\x00\x00\x01\x00",
        b"",
        b"RSV0",
    ],
)
def test_any_other_marker_refuses(marker: bytes) -> None:
    backend = MemoryBackend()
    backend.set(schema.MARKER_KEY, marker)
    with pytest.raises(SchemaMismatch):
        Engine(backend, SimClock())
    assert backend.rows == {schema.MARKER_KEY: marker}


@pytest.mark.spec("001", "Schema-version guard", "a missing marker is NotFound without bootstrap")
def test_a_missing_marker_without_bootstrap_is_not_found() -> None:
    backend = MemoryBackend()
    with pytest.raises(NotFound):
        Engine(backend, SimClock(), bootstrap=False)
    assert backend.rows == {}


@pytest.mark.spec("001", "Schema-version guard", "with bootstrap a missing marker is written")
def test_a_missing_marker_with_bootstrap_is_written() -> None:
    backend = MemoryBackend()
    Engine(backend, SimClock(), bootstrap=True)
    assert backend.get(b"runner.schema.version") == b"RSV0\x00\x00\x02\x00"
    Engine(backend, SimClock(), bootstrap=False)


def test_time_goes_on_over_a_take_over_and_a_reboot(backend: MemoryBackend) -> None:
    clock = SimClock()
    first = Engine(backend, clock)
    first.commit([request(first, 1, puts={b"a": b"1"})])
    before_ns = first.now_ns()
    clock.step_wall(-72 * 3600 * S)
    assert Engine(backend, clock).now_ns() >= before_ns
    clock.reboot()
    assert Engine(backend, clock).now_ns() > before_ns


def test_an_answer_too_large_to_keep_is_unknown_when_it_gets_lost(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "OUTCOME_BYTES_MAX", 10)
    names = ["a" * 20]
    call = [("holdfast.store.probe:twice", msgspec.Raw(codec.pack([1, names])))]
    original = request(engine, 7, calls=call)
    assert codes(engine.commit([original])) == [None]
    assert codes(engine.commit([resent(original)])) == ["commit_unknown"]


def test_when_a_broken_batch_is_redone_one_by_one_each_failure_is_its_own(
    engine: Engine, backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = 0
    commit, put_many = MemoryTxn.commit, MemoryTxn.put_many

    def put_some(self: MemoryTxn, rows: Iterable[Row]) -> None:
        rows = list(rows)
        put_many(self, rows)
        if rows[0][0] == b"broken":
            raise ValueError("a row that breaks what holds the rows")

    def second_is_full(self: MemoryTxn) -> None:
        nonlocal commits
        commits += 1
        if commits == 2:
            self.abort()
            raise StoreFull(path="p")
        commit(self)

    monkeypatch.setattr(MemoryTxn, "commit", second_is_full)
    monkeypatch.setattr(MemoryTxn, "put_many", put_some)
    batch = [
        request(engine, 2, puts={b"a": b"1"}),
        request(engine, 3, puts={b"broken": b"1"}),
        request(engine, 4, puts={b"b": b"1"}),
        request(engine, 5, puts={b"c": b"1"}),
    ]
    assert codes(engine.commit(batch)) == [None, "invalid", "store_full", None]
    assert [backend.get(key) for key in (b"a", b"b", b"c")] == [b"1", None, b"1"]


def test_the_first_commit_after_a_take_over_is_remembered_by_the_next_writer(
    engine: Engine, backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "OUTCOMES_KEPT", 4)
    for no in range(1, 11):
        engine.commit([request(engine, no, puts={b"k": b"v"})])
    second = Engine(backend, SimClock())
    original = request(second, 11, adds={b"n": 1})
    second.commit([original])
    second.commit([request(second, 12, puts={b"k": b"v"})])
    third = Engine(backend, SimClock())
    assert codes(third.commit([resent(original)])) == [None]
    assert schema.int_of(backend.get(b"n") or b"") == 1


def test_what_was_decided_is_remembered_before_the_next_decision(engine: Engine) -> None:
    """Whoever gives the answers takes note of them afterwards; or the next one does."""
    reader = request(engine, 2, reads=[b"k"], puts={b"x": b"1"})
    first = request(engine, 1, puts={b"k": b"new"}, topics=["news"])
    [told] = engine.decide([first])
    assert engine.rung == {"news"}
    assert codes(engine.decide([reader])) == ["conflict"]
    first.resent = True
    assert engine.decide([first]) == [told]
    assert engine.commit_no == 1
    assert engine.topics == {"news": 1}
