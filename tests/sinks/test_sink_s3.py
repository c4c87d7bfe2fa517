"""The Parquet sink in an object store: conditional puts of the manifest fence killed and late writers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer
from obstore.store import S3Store

from holdfast.errors import Invalid
from holdfast.ledger.runs import RunRecord
from holdfast.spark.retry_run import retry_sink_spec
from holdfast.spark.sinks import (
    NOTHING,
    Base,
    KeptPart,
    OutputCorrupt,
    OutputError,
    OutputNotOurs,
    OutputTaken,
    ParquetSink,
    Part,
    Same,
    open_sink,
    read_parts,
)
from holdfast.spark.sinks.object_store import keep_options, options_for
from tests.sinks.test_sinks import CUT, SCHEMA, part

SECRET = "wJalrXUtnFEMI-bPxRfiCYEXAMPLEKEY"


class S3SinkKilled(BaseException):
    """Simulates a kill of the process."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    made = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    made.start()
    host, port = made.get_host_and_port()
    yield f"http://{host}:{port}"
    made.stop()


class S3Bucket:
    def __init__(self, endpoint: str, name: str) -> None:
        self.options = {
            "aws_endpoint": endpoint,
            "aws_access_key_id": "AKIAEXAMPLE",
            "aws_secret_access_key": SECRET,
            "aws_region": "us-east-1",
            "aws_virtual_hosted_style_request": "false",
            "allow_http": "true",
        }
        self.name = name
        self.out = f"s3://{name}/a/out"
        import urllib.request

        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{name}", method="PUT")).close()
        self.store = S3Store(
            name,
            endpoint=endpoint,
            access_key_id="AKIAEXAMPLE",
            secret_access_key=SECRET,
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )
        keep_options(self.out, self.options)

    def sink(self, **options: object) -> ParquetSink:
        return ParquetSink(self.out, grace_s=0, storage_options=self.options, **options)  # type: ignore[arg-type]

    def begin_sink(self) -> ParquetSink:
        sink = self.sink()
        sink.begin("run-1", "labels", SCHEMA)
        return sink

    def names(self) -> list[str]:
        return sorted(one["path"] for one in obstore.list(self.store).collect())

    def read(self, path: str) -> bytes:
        return bytes(obstore.get(self.store, path).bytes())

    def ids_by_listing(self) -> list[int]:
        """Ids by listing the prefix, as a reader without the manifest sees them."""
        ids: list[int] = []
        for name in self.names():
            if name.endswith(".parquet") and "/_" not in name:
                ids += pq.read_table(pa.BufferReader(self.read(name)))["id"].to_pylist()
        return ids

    def ids_by_manifest(self) -> list[int]:
        """Ids of the files named by the manifest."""
        ids: list[int] = []
        for file in read_parts(self.out).files:
            name = file.removeprefix(f"s3://{self.name}/")
            ids += pq.read_table(pa.BufferReader(self.read(name)))["id"].to_pylist()
        return ids


@pytest.fixture
def bucket(server: str, request: pytest.FixtureRequest) -> S3Bucket:
    name = "b" + sha256(request.node.name.encode()).hexdigest()[:20]
    return S3Bucket(server, name)


def test_an_output_in_s3_is_written_and_read_back(bucket: S3Bucket) -> None:
    sink = bucket.sink()
    sink.check_vacant()
    sink.check(SCHEMA)
    assert bucket.names() == []
    assert sink.begin("run-1", "labels", SCHEMA) == NOTHING
    sink.commit_many([part(0), part(1)])
    sink.commit_many([part(2, rows=0), part(3)])
    sink.finish()
    assert bucket.ids_by_manifest() == bucket.ids_by_listing() == [*range(200), *range(300, 400)]
    assert "a/out/_SUCCESS" in bucket.names()
    manifest = read_parts(bucket.out)
    assert (manifest.version, manifest.complete, manifest.rows) == (4 * CUT - 1, True, 300)
    for file in manifest.parts:
        if file.path:
            data = bucket.read(f"a/out/{file.path}")
            assert (len(data), sha256(data).hexdigest()) == (file.bytes, file.sha256)
    assert sink.parts("run-1") == manifest.files
    # A sink reopened from the spec has nothing to write.
    again = open_sink(sink.spec())
    assert again.begin("run-1", "labels", SCHEMA) == 4 * CUT - 1
    assert again.commit_many([part(3)]) == 4 * CUT - 1


