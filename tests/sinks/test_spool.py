"""The spool of a run: write-once objects, referenced by the ledger and checked before a run resumes."""

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
from holdfast.ledger import run_deletion, runs
from holdfast.ledger.events import FinishedRange
from holdfast.ledger.run_policy import ErrorClass, RunPolicy
from holdfast.ledger.states import RowState
from holdfast.spark import ledger_protocol, outcome_bundles, spool_maintenance
from holdfast.spark import spool as spools
from holdfast.spark.arrow_rows import encode_batch
from holdfast.spark.errors import NotAStage, SpoolDenied, SpoolLost, SpoolUnreachable
from holdfast.spark.row_match import HASH_COLUMNS
from holdfast.spark.run_data import RunInput, RunOutcomes, encode_schema
from holdfast.spark.sinks.object_store import keep_options
from holdfast.spark.spool import Spool
from holdfast.spark.spool_validation import check_spool_report, checked_block_value
from holdfast.store import open as open_store
from holdfast.store.api import Store, Txn
from tests.sinks.test_sink_s3 import SECRET, S3Bucket, bucket, server

__all__ = ["bucket", "server"]

KEY = ["id"]
RESULT = pa.schema([pa.field("y", pa.int64())])
SUCCESS = int(RowState.TERMINAL_SUCCESS)
FAIL = int(RowState.TERMINAL_FAIL)
ROWS = 40
BLOCK = 10
HOUR_S = 3600


class SpoolRig:
    """A spool, with methods that damage its objects."""

    def __init__(self, url: str, home: Path | None, bucket: S3Bucket | None) -> None:
        self.url = url
        self._directory = home
        self._bucket = bucket

    @property
    def spool(self) -> Spool:
        return Spool.open(self.url, "run-1")

    def names(self) -> list[str]:
        return sorted(one.name for one in self.spool.storage.list_objects("run-1"))

    def write(self, name: str, data: bytes) -> None:
        if self._directory is not None:
            path = self._directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            # Two writes within one clock tick of the file system have equal times.
            os.utime(path, ns=(1, 1))
        else:
            assert self._bucket is not None
            obstore.put(self._bucket.store, f"a/spool/{name}", data)

    def remove(self, name: str) -> None:
        self.spool.storage.delete([name])


@pytest.fixture(params=["directory", "s3"])
def spool_rig(request: pytest.FixtureRequest, tmp_path: Path) -> SpoolRig:
    if request.param == "directory":
        return SpoolRig(str(tmp_path / "spool"), tmp_path / "spool", None)
    made: S3Bucket = request.getfixturevalue("bucket")
    url = f"s3://{made.name}/a/spool"
    keep_options(url, made.options)
    return SpoolRig(url, None, made)


# --- storages -------------------------------------------------------------------------------------


def test_spool_object_is_written_once_and_read_back(spool_rig: SpoolRig) -> None:
    spool = spool_rig.spool
    data = os.urandom(5000)
    at = spool.put("o/00/1-1-w", data, raws=True)
    assert at == runs.SpoolObject("o/00/1-1-w", 5000, sha256(data).digest(), at.tag, True)
    assert spool.get(at) == data
    # Repeat the put, as after a lost reply.
    assert spool.put("o/00/1-1-w", data, raws=True) == at
    with pytest.raises(Conflict):
        spool.put("o/00/1-1-w", data[:-1])
    assert spool.get(at) == data


def test_list_objects_returns_one_run_with_size_and_tag(spool_rig: SpoolRig) -> None:
    kept = [spool_rig.spool.put(f"o/00/1-{n}-w", bytes(n + 1)) for n in range(3)]
    Spool.open(spool_rig.url, "run-10").put("o/00/1-1-w", b"of another run")
    found = {one.name: one for one in spool_rig.spool.storage.list_objects("run-1")}
    assert sorted(found) == [f"run-1/{one.name}" for one in kept]
    for one in kept:
        listed = found[f"run-1/{one.name}"]
        assert (listed.size, listed.tag) == (one.size, one.tag)
        assert abs(listed.modified_ns / 1e9 - time.time()) < HOUR_S
    assert list(Spool.open(spool_rig.url, "run-2").storage.list_objects("run-2")) == []


def test_missing_spool_directory_raises_spool_unreachable(tmp_path: Path) -> None:
    with pytest.raises(SpoolUnreachable):
        list(Spool.open(str(tmp_path / "none"), "run-1").storage.list_objects("run-1"))


