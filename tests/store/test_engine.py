"""The commit engine: transactions of a batch fail independently, and a resent request gets its stored outcome."""

from __future__ import annotations

import msgspec
import pytest

from holdfast import codec, failpoints
from holdfast.clock import S, SimClock
from holdfast.config import OUTCOMES_KEPT, RECENT_COMMITS_MAX
from holdfast.errors import NotFound, SchemaMismatch, StoreFull
from holdfast.store import engine as engines
from holdfast.store import schema
from holdfast.store.engine import StoreEngine
from holdfast.store.memory_backend import MemoryBackend, MemoryTxn
from holdfast.store.requests import CommitAnswer, CommitRequest
from tests import probe_operations

MODULES = ("holdfast.store.engine",)


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend()


@pytest.fixture
def engine(backend: MemoryBackend) -> StoreEngine:
    return StoreEngine(backend, SimClock())


def request(engine: StoreEngine, no: int, **parts: object) -> CommitRequest:
    return CommitRequest(no, b"client-a", engine._backend.last_id(), **parts)  # type: ignore[arg-type]


def error_codes(answers: list[CommitAnswer]) -> list[str | None]:
    return [None if answer.error is None else answer.error[0] for answer in answers]


def test_engine_commits_a_batch_in_one_commit(engine: StoreEngine, backend: MemoryBackend) -> None:
    before = backend.id
    engine.commit([request(engine, no, puts={b"k%d" % no: b"v"}) for no in range(1, 6)])
    assert backend.id == before + 1
    assert engine.commit_no == 1


def test_second_transaction_that_read_a_written_key_conflicts(engine: StoreEngine) -> None:
    both = [request(engine, no, reads=[b"k"], puts={b"k": b"%d" % no}) for no in (1, 2)]
    assert error_codes(engine.commit(both)) == [None, "conflict"]


def test_read_of_an_absent_key_conflicts_with_its_insertion(engine: StoreEngine) -> None:
    reader = request(engine, 2, reads=[b"absent"], puts={b"x": b"1"})
    engine.commit([request(engine, 1, puts={b"absent": b"now here"})])
    assert error_codes(engine.commit([reader])) == ["conflict"]


@pytest.mark.parametrize("key", [b"b", b"bz"])
def test_write_inside_a_scanned_range_conflicts(engine: StoreEngine, key: bytes) -> None:
    reader = request(engine, 2, ranges=[(b"b", b"c")], puts={b"x": b"1"})
    engine.commit([request(engine, 1, puts={key: b"new"})])
    assert error_codes(engine.commit([reader])) == ["conflict"]


@pytest.mark.parametrize("key", [b"a", b"c", b"cz"])
def test_write_outside_a_scanned_range_does_not_conflict(engine: StoreEngine, key: bytes) -> None:
    reader = request(engine, 2, ranges=[(b"b", b"c")], puts={b"x": b"1"})
    engine.commit([request(engine, 1, puts={key: b"new"})])
    assert error_codes(engine.commit([reader])) == [None]


def test_deletion_conflicts_with_a_read_of_its_key(engine: StoreEngine) -> None:
    reader = request(engine, 2, reads=[b"k"], puts={b"x": b"1"})
    engine.commit([request(engine, 1, deletes=[b"k"])])
    assert error_codes(engine.commit([reader])) == ["conflict"]


def test_snapshot_older_than_the_recent_commits_conflicts(engine: StoreEngine) -> None:
    reader = request(engine, 1, reads=[b"untouched"], puts={b"x": b"1"})
    for no in range(2, RECENT_COMMITS_MAX + 4):
        engine.commit([request(engine, no, puts={b"k": b"v"})])
    assert error_codes(engine.commit([reader])) == ["conflict"]


def test_refused_transaction_does_not_fail_its_batch(
    engine: StoreEngine, backend: MemoryBackend
) -> None:
    unknown = [("probe.missing", msgspec.Raw(codec.pack([])))]
    batch = [
        request(engine, 1, puts={b"a": b"1"}),
        request(engine, 2, puts={b"b": b"1"}, calls=unknown),
        request(engine, 3, puts={b"c": b"1"}),
    ]
    assert error_codes(engine.commit(batch)) == [None, "invalid", None]
    assert [backend.get(key) for key in (b"a", b"b", b"c")] == [b"1", None, b"1"]


@pytest.mark.parametrize(
    "name", ["os:system", "holdfast.errors:Invalid", "holdfast.nowhere:x", "builtins:eval", ""]
)
def test_call_of_a_name_that_is_no_holdfast_operation_is_invalid(
    engine: StoreEngine, name: str
) -> None:
    call = [(name, msgspec.Raw(codec.pack([])))]
    assert error_codes(engine.commit([request(engine, 1, calls=call)])) == ["invalid"]


