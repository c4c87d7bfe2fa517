"""The spool of a run: objects that are written once, named by the ledger, checked before a run goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
import pytest
from msgspec.structs import replace

from holdfast import codec
from holdfast.errors import Conflict, HoldfastError, Invalid
from holdfast.ledger import prune, runs
from holdfast.ledger.classes import ErrorClass, Policy
from holdfast.ledger.records import Done
from holdfast.ledger.states import State
from holdfast.spark import outcome_rows, spool_upkeep, wire
from holdfast.spark import spool as spools
from holdfast.spark.errors import NotAStage, SpoolDenied, SpoolLost, SpoolUnreachable
from holdfast.spark.journal import Input, Outcomes, schema_bytes
from holdfast.spark.match import HASHES
from holdfast.spark.rows import message_of
from holdfast.spark.sinks.object_store import keep_options
from holdfast.spark.spool import Spool
from holdfast.spark.spool_reports import block_value, check_report
from holdfast.store import open as open_store
from holdfast.store.api import Store, Txn
from tests.spark.test_sink_s3 import SECRET, Bucket, bucket, server

__all__ = ["bucket", "server"]

KEY = ["id"]
RESULT = pa.schema([pa.field("y", pa.int64())])
SUCCESS = int(State.TERMINAL_SUCCESS)
FAIL = int(State.TERMINAL_FAIL)
ROWS = 40
BLOCK = 10
HOUR_S = 3600


class Place:
    """A spool, and how a test damages it from outside."""

    def __init__(self, url: str, home: Path | None, bucket: Bucket | None) -> None:
        self.url = url
        self._home = home
        self._bucket = bucket

    @property
    def spool(self) -> Spool:
        return Spool.at(self.url, "run-1")

    def names(self) -> list[str]:
        return sorted(one.name for one in self.spool.place.listing("run-1"))

    def write(self, name: str, data: bytes) -> None:
        if self._home is not None:
            path = self._home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            # Two writes in one tick of the file system's clock have one time.
            os.utime(path, ns=(1, 1))
        else:
            assert self._bucket is not None
            obstore.put(self._bucket.store, f"a/spool/{name}", data)

    def remove(self, name: str) -> None:
        self.spool.place.delete([name])


@pytest.fixture(params=["directory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "directory":
        return Place(str(tmp_path / "spool"), tmp_path / "spool", None)
    made: Bucket = request.getfixturevalue("bucket")
    url = f"s3://{made.name}/a/spool"
    keep_options(url, made.options)
    return Place(url, None, made)


# --- places ---------------------------------------------------------------------------------------


def test_an_object_is_written_once_and_read_back(place: Place) -> None:
    spool = place.spool
    data = os.urandom(5000)
    at = spool.put("o/00/1-1-w", data, raws=True)
    assert at == runs.Stored("o/00/1-1-w", 5000, sha256(data).digest(), at.tag, True)
    assert spool.get(at) == data
    # The same bytes again: an answer was lost, and the put was repeated.
    assert spool.put("o/00/1-1-w", data, raws=True) == at
    with pytest.raises(Conflict):
        spool.put("o/00/1-1-w", data[:-1])
    assert spool.get(at) == data


def test_a_listing_has_the_objects_of_one_run_with_size_and_tag(place: Place) -> None:
    kept = [place.spool.put(f"o/00/1-{n}-w", bytes(n + 1)) for n in range(3)]
    Spool.at(place.url, "run-10").put("o/00/1-1-w", b"of another run")
    found = {one.name: one for one in place.spool.place.listing("run-1")}
    assert sorted(found) == [f"run-1/{one.name}" for one in kept]
    for one in kept:
        listed = found[f"run-1/{one.name}"]
        assert (listed.size, listed.tag) == (one.size, one.tag)
        assert abs(listed.modified_ns / 1e9 - time.time()) < HOUR_S
    assert list(Spool.at(place.url, "run-2").place.listing("run-2")) == []


def test_a_directory_that_is_not_mounted_is_no_empty_spool(tmp_path: Path) -> None:
    with pytest.raises(SpoolUnreachable):
        list(Spool.at(str(tmp_path / "none"), "run-1").place.listing("run-1"))


def test_deleting_what_is_gone_is_no_error(place: Place) -> None:
    place.spool.put("o/00/1-1-w", b"a")
    names = ["run-1/o/00/1-1-w", "run-1/o/00/none"]
    place.spool.place.delete(names)
    place.spool.place.delete(names)
    assert place.names() == []


def test_parts_of_an_object_are_read(place: Place) -> None:
    place.spool.put("i/0", b"0123456789")
    get = place.spool.place.get
    assert get("run-1/i/0", 2, 5) == b"234"
    assert get("run-1/i/0", 4) == b"456789"
    assert get("run-1/i/0", 8, 20) == b"89"
    assert get("run-1/i/none", 2, 5) is None
    assert get("run-1/i/none") is None


def test_a_directory_that_may_not_be_written_is_denied(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("a file")
    with pytest.raises(SpoolUnreachable) as told:
        Spool.at(str(tmp_path / "spool"), "run-1").put("i/0", b"a")
    assert str(tmp_path / "spool") in str(told.value)


def test_wrong_credentials_are_not_shown_by_the_refusal(bucket: Bucket) -> None:
    url = f"s3://{bucket.name}/elsewhere"
    keep_options(
        url, {**bucket.options, "aws_endpoint": "http://127.0.0.1:9", "aws_max_retries": "0"}
    )
    with pytest.raises((SpoolUnreachable, SpoolDenied)) as told:
        Spool.at(url, "run-1").put("i/0", b"a")
    assert url in str(told.value)
    assert (
        SECRET not in f"{told.value} {told.value!r} {told.value.__cause__} {told.value.__context__}"
    )


@pytest.mark.parametrize(
    "url", ["dbfs:/spool", "s3://bucket", "s3://key:secret@bucket/x", "default.spool"]
)
def test_a_url_that_is_no_place_for_a_spool_is_refused(url: str) -> None:
    with pytest.raises(NotAStage) as told:
        spools.checked_url(url)
    assert told.value.fields["what"] == "spool"
    assert "secret" not in str(told.value)


def test_a_spool_is_named_by_its_url_alone(tmp_path: Path) -> None:
    assert spools.checked_url(None) == ""
    assert spools.checked_url("s3://b/x/") == "s3://b/x"
    assert spools.checked_url(tmp_path / "x") == str(tmp_path / "x")
    assert spools.checked_url(f"file://{tmp_path}/x") == str(tmp_path / "x")


# --- blocks and outcomes --------------------------------------------------------------------------


def block_of(lo: int, hi: int) -> pa.Table:
    seqs = range(lo, hi)
    hashes = {name: pa.array([seq * 31 for seq in seqs], pa.int64()) for name in HASHES}
    text = pa.array([f"text of {seq}" * 50 for seq in seqs])
    return pa.table({"text": text, "id": pa.array(seqs, pa.int64()), **hashes})


class Kept:
    """A run of a store, with its input and the outcomes of its first half."""

    def __init__(self, store: Store, place: Place) -> None:
        self.store = store
        self.place = place
        schema = block_of(0, 1).schema
        self.record = runs.RunRecord(
            run_id="run-1",
            name="job",
            status=runs.Status.OPEN,
            key=KEY,
            size=ROWS,
            input_schema=schema_bytes(pa.schema([schema.field("text"), schema.field("id")])),
            result_schema=schema_bytes(RESULT),
            blocks=[(n, BLOCK) for n in range(ROWS // BLOCK)],
            policy=Policy(page_rows=20),
            spool=place.url,
        )
        store.transact(runs.create, self.record)
        self.blocks = [self._block(n) for n in range(ROWS // BLOCK)]
        self.chunks = [self._chunk(lo, lo // 5 + 1) for lo in range(0, ROWS // 2, 5)]

    def _block(self, n: int) -> runs.StoredBlock:
        [batch] = block_of(n * BLOCK, (n + 1) * BLOCK).combine_chunks().to_batches()
        block = spools.put_block(self.place.spool, f"i/0-0-{n}-w", batch, KEY)
        self.store.transact(put, [(runs.block_key("run-1", n), codec.pack(block))])
        return block

    def _chunk(self, lo: int, height: int) -> runs.Chunk:
        """Rows lo and lo + 2 succeeded; lo + 3 failed for its form."""
        batch = pa.RecordBatch.from_arrays([pa.array([lo, lo + 2], pa.int64())], schema=RESULT)
        seqs = b"".join(at.to_bytes(4, "little") for at in (0, 2))
        raws = {lo + 3: f'"{lo + 3}"'}
        data = spools.chunk_bytes(seqs, message_of(batch), raws)
        at = self.place.spool.put(spools.chunk_name(height, 1, "w"), data, raws=True)
        kind = int(ErrorClass.SCHEMA)
        other = runs.Other(lo + 3, FAIL, 1, kind, "no int")
        chunk = runs.Chunk(lo, b"", b"", [other], [], 0.0, 0, [], at=at, hi=lo + 3)
        rows = runs.chunk_rows("run-1", lo // 20, height, chunk)
        self.store.transact(put, rows)
        return chunk

    def outcomes(self) -> Outcomes:
        return Outcomes(self.store, self.record, Input(self.store, self.record))


def put(txn: Txn, rows: list[tuple[bytes, bytes]]) -> None:
    for key, value in rows:
        txn.put(key, value)


@pytest.fixture
def kept(place: Place) -> Kept:
    return Kept(open_store("memory:"), place)


def test_input_is_read_by_seq_from_the_spool(kept: Kept) -> None:
    source = Input(kept.store, kept.record)
    table = source.rows([(3, 5), (9, 12), (38, 40)])
    assert table.column_names == ["text", "id"]
    assert table["id"].to_pylist() == [3, 4, 9, 10, 11, 38, 39]
    assert table["text"].to_pylist()[0] == "text of 3" * 50
    assert source.rows([(5, 7)], ["id", *HASHES]).column_names == ["id", *HASHES]


def test_keys_are_read_without_the_other_columns(kept: Kept) -> None:
    """Everything behind the keys is gone: whoever reads keys does not notice."""
    for block in kept.blocks:
        data = kept.place.spool.get(block.at)
        assert block.keys_size < len(data) / 4
        kept.place.remove(f"run-1/{block.at.name}")
        kept.place.write(f"run-1/{block.at.name}", data[: block.keys_size])
    source = Input(kept.store, kept.record)
    assert source.rows([(0, ROWS)], ["id"])["id"].to_pylist() == list(range(ROWS))
    assert source.row_bytes(0) == kept.blocks[0].at.size // BLOCK
    with pytest.raises(SpoolLost) as told:
        source.rows([(12, 13)])
    assert told.value.seqs == [[10, 20]]


def test_outcomes_are_read_from_the_spool(kept: Kept) -> None:
    rows = kept.outcomes()
    assert rows.successes(0, 20)["y"].to_pylist() == [0, 2, 5, 7, 10, 12, 15, 17]
    assert rows.successes(6, 11).to_pylist() == [{"id": 7, "y": 7}, {"id": 10, "y": 10}]
    failed = rows.failed(0, ROWS)
    assert failed["id"].to_pylist() == [3, 8, 13, 18]
    assert failed["_raw"].to_pylist() == ['"3"', '"8"', '"13"', '"18"']


def test_records_of_rows_are_read_without_their_results(kept: Kept) -> None:
    for chunk in kept.chunks:
        assert chunk.at is not None
        kept.place.remove(f"run-1/{chunk.at.name}")
    rows = kept.outcomes()
    assert rows.records(0, ROWS)["_error"].to_pylist() == ["no int"] * 4
    with pytest.raises(SpoolLost) as told:
        rows.successes(0, ROWS)
    assert told.value.what == "outcomes"


def test_what_the_store_keeps_of_a_report_does_not_grow_with_its_results(kept: Kept) -> None:
    sizes = []
    for height, rows in ((100, 8), (101, 100_000)):
        data = spools.chunk_bytes(b"", os.urandom(rows), {})
        at = kept.place.spool.put(spools.chunk_name(height, 1, "w"), data)
        chunk = runs.Chunk(0, b"", b"", [], [], 0.0, 0, [], at=at, hi=rows)
        [(key, value)] = runs.chunk_rows("run-1", 0, height, chunk)
        sizes.append(len(key) + len(value))
    assert max(sizes) < 200
    assert sizes[1] - sizes[0] < 10


# --- what the ledger service takes ------------------------------------------------------------------


def move(**changes: Any) -> wire.Move:
    at = runs.Stored("o/01/1-1-w", 10, bytes(32), bytes(8))
    made = wire.Move(1, 1, b"", [Done(4, 6, SUCCESS)], [], b"", 4, [], 0, at, 6)
    return replace(made, **changes)


RAW = wire.Other(7, FAIL, int(ErrorClass.SCHEMA), "no int", 0, '"raw"')


@pytest.mark.parametrize(
    "changes",
    [
        {"at": None},
        {"size": 10},
        {"seqs": bytes(8)},
        {"others": [RAW]},
        {"lo": 5},
        {"hi": 5},
        {"at": runs.Stored("i/0", 10, bytes(32), bytes(8))},
        {"at": runs.Stored("o/../../run-2/o/1", 10, bytes(32), bytes(8))},
        {"at": runs.Stored("/o/1", 10, bytes(32), bytes(8))},
        {"at": runs.Stored("o/01/1-1-w", 10, b"", bytes(8))},
        {"at": runs.Stored("o/01/1-1-w", 0, bytes(32), bytes(8))},
    ],
    ids=lambda changes: f"{next(iter(changes))} {next(iter(changes.values()))}"[:50],
)
def test_a_result_is_taken_only_with_its_object_length_and_hash(changes: dict[str, Any]) -> None:
    record = runs.RunRecord("run-1", "job", spool="/spool")
    check_report(record, move())
    check_report(record, move(done=[Done(4, 6, FAIL)], at=None, lo=0, hi=0))
    with pytest.raises(Invalid):
        check_report(record, move(**changes))


def test_objects_are_refused_for_a_run_without_a_spool() -> None:
    record = runs.RunRecord("run-1", "job")
    check_report(record, move(at=None, size=10))
    with pytest.raises(Invalid):
        check_report(record, move())
    at = runs.StoredBlock(1, runs.Stored("i/0", 10, bytes(32), bytes(8)), 5, bytes(32))
    with pytest.raises(Invalid):
        block_value(record, memoryview(b""), at)
    with pytest.raises(Invalid):
        block_value(replace(record, spool="/spool"), memoryview(b"data"), None)
    assert block_value(record, memoryview(b"data"), None) == (4, b"data")


# --- SpoolLost --------------------------------------------------------------------------------------

DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda data: None,
    "truncated": lambda data: data[:-1],
    "other bytes": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "longer": lambda data: data + b"x",
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
@pytest.mark.parametrize("what", ["input", "outcomes"])
def test_an_object_that_is_gone_or_changed_is_named_with_its_rows(
    kept: Kept, what: str, damage: str
) -> None:
    spool_upkeep.check(kept.store, kept.record)
    hurt = [kept.blocks[1].at, kept.blocks[2].at] if what == "input" else [kept.chunks[2].at]
    for at in hurt:
        assert at is not None
        data = DAMAGES[damage](kept.place.spool.get(at))
        kept.place.remove(f"run-1/{at.name}")
        if data is not None:
            kept.place.write(f"run-1/{at.name}", data)
    with pytest.raises(SpoolLost) as told:
        spool_upkeep.check(kept.store, kept.record)
    assert told.value.what == what
    assert told.value.objects == len(hurt)
    assert told.value.seqs == ([[10, 30]] if what == "input" else [[10, 14]])
    assert told.value.spool == kept.place.url


def test_objects_that_were_copied_are_read_and_believed(kept: Kept) -> None:
    """Other tags, the same bytes."""
    for at in (kept.blocks[0].at, kept.chunks[0].at):
        assert at is not None
        data = kept.place.spool.get(at)
        kept.place.remove(f"run-1/{at.name}")
        kept.place.write(f"run-1/{at.name}", data)
    spool_upkeep.check(kept.store, kept.record)


def test_a_run_is_checked_with_the_runs_that_it_rests_on(kept: Kept) -> None:
    newer = replace(kept.record, run_id="run-2", input_run="run-1", base_run="run-1")
    kept.store.transact(runs.create, newer)
    kept.store.transact(runs.pin, "run-1", "run-2")
    spool_upkeep.check(kept.store, newer)
    kept.place.remove(f"run-1/{kept.blocks[3].at.name}")
    with pytest.raises(SpoolLost) as told:
        spool_upkeep.check(kept.store, newer)
    assert told.value.seqs == [[30, 40]]
    with pytest.raises(SpoolLost):
        spool_upkeep.check_donors(kept.store, replace(newer, run_id="run-3"))


# --- what nothing names -----------------------------------------------------------------------------


def test_objects_that_nothing_names_go_after_the_grace(kept: Kept) -> None:
    named = kept.place.names()
    kept.place.spool.put("o/05/5-9-late", b"of a writer that was fenced")
    assert spool_upkeep.sweep(kept.store, kept.record) == 0
    assert len(kept.place.names()) == len(named) + 1
    assert spool_upkeep.sweep(kept.store, kept.record, grace_ns=0) == 1
    assert kept.place.names() == named


def test_an_old_object_that_nothing_names_goes(tmp_path: Path) -> None:
    kept = Kept(open_store("memory:"), Place(str(tmp_path / "spool"), tmp_path / "spool", None))
    named = kept.place.names()
    for n, age_s in enumerate((HOUR_S // 2, 2 * HOUR_S)):
        at = kept.place.spool.put(f"o/05/5-{n}-late", b"late")
        then = time.time() - age_s
        os.utime(tmp_path / "spool/run-1" / at.name, (then, then))
    for at in (kept.blocks[0].at, kept.chunks[0].at):
        assert at is not None
        os.utime(tmp_path / "spool/run-1" / at.name, (1, 1))
    assert spool_upkeep.sweep(kept.store, kept.record) == 1
    assert kept.place.names() == sorted([*named, "run-1/o/05/5-0-late"])
    # Within its lease a writer may still report what it has put.
    patient = replace(kept.record, policy=Policy(page_rows=20, lease_ns=10 * HOUR_S * 10**9))
    os.utime(tmp_path / "spool/run-1/o/05/5-0-late", (time.time() - 5 * HOUR_S,) * 2)
    assert spool_upkeep.sweep(kept.store, patient) == 0


def test_the_objects_of_a_run_go_with_it(kept: Kept) -> None:
    other = Spool.at(kept.place.url, "run-10")
    at = other.put("o/00/1", b"of another run")
    with pytest.raises(prune.SpoolKept):
        prune.delete(kept.store, "job", ["run-1"])
    assert kept.store.read(runs.the, "run-1").deleting is False
    prune.delete(kept.store, "job", ["run-1"], spool_upkeep.Deletion())
    assert kept.place.names() == []
    assert kept.store.read(runs.get, "run-1") is None
    assert other.get(at) == b"of another run"
    # A child that was suspended meanwhile puts an object: it goes when the grace is over.
    kept.place.spool.put("o/05/5-9-late", b"late")
    spool_upkeep.sweep_leftovers(kept.store)
    assert kept.place.names() == ["run-1/o/05/5-9-late"]
    spool_upkeep.sweep_leftovers(kept.store, grace_ns=0)
    assert kept.place.names() == []
    assert kept.store.read(runs.leftovers) == []


def test_a_run_whose_spool_refuses_is_kept_whole(bucket: Bucket) -> None:
    place = Place(f"s3://{bucket.name}/a/spool", None, bucket)
    keep_options(place.url, bucket.options)
    kept = Kept(open_store("memory:"), place)
    keep_options(
        place.url, {**bucket.options, "aws_endpoint": "http://127.0.0.1:9", "aws_max_retries": "0"}
    )
    with pytest.raises(prune.SpoolKept) as told:
        prune.delete(kept.store, "job", ["run-1"], spool_upkeep.Deletion())
    assert SECRET not in str(told.value)
    assert place.url in str(told.value)
    keep_options(place.url, bucket.options)
    assert kept.store.read(runs.the, "run-1") == kept.record
    spool_upkeep.check(kept.store, kept.record)


def test_an_interrupted_deletion_of_objects_is_finished_by_the_next(kept: Kept) -> None:
    class Killed(Exception):
        pass

    class Interrupted(spool_upkeep.Deletion):
        def delete(self, record: runs.RunRecord) -> None:
            kept.place.remove(f"run-1/{kept.blocks[0].at.name}")
            raise Killed

    with pytest.raises(Killed):
        prune.delete(kept.store, "job", ["run-1"], Interrupted())
    assert kept.store.read(runs.the, "run-1").deleting
    [verdict] = prune.judge([kept.store.read(runs.the, "run-1")])
    assert verdict.goes
    prune.delete(kept.store, "job", ["run-1"], spool_upkeep.Deletion())
    assert kept.place.names() == []


def test_a_spool_access_does_not_show_its_options() -> None:
    access = spools.SpoolAccess("s3://b/x", KEY, {"aws_secret_access_key": SECRET})
    assert SECRET not in f"{access} {access!r}"
    assert issubclass(SpoolLost, HoldfastError)


def test_a_bundle_of_successes_has_no_text_of_failed_rows(kept: Kept) -> None:
    half = ROWS // 2
    whole = outcome_rows.bundle(kept.store, kept.record, 0, half)
    good = outcome_rows.bundle(kept.store, kept.record, 0, half, successes_only=True)
    assert b"no int" in whole
    assert b"no int" not in good
    one, two = outcome_rows.opened(whole)[0], outcome_rows.opened(good)[0]
    assert one.successes(0, half).num_rows
    assert one.successes(0, half).equals(two.successes(0, half))
    assert one.success_count(0, half) == one.successes(0, half).num_rows + _untold(kept, half)


def _untold(kept: Kept, upto: int) -> int:
    """Rows of the fixture that have no outcome: they count as if they had succeeded."""
    told = kept_outcomes(kept, upto)
    return upto - told


def kept_outcomes(kept: Kept, upto: int) -> int:
    rows = outcome_rows.opened(outcome_rows.bundle(kept.store, kept.record, 0, upto))[0]
    return int(rows.successes(0, upto).num_rows + rows.records(0, upto).num_rows)