def test_an_output_without_rows_in_s3_has_its_columns(bucket: S3Bucket) -> None:
    sink = bucket.begin_sink()
    sink.finish()
    [name] = [name for name in bucket.names() if name.endswith(".parquet")]
    assert pq.read_schema(pa.BufferReader(bucket.read(name))).names == ["id", "label"]


@pytest.mark.parametrize("step", ["part-put", "head-before", "head-put"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_s3_sink_killed_at_any_step_leaves_whole_commits(
    bucket: S3Bucket, step: str, count: int
) -> None:
    seen = 0

    def die(name: str) -> None:
        nonlocal seen
        seen += name == step
        if seen == count:
            raise S3SinkKilled

    former = bucket.sink(step=die)

    def write() -> None:
        former.begin("run-1", "labels", SCHEMA)
        former.commit_many([part(0), part(1)])
        former.commit_many([part(2), part(3)])

    with pytest.raises(S3SinkKilled):
        write()
    sink = bucket.sink()
    version = sink.begin("run-1", "labels", SCHEMA)
    assert version in (NOTHING, 2 * CUT - 1, 4 * CUT - 1)
    assert bucket.ids_by_manifest() == list(range(version + 1))
    sink.commit_many([part(0), part(1)])
    sink.commit_many([part(2), part(3)])
    sink.finish()
    assert bucket.ids_by_manifest() == bucket.ids_by_listing() == list(range(4 * CUT))


def test_s3_writer_that_lost_the_manifest_race_is_fenced(bucket: S3Bucket) -> None:
    successors: list[ParquetSink] = []

    def take_over(step: str) -> None:
        if step == "part-put" and not successors:
            successors.append(bucket.begin_sink())
            successors[0].commit(*part(0))

    former = bucket.sink(step=take_over)
    former.begin("run-1", "labels", SCHEMA)
    with pytest.raises(OutputTaken):
        former.commit(*part(0))
    with pytest.raises(OutputTaken):
        former.finish()
    successors[0].commit(*part(1))
    assert bucket.ids_by_manifest() == list(range(2 * CUT))


def test_one_of_two_s3_writers_of_the_same_manifest_is_refused(bucket: S3Bucket) -> None:
    """A race between the read of the manifest and its put. Only a conditional put detects it."""
    others: list[ParquetSink] = []

    def race(step: str) -> None:
        if step == "head-before" and armed and not others:
            others.append(bucket.sink())
            others[0].begin("run-1", "labels", SCHEMA)

    armed = False
    former = bucket.sink(step=race)
    former.begin("run-1", "labels", SCHEMA)
    armed = True
    with pytest.raises(OutputTaken):
        former.commit(*part(0))
    assert bucket.ids_by_manifest() == []
    others[0].commit(*part(0))
    assert bucket.ids_by_manifest() == list(range(CUT))


def test_only_one_of_two_first_s3_writers_begins(bucket: S3Bucket) -> None:
    def race(step: str) -> None:
        if step == "head-before":
            bucket.sink().begin("run-2", "labels", SCHEMA)

    with pytest.raises(OutputTaken):
        bucket.sink(step=race).begin("run-1", "labels", SCHEMA)
    assert bucket.sink().owner() == "run-2"


def test_foreign_s3_objects_are_refused_and_unchanged(bucket: S3Bucket) -> None:
    obstore.put(bucket.store, "a/out/data.parquet", b"somebody's")
    with pytest.raises(OutputNotOurs):
        bucket.sink().check_vacant()
    with pytest.raises(OutputNotOurs):
        bucket.begin_sink()
    assert bucket.names() == ["a/out/data.parquet"]


def test_s3_objects_with_the_same_name_prefix_are_ignored(bucket: S3Bucket) -> None:
    obstore.put(bucket.store, "a/out2/data.parquet", b"somebody's")
    obstore.put(bucket.store, "a/output", b"somebody's")
    bucket.begin_sink().commit(*part(0))
    assert bucket.ids_by_manifest() == list(range(CUT))


def test_the_output_of_another_run_in_s3_is_refused(bucket: S3Bucket) -> None:
    bucket.begin_sink().commit(*part(0))
    with pytest.raises(OutputNotOurs):
        bucket.sink().begin("run-2", "labels", SCHEMA)


def test_missing_committed_s3_object_is_named(bucket: S3Bucket) -> None:
    bucket.begin_sink().commit(*part(0))
    [name] = [name for name in bucket.names() if name.endswith(".parquet")]
    obstore.delete(bucket.store, name)
    with pytest.raises(OutputCorrupt) as raised:
        bucket.begin_sink()
    assert raised.value.path == f"s3://{bucket.name}/{name}"


def test_missing_bucket_is_refused_by_check(bucket: S3Bucket) -> None:
    sink = ParquetSink("s3://no-such-bucket-here/out", storage_options=bucket.options)
    with pytest.raises((OutputNotOurs, OutputError)):
        sink.check(SCHEMA)


def test_s3_credentials_are_in_no_object_spec_or_error(bucket: S3Bucket, server: str) -> None:
    sink = bucket.begin_sink()
    sink.commit(*part(0))
    sink.finish()
    kept = [bucket.read(name) for name in bucket.names()]
    assert not any(SECRET.encode() in data for data in kept)
    assert SECRET not in json.dumps(sink.spec())
    assert SECRET not in repr(sink)
    assert SECRET not in repr(vars(sink))
    wrong: Mapping[str, str] = {**bucket.options, "aws_endpoint": "http://127.0.0.1:9"}
    wrong = {**wrong, "aws_max_retries": "0"}
    with pytest.raises((OutputError, Invalid)) as raised:
        ParquetSink(f"s3://{bucket.name}/b", storage_options=wrong).check_vacant()
    assert SECRET not in f"{raised.value} {raised.value!r} {raised.value.__cause__}"


def test_succeeding_run_in_s3_keeps_unchanged_objects(bucket: S3Bucket) -> None:
    first = bucket.begin_sink()
    first.commit_many([part(0), part(1), part(2)])
    first.finish()
    sink = bucket.sink()
    assert sink.owner() == "run-1"
    base = Base("run-1", [Same(0, 2 * CUT, 0)])
    version, kept = sink.begin_after(base, "run-2", "labels", SCHEMA)
    assert (version, [(one.lo, one.hi) for one in kept]) == (NOTHING, [(0, 100), (100, 200)])
    before = {name: bucket.read(name) for name in bucket.names() if "part-" in name}
    new = pa.table({"id": [777], "label": ["new"]}, schema=SCHEMA)
    sink.commit_many([*kept, Part(200, 201, new)])
    assert bucket.ids_by_manifest() == list(range(300)), "the former output until the end"
    sink.finish()
    assert bucket.ids_by_manifest() == bucket.ids_by_listing() == [*range(200), 777]
    assert all(bucket.read(name) == before[name] for name in sorted(before)[:2])
    assert isinstance(kept[0], KeptPart)
    with pytest.raises(OutputTaken):
        first.finish()


def test_retry_output_is_below_the_s3_output_with_its_credentials(bucket: S3Bucket) -> None:
    record = RunRecord("run-1", "labels", sink=dict(bucket.sink().spec()))
    spec = retry_sink_spec(record, 1)
    assert spec["path"] == f"{bucket.out}/_holdfast/retry-1"
    below = open_sink(spec)
    below.begin("run-2", "labels", SCHEMA)
    below.commit(*part(0))
    assert below.parts("run-2")[0].startswith(f"{bucket.out}/_holdfast/retry-1/part-")


def test_executors_get_only_the_storage_options_of_their_urls() -> None:
    keep_options("s3://own/a", {"aws_region": "one"})
    keep_options("s3://own/other", {"aws_region": "two"})
    keep_options("s3://own/a/b", {"aws_region": "three"})
    found = options_for("s3://own/a/b", None, "")
    assert found == {"s3://own/a": {"aws_region": "one"}, "s3://own/a/b": {"aws_region": "three"}}
    assert options_for("s3://own/ab") == {}