def test_arguments_of_the_wrong_type_for_an_operation_are_invalid(engine: StoreEngine) -> None:
    call = [(probe_operations.twice.name, msgspec.Raw(codec.pack(["three", []])))]
    assert error_codes(engine.commit([request(engine, 1, calls=call)])) == ["invalid"]


def test_request_that_raises_does_not_fail_its_batch(
    engine: StoreEngine, backend: MemoryBackend
) -> None:
    # A counter row that does not have eight bytes makes the request raise.
    engine.commit([request(engine, 1, puts={b"odd": b"not a counter"})])
    batch = [
        request(engine, 2, puts={b"a": b"1"}),
        request(engine, 3, adds={b"odd": 1}),
        request(engine, 4, puts={b"b": b"1"}),
    ]
    before = backend.id
    assert error_codes(engine.commit(batch)) == [None, "invalid", None]
    assert [backend.get(key) for key in (b"a", b"b")] == [b"1", b"1"]
    # One commit: the batch was not retried.
    assert backend.id == before + 1


def test_store_full_fails_the_batch_and_writes_no_row(
    engine: StoreEngine, backend: MemoryBackend
) -> None:
    with (
        failpoints.on("memory.commit", calls=MemoryTxn.abort, raises=StoreFull(path="p")),
        pytest.raises(StoreFull),
    ):
        engine.commit([request(engine, 1, puts={b"a": b"1"})])
    assert backend.get(b"a") is None
    assert error_codes(engine.commit([request(engine, 2, puts={b"a": b"2"})])) == [None]
    assert backend.get(b"a") == b"2"


# -- resent requests -----------------------------------------------------------------------------


def as_resent(original: CommitRequest) -> CommitRequest:
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(original), type=CommitRequest)
    copy.resent = True
    return copy


def test_resent_request_gets_its_first_answer_and_is_applied_once(
    engine: StoreEngine, backend: MemoryBackend
) -> None:
    original = request(engine, 7, appends=[(b"log", b"x")], adds={b"n": 1})
    [first] = engine.commit([original])
    [second] = engine.commit([as_resent(original)])
    assert second == first
    assert schema.decode_int(backend.get(b"n") or b"") == 1


def test_outcomes_of_resent_requests_survive_a_change_of_writer(
    engine: StoreEngine, backend: MemoryBackend
) -> None:
    original = request(engine, 7, adds={b"n": 1})
    [first] = engine.commit([original])
    successor = StoreEngine(backend, SimClock())
    [second] = successor.commit([as_resent(original)])
    assert second == first
    assert schema.decode_int(backend.get(b"n") or b"") == 1


def test_resent_request_that_never_arrived_is_applied(engine: StoreEngine) -> None:
    successor = StoreEngine(engine._backend, SimClock())
    lost = request(successor, 7, adds={b"n": 1})
    assert error_codes(successor.commit([as_resent(lost)])) == [None]


def test_resent_request_with_a_pruned_outcome_is_commit_unknown(
    engine: StoreEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "OUTCOMES_KEPT", 4)
    original = request(engine, 1, adds={b"n": 1})
    engine.commit([original])
    for no in range(2, 9):
        engine.commit([request(engine, no, puts={b"k": b"v"})])
    assert error_codes(engine.commit([as_resent(original)])) == ["commit_unknown"]
    successor = StoreEngine(engine._backend, SimClock())
    assert error_codes(successor.commit([as_resent(original)])) == ["commit_unknown"]