def test_delete_ignores_missing_spool_objects(spool_rig: SpoolRig) -> None:
    spool_rig.spool.put("o/00/1-1-w", b"a")
    names = ["run-1/o/00/1-1-w", "run-1/o/00/none"]
    spool_rig.spool.storage.delete(names)
    spool_rig.spool.storage.delete(names)
    assert spool_rig.names() == []


def test_get_reads_a_byte_range_of_a_spool_object(spool_rig: SpoolRig) -> None:
    spool_rig.spool.put("i/0", b"0123456789")
    get = spool_rig.spool.storage.get
    assert get("run-1/i/0", 2, 5) == b"234"
    assert get("run-1/i/0", 4) == b"456789"
    assert get("run-1/i/0", 8, 20) == b"89"
    assert get("run-1/i/none", 2, 5) is None
    assert get("run-1/i/none") is None


def test_spool_path_that_is_a_file_raises_spool_unreachable(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("a file")
    with pytest.raises(SpoolUnreachable) as raised:
        Spool.open(str(tmp_path / "spool"), "run-1").put("i/0", b"a")
    assert str(tmp_path / "spool") in str(raised.value)


def test_spool_error_hides_credentials(bucket: S3Bucket) -> None:
    url = f"s3://{bucket.name}/elsewhere"
    keep_options(
        url, {**bucket.options, "aws_endpoint": "http://127.0.0.1:9", "aws_max_retries": "0"}
    )
    with pytest.raises((SpoolUnreachable, SpoolDenied)) as raised:
        Spool.open(url, "run-1").put("i/0", b"a")
    assert url in str(raised.value)
    assert (
        SECRET
        not in f"{raised.value} {raised.value!r} {raised.value.__cause__} {raised.value.__context__}"
    )


@pytest.mark.parametrize(
    "url", ["dbfs:/spool", "s3://bucket", "s3://key:secret@bucket/x", "default.spool"]
)
def test_invalid_spool_url_is_refused(url: str) -> None:
    with pytest.raises(NotAStage) as raised:
        spools.checked_spool_url(url)
    assert raised.value.fields["what"] == "spool"
    assert "secret" not in str(raised.value)


def test_spool_url_is_normalised(tmp_path: Path) -> None:
    assert spools.checked_spool_url(None) == ""
    assert spools.checked_spool_url("s3://b/x/") == "s3://b/x"
    assert spools.checked_spool_url(tmp_path / "x") == str(tmp_path / "x")
    assert spools.checked_spool_url(f"file://{tmp_path}/x") == str(tmp_path / "x")


# --- blocks and outcomes --------------------------------------------------------------------------


def block_table(lo: int, hi: int) -> pa.Table:
    seqs = range(lo, hi)
    hashes = {name: pa.array([seq * 31 for seq in seqs], pa.int64()) for name in HASH_COLUMNS}
    text = pa.array([f"text of {seq}" * 50 for seq in seqs])
    return pa.table({"text": text, "id": pa.array(seqs, pa.int64()), **hashes})


class SpooledRun:
    """A run in a store, with its input and the outcomes of its first half."""

    def __init__(self, store: Store, spool_rig: SpoolRig) -> None:
        self.store = store
        self.spool_rig = spool_rig
        schema = block_table(0, 1).schema
        self.record = runs.RunRecord(
            run_id="run-1",
            name="job",
            status=runs.RunLifecycle.OPEN,
            key=KEY,
            size=ROWS,
            input_schema=encode_schema(pa.schema([schema.field("text"), schema.field("id")])),
            result_schema=encode_schema(RESULT),
            blocks=[(n, BLOCK) for n in range(ROWS // BLOCK)],
            policy=RunPolicy(page_rows=20),
            spool=spool_rig.url,
        )
        store.transact(runs.create, self.record)
        self.blocks = [self._put_block(n) for n in range(ROWS // BLOCK)]
        self.chunks = [self._put_chunk(lo, lo // 5 + 1) for lo in range(0, ROWS // 2, 5)]

    def _put_block(self, n: int) -> runs.SpoolBlock:
        [batch] = block_table(n * BLOCK, (n + 1) * BLOCK).combine_chunks().to_batches()
        block = spools.write_block(self.spool_rig.spool, f"i/0-0-{n}-w", batch, KEY)
        self.store.transact(put_rows, [(runs.block_key("run-1", n), codec.pack(block))])
        return block

    def _put_chunk(self, lo: int, height: int) -> runs.OutcomeChunk:
        """Put a chunk: rows lo and lo + 2 succeeded, lo + 3 failed with a schema error."""
        batch = pa.RecordBatch.from_arrays([pa.array([lo, lo + 2], pa.int64())], schema=RESULT)
        seqs = b"".join(at.to_bytes(4, "little") for at in (0, 2))
        raws = {lo + 3: f'"{lo + 3}"'}
        data = spools.encode_chunk(seqs, encode_batch(batch), raws)
        at = self.spool_rig.spool.put(spools.chunk_name(height, 1, "w"), data, raws=True)
        kind = int(ErrorClass.SCHEMA)
        resultless_row = runs.ResultlessRow(lo + 3, FAIL, 1, kind, "no int")
        chunk = runs.OutcomeChunk(
            lo=lo,
            seqs=b"",
            batch=b"",
            resultless=[resultless_row],
            attempts=[],
            cost=0.0,
            calls=0,
            spent_us_log2=[],
            at=at,
            hi=lo + 3,
        )
        rows = runs.chunk_rows("run-1", lo // 20, height, chunk)
        self.store.transact(put_rows, rows)
        return chunk

    def outcomes(self) -> RunOutcomes:
        return RunOutcomes(self.store, self.record, RunInput(self.store, self.record))


def put_rows(txn: Txn, rows: list[tuple[bytes, bytes]]) -> None:
    for key, value in rows:
        txn.put(key, value)


@pytest.fixture
def spooled_run(spool_rig: SpoolRig) -> SpooledRun:
    return SpooledRun(open_store("memory:"), spool_rig)


def test_input_is_read_by_seq_from_the_spool(spooled_run: SpooledRun) -> None:
    source = RunInput(spooled_run.store, spooled_run.record)
    table = source.rows([(3, 5), (9, 12), (38, 40)])
    assert table.column_names == ["text", "id"]
    assert table["id"].to_pylist() == [3, 4, 9, 10, 11, 38, 39]
    assert table["text"].to_pylist()[0] == "text of 3" * 50
    assert source.rows([(5, 7)], ["id", *HASH_COLUMNS]).column_names == ["id", *HASH_COLUMNS]


def test_spool_keys_are_read_without_other_columns(spooled_run: SpooledRun) -> None:
    """Objects truncated after the keys still allow reads of the keys."""
    for block in spooled_run.blocks:
        data = spooled_run.spool_rig.spool.get(block.at)
        assert block.keys_size < len(data) / 4
        spooled_run.spool_rig.remove(f"run-1/{block.at.name}")
        spooled_run.spool_rig.write(f"run-1/{block.at.name}", data[: block.keys_size])
    source = RunInput(spooled_run.store, spooled_run.record)
    assert source.rows([(0, ROWS)], ["id"])["id"].to_pylist() == list(range(ROWS))
    assert source.row_bytes(0) == spooled_run.blocks[0].at.size // BLOCK
    with pytest.raises(SpoolLost) as raised:
        source.rows([(12, 13)])
    assert raised.value.seqs == [[10, 20]]


def test_outcomes_are_read_from_the_spool(spooled_run: SpooledRun) -> None:
    rows = spooled_run.outcomes()
    assert rows.successes(0, 20)["y"].to_pylist() == [0, 2, 5, 7, 10, 12, 15, 17]
    assert rows.successes(6, 11).to_pylist() == [{"id": 7, "y": 7}, {"id": 10, "y": 10}]
    failed = rows.failed(0, ROWS)
    assert failed["id"].to_pylist() == [3, 8, 13, 18]
    assert failed["_raw"].to_pylist() == ['"3"', '"8"', '"13"', '"18"']


def test_resultless_rows_are_read_without_spool_objects(spooled_run: SpooledRun) -> None:
    for chunk in spooled_run.chunks:
        assert chunk.at is not None
        spooled_run.spool_rig.remove(f"run-1/{chunk.at.name}")
    rows = spooled_run.outcomes()
    assert rows.resultless_rows(0, ROWS)["_error"].to_pylist() == ["no int"] * 4
    with pytest.raises(SpoolLost) as raised:
        rows.successes(0, ROWS)
    assert raised.value.what == "outcomes"


def test_stored_chunk_size_does_not_grow_with_spooled_results(spooled_run: SpooledRun) -> None:
    sizes = []
    for height, rows in ((100, 8), (101, 100_000)):
        data = spools.encode_chunk(b"", os.urandom(rows), {})
        at = spooled_run.spool_rig.spool.put(spools.chunk_name(height, 1, "w"), data)
        chunk = runs.OutcomeChunk(
            lo=0,
            seqs=b"",
            batch=b"",
            resultless=[],
            attempts=[],
            cost=0.0,
            calls=0,
            spent_us_log2=[],
            at=at,
            hi=rows,
        )
        [(key, value)] = runs.chunk_rows("run-1", 0, height, chunk)
        sizes.append(len(key) + len(value))
    assert max(sizes) < 200
    assert sizes[1] - sizes[0] < 10


# --- validation by the ledger service ---------------------------------------------------------------


def grant_report(**changes: Any) -> ledger_protocol.GrantReport:
    at = runs.SpoolObject("o/01/1-1-w", 10, bytes(32), bytes(8))
    report = ledger_protocol.GrantReport(
        epoch=1,
        report_no=1,
        digest=b"",
        done=[FinishedRange(4, 6, SUCCESS)],
        begin=[],
        seqs=b"",
        lo=4,
        resultless=[],
        size=0,
        spool_object=at,
        hi=6,
    )
    return replace(report, **changes)


RAW = ledger_protocol.ResultlessRowReport(7, FAIL, int(ErrorClass.SCHEMA), "no int", 0, '"raw"')


@pytest.mark.parametrize(
    "changes",
    [
        {"spool_object": None},
        {"size": 10},
        {"seqs": bytes(8)},
        {"resultless": [RAW]},
        {"lo": 5},
        {"hi": 5},
        {"spool_object": runs.SpoolObject("i/0", 10, bytes(32), bytes(8))},
        {"spool_object": runs.SpoolObject("o/../../run-2/o/1", 10, bytes(32), bytes(8))},
        {"spool_object": runs.SpoolObject("/o/1", 10, bytes(32), bytes(8))},
        {"spool_object": runs.SpoolObject("o/01/1-1-w", 10, b"", bytes(8))},
        {"spool_object": runs.SpoolObject("o/01/1-1-w", 0, bytes(32), bytes(8))},
    ],
    ids=lambda changes: f"{next(iter(changes))} {next(iter(changes.values()))}"[:50],
)
def test_check_spool_report_needs_object_length_and_hash(changes: dict[str, Any]) -> None:
    record = runs.RunRecord("run-1", "job", spool="/spool")
    check_spool_report(record, grant_report())
    check_spool_report(
        record, grant_report(done=[FinishedRange(4, 6, FAIL)], spool_object=None, lo=0, hi=0)
    )
    with pytest.raises(Invalid):
        check_spool_report(record, grant_report(**changes))


def test_spool_objects_are_refused_for_a_run_without_a_spool() -> None:
    record = runs.RunRecord("run-1", "job")
    check_spool_report(record, grant_report(spool_object=None, size=10))
    with pytest.raises(Invalid):
        check_spool_report(record, grant_report())
    at = runs.SpoolBlock(1, runs.SpoolObject("i/0", 10, bytes(32), bytes(8)), 5, bytes(32))
    with pytest.raises(Invalid):
        checked_block_value(record, memoryview(b""), at)
    with pytest.raises(Invalid):
        checked_block_value(replace(record, spool="/spool"), memoryview(b"data"), None)
    assert checked_block_value(record, memoryview(b"data"), None) == (4, b"data")


# --- SpoolLost --------------------------------------------------------------------------------------

DAMAGE_BY_NAME: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda data: None,
    "truncated": lambda data: data[:-1],
    "other bytes": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "longer": lambda data: data + b"x",
}


@pytest.mark.parametrize("damage", sorted(DAMAGE_BY_NAME))
@pytest.mark.parametrize("what", ["input", "outcomes"])
def test_spool_lost_names_missing_and_changed_objects_with_their_rows(
    spooled_run: SpooledRun, what: str, damage: str
) -> None:
    spool_maintenance.check_objects(spooled_run.store, spooled_run.record)
    damaged = (
        [spooled_run.blocks[1].at, spooled_run.blocks[2].at]
        if what == "input"
        else [spooled_run.chunks[2].at]
    )
    for at in damaged:
        assert at is not None
        data = DAMAGE_BY_NAME[damage](spooled_run.spool_rig.spool.get(at))
        spooled_run.spool_rig.remove(f"run-1/{at.name}")
        if data is not None:
            spooled_run.spool_rig.write(f"run-1/{at.name}", data)
    with pytest.raises(SpoolLost) as raised:
        spool_maintenance.check_objects(spooled_run.store, spooled_run.record)
    assert raised.value.what == what
    assert raised.value.objects == len(damaged)
    assert raised.value.seqs == ([[10, 30]] if what == "input" else [[10, 14]])
    assert raised.value.spool == spooled_run.spool_rig.url


def test_copied_spool_objects_with_other_tags_are_accepted(spooled_run: SpooledRun) -> None:
    """The copies have other tags and the same bytes."""
    for at in (spooled_run.blocks[0].at, spooled_run.chunks[0].at):
        assert at is not None
        data = spooled_run.spool_rig.spool.get(at)
        spooled_run.spool_rig.remove(f"run-1/{at.name}")
        spooled_run.spool_rig.write(f"run-1/{at.name}", data)
    spool_maintenance.check_objects(spooled_run.store, spooled_run.record)


def test_check_objects_includes_pinned_runs(spooled_run: SpooledRun) -> None:
    newer = replace(spooled_run.record, run_id="run-2", input_run="run-1", base_run="run-1")
    spooled_run.store.transact(runs.create, newer)
    spooled_run.store.transact(runs.pin, "run-1", "run-2")
    spool_maintenance.check_objects(spooled_run.store, newer)
    spooled_run.spool_rig.remove(f"run-1/{spooled_run.blocks[3].at.name}")
    with pytest.raises(SpoolLost) as raised:
        spool_maintenance.check_objects(spooled_run.store, newer)
    assert raised.value.seqs == [[30, 40]]
    with pytest.raises(SpoolLost):
        spool_maintenance.check_reuse_sources(spooled_run.store, replace(newer, run_id="run-3"))


# --- unreferenced objects ---------------------------------------------------------------------------


def test_sweep_run_deletes_unreferenced_objects_after_the_grace(spooled_run: SpooledRun) -> None:
    named = spooled_run.spool_rig.names()
    spooled_run.spool_rig.spool.put("o/05/5-9-late", b"of a writer that was fenced")
    assert spool_maintenance.sweep_run(spooled_run.store, spooled_run.record) == 0
    assert len(spooled_run.spool_rig.names()) == len(named) + 1
    assert spool_maintenance.sweep_run(spooled_run.store, spooled_run.record, grace_ns=0) == 1
    assert spooled_run.spool_rig.names() == named


def test_sweep_run_deletes_only_old_unreferenced_objects(tmp_path: Path) -> None:
    spooled_run = SpooledRun(
        open_store("memory:"), SpoolRig(str(tmp_path / "spool"), tmp_path / "spool", None)
    )
    named = spooled_run.spool_rig.names()
    for n, age_s in enumerate((HOUR_S // 2, 2 * HOUR_S)):
        at = spooled_run.spool_rig.spool.put(f"o/05/5-{n}-late", b"late")
        then = time.time() - age_s
        os.utime(tmp_path / "spool/run-1" / at.name, (then, then))
    for at in (spooled_run.blocks[0].at, spooled_run.chunks[0].at):
        assert at is not None
        os.utime(tmp_path / "spool/run-1" / at.name, (1, 1))
    assert spool_maintenance.sweep_run(spooled_run.store, spooled_run.record) == 1
    assert spooled_run.spool_rig.names() == sorted([*named, "run-1/o/05/5-0-late"])
    # During its lease a writer may still report the object that it has put.
    patient = replace(
        spooled_run.record, policy=RunPolicy(page_rows=20, lease_ns=10 * HOUR_S * 10**9)
    )
    os.utime(tmp_path / "spool/run-1/o/05/5-0-late", (time.time() - 5 * HOUR_S,) * 2)
    assert spool_maintenance.sweep_run(spooled_run.store, patient) == 0


def test_deleting_a_run_deletes_its_spool_objects(spooled_run: SpooledRun) -> None:
    other = Spool.open(spooled_run.spool_rig.url, "run-10")
    at = other.put("o/00/1", b"of another run")
    with pytest.raises(run_deletion.SpoolKept):
        run_deletion.delete_runs(spooled_run.store, "job", ["run-1"])
    assert spooled_run.store.read(runs.get_existing, "run-1").deleting is False
    run_deletion.delete_runs(spooled_run.store, "job", ["run-1"], spool_maintenance.SpoolDeletion())
    assert spooled_run.spool_rig.names() == []
    assert spooled_run.store.read(runs.get_record, "run-1") is None
    assert other.get(at) == b"of another run"
    # A suspended child puts an object after the deletion. The sweep deletes it after the grace.
    spooled_run.spool_rig.spool.put("o/05/5-9-late", b"late")
    spool_maintenance.sweep_leftovers(spooled_run.store)
    assert spooled_run.spool_rig.names() == ["run-1/o/05/5-9-late"]
    spool_maintenance.sweep_leftovers(spooled_run.store, grace_ns=0)
    assert spooled_run.spool_rig.names() == []
    assert spooled_run.store.read(runs.list_deleted_spools) == []


def test_run_is_kept_when_its_spool_is_unreachable(bucket: S3Bucket) -> None:
    spool_rig = SpoolRig(f"s3://{bucket.name}/a/spool", None, bucket)
    keep_options(spool_rig.url, bucket.options)
    spooled_run = SpooledRun(open_store("memory:"), spool_rig)
    keep_options(
        spool_rig.url,
        {**bucket.options, "aws_endpoint": "http://127.0.0.1:9", "aws_max_retries": "0"},
    )
    with pytest.raises(run_deletion.SpoolKept) as raised:
        run_deletion.delete_runs(
            spooled_run.store, "job", ["run-1"], spool_maintenance.SpoolDeletion()
        )
    assert SECRET not in str(raised.value)
    assert spool_rig.url in str(raised.value)
    keep_options(spool_rig.url, bucket.options)
    assert spooled_run.store.read(runs.get_existing, "run-1") == spooled_run.record
    spool_maintenance.check_objects(spooled_run.store, spooled_run.record)


def test_interrupted_run_deletion_is_finished_by_the_next(spooled_run: SpooledRun) -> None:
    class DeletionKilled(Exception):
        pass

    class Interrupted(spool_maintenance.SpoolDeletion):
        def delete(self, record: runs.RunRecord) -> None:
            spooled_run.spool_rig.remove(f"run-1/{spooled_run.blocks[0].at.name}")
            raise DeletionKilled

    with pytest.raises(DeletionKilled):
        run_deletion.delete_runs(spooled_run.store, "job", ["run-1"], Interrupted())
    assert spooled_run.store.read(runs.get_existing, "run-1").deleting
    [verdict] = run_deletion.plan_retention([spooled_run.store.read(runs.get_existing, "run-1")])
    assert verdict.is_deletable
    run_deletion.delete_runs(spooled_run.store, "job", ["run-1"], spool_maintenance.SpoolDeletion())
    assert spooled_run.spool_rig.names() == []


def test_spool_access_repr_hides_storage_options() -> None:
    access = spools.SpoolAccess("s3://b/x", KEY, {"aws_secret_access_key": SECRET})
    assert SECRET not in f"{access} {access!r}"
    assert issubclass(SpoolLost, HoldfastError)


def test_successes_only_bundle_omits_error_texts(spooled_run: SpooledRun) -> None:
    half = ROWS // 2
    whole = outcome_bundles.make_bundle(spooled_run.store, spooled_run.record, 0, half)
    good = outcome_bundles.make_bundle(
        spooled_run.store, spooled_run.record, 0, half, successes_only=True
    )
    assert b"no int" in whole
    assert b"no int" not in good
    one, two = outcome_bundles.open_bundle(whole)[0], outcome_bundles.open_bundle(good)[0]
    assert one.successes(0, half).num_rows
    assert one.successes(0, half).equals(two.successes(0, half))
    assert one.success_count(0, half) == one.successes(0, half).num_rows + _rows_without_outcome(
        spooled_run, half
    )


def _rows_without_outcome(spooled_run: SpooledRun, upto: int) -> int:
    """The number of fixture rows without an outcome. `success_count` counts them as successes."""
    with_outcome = count_outcomes(spooled_run, upto)
    return upto - with_outcome


def count_outcomes(spooled_run: SpooledRun, upto: int) -> int:
    rows = outcome_bundles.open_bundle(
        outcome_bundles.make_bundle(spooled_run.store, spooled_run.record, 0, upto)
    )[0]
    return int(rows.successes(0, upto).num_rows + rows.resultless_rows(0, upto).num_rows)