def test_number_of_outcome_rows_is_bounded(
    engine: StoreEngine, backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert OUTCOMES_KEPT >= 1024
    monkeypatch.setattr(engines, "OUTCOMES_KEPT", 4)
    for no in range(1, 20):
        engine.commit([request(engine, no, puts={b"k": b"v"})])
    assert len(backend.scan(schema.OUTCOME, schema.OUTCOME + b"\xff", None, False)) == 4


# -- opening -------------------------------------------------------------------------------------


def check_marker(marker: bytes | None, *, bootstrap: bool) -> None:
    engines.check_schema(marker, (0, 1), bootstrap=bootstrap)


@pytest.mark.spec("001", "Schema-version guard", "a store with a matching marker opens")
def test_matching_schema_marker_is_accepted() -> None:
    check_marker(b"RSV0\x00\x00\x01\x00", bootstrap=False)


@pytest.mark.spec(
    "001",
    "Schema-version guard",
    "a store with a different marker raises SchemaMismatch and nothing is written",
)
@pytest.mark.parametrize(
    "marker",
    [
        b"RSV0\x00\x00\x01\x00",
        schema.encode_marker(minor=schema.SCHEMA_MINOR + 1),
        b"RSV0\x01\x00\x01\x00",
        b"RSV1\x00\x00\x01\x00",
        b"",
        b"RSV0",
    ],
)
def test_other_schema_marker_raises_schema_mismatch(marker: bytes) -> None:
    backend = MemoryBackend()
    backend.set(schema.MARKER_KEY, marker)
    with pytest.raises(SchemaMismatch):
        StoreEngine(backend, SimClock())
    assert backend.rows == {schema.MARKER_KEY: marker}


@pytest.mark.spec(
    "001", "Schema-version guard", "a store without a marker raises NotFound if bootstrap is off"
)
def test_missing_schema_marker_without_bootstrap_raises_not_found() -> None:
    backend = MemoryBackend()
    with pytest.raises(NotFound):
        StoreEngine(backend, SimClock(), bootstrap=False)
    assert backend.rows == {}


@pytest.mark.spec("001", "Schema-version guard", "an open with bootstrap writes a missing marker")
def test_missing_schema_marker_with_bootstrap_is_written() -> None:
    backend = MemoryBackend()
    StoreEngine(backend, SimClock(), bootstrap=True)
    assert backend.get(b"runner.schema.version") == schema.encode_marker()
    StoreEngine(backend, SimClock(), bootstrap=False)


def test_store_time_is_monotonic_over_a_new_writer_and_a_reboot(backend: MemoryBackend) -> None:
    clock = SimClock()
    first = StoreEngine(backend, clock)
    first.commit([request(first, 1, puts={b"a": b"1"})])
    before_ns = first.now_ns()
    clock.step_wall(-72 * 3600 * S)
    assert StoreEngine(backend, clock).now_ns() >= before_ns
    clock.reboot()
    assert StoreEngine(backend, clock).now_ns() > before_ns


def test_resent_request_with_a_too_large_answer_is_commit_unknown(
    engine: StoreEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "OUTCOME_BYTES_MAX", 10)
    names = ["a" * 20]
    call = [(probe_operations.twice.name, msgspec.Raw(codec.pack([1, names])))]
    original = request(engine, 7, calls=call)
    assert error_codes(engine.commit([original])) == [None]
    assert error_codes(engine.commit([as_resent(original)])) == ["commit_unknown"]


def test_requests_of_a_broken_batch_are_retried_and_fail_one_by_one(
    engine: StoreEngine, backend: MemoryBackend
) -> None:
    commits = 0

    def refuse_broken_row(txn: MemoryTxn) -> None:
        if txn.get(b"broken") is not None:
            raise ValueError("a row that breaks what holds the rows")

    def second_is_full(txn: MemoryTxn) -> None:
        nonlocal commits
        commits += 1
        if commits == 2:
            txn.abort()
            raise StoreFull(path="p")

    batch = [
        request(engine, 2, puts={b"a": b"1"}),
        request(engine, 3, puts={b"broken": b"1"}),
        request(engine, 4, puts={b"b": b"1"}),
        request(engine, 5, puts={b"c": b"1"}),
    ]
    with (
        failpoints.on("memory.commit", calls=second_is_full),
        failpoints.on("memory.rows_put", calls=refuse_broken_row),
    ):
        assert error_codes(engine.commit(batch)) == [None, "invalid", "store_full", None]
    assert [backend.get(key) for key in (b"a", b"b", b"c")] == [b"1", None, b"1"]


def test_outcome_of_a_new_writers_first_commit_survives_the_next_writer(
    engine: StoreEngine, backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "OUTCOMES_KEPT", 4)
    for no in range(1, 11):
        engine.commit([request(engine, no, puts={b"k": b"v"})])
    second = StoreEngine(backend, SimClock())
    original = request(second, 11, adds={b"n": 1})
    second.commit([original])
    second.commit([request(second, 12, puts={b"k": b"v"})])
    third = StoreEngine(backend, SimClock())
    assert error_codes(third.commit([as_resent(original)])) == [None]
    assert schema.decode_int(backend.get(b"n") or b"") == 1


def test_apply_batch_records_the_previous_commit_first(engine: StoreEngine) -> None:
    """The writer records a commit after its replies. A pending record is written before the next batch is applied."""
    reader = request(engine, 2, reads=[b"k"], puts={b"x": b"1"})
    first = request(engine, 1, puts={b"k": b"new"}, topics=["news"])
    [answer] = engine.apply_batch([first])
    assert engine.notified_topics == {"news"}
    assert error_codes(engine.apply_batch([reader])) == ["conflict"]
    first.resent = True
    assert engine.apply_batch([first]) == [answer]
    assert engine.commit_no == 1
    assert engine.topics == {"news": 1}
