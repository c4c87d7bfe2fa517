"""Parquet in an object store: one writer's manifest counts, whatever is killed or late."""

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
from holdfast.spark.again import sink_of
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
from tests.spark.test_sinks import CUT, SCHEMA, part

SECRET = "wJalrXUtnFEMI-bPxRfiCYEXAMPLEKEY"


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    made = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    made.start()
    host, port = made.get_host_and_port()
    yield f"http://{host}:{port}"
    made.stop()


class Bucket:
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

    def begun(self) -> ParquetSink:
        sink = self.sink()
        sink.begin("run-1", "labels", SCHEMA)
        return sink

    def names(self) -> list[str]:
        return sorted(one["path"] for one in obstore.list(self.store).collect())

    def read(self, path: str) -> bytes:
        return bytes(obstore.get(self.store, path).bytes())

    def listed(self) -> list[int]:
        """Ids by a plain listing of the place, as a reader without the manifest sees them."""
        found: list[int] = []
        for name in self.names():
            if name.endswith(".parquet") and "/_" not in name:
                found += pq.read_table(pa.BufferReader(self.read(name)))["id"].to_pylist()
        return found

    def rows(self) -> list[int]:
        """Ids by the manifest."""
        found: list[int] = []
        for file in read_parts(self.out).files:
            name = file.removeprefix(f"s3://{self.name}/")
            found += pq.read_table(pa.BufferReader(self.read(name)))["id"].to_pylist()
        return found


@pytest.fixture
def bucket(server: str, request: pytest.FixtureRequest) -> Bucket:
    name = "b" + sha256(request.node.name.encode()).hexdigest()[:20]
    return Bucket(server, name)


def test_an_output_in_s3_is_written_and_read_back(bucket: Bucket) -> None:
    sink = bucket.sink()
    sink.check_vacant()
    sink.check(SCHEMA)
    assert bucket.names() == []
    assert sink.begin("run-1", "labels", SCHEMA) == NOTHING
    sink.commit_many([part(0), part(1)])
    sink.commit_many([part(2, rows=0), part(3)])
    sink.finish()
    assert bucket.rows() == bucket.listed() == [*range(200), *range(300, 400)]
    assert "a/out/_SUCCESS" in bucket.names()
    manifest = read_parts(bucket.out)
    assert (manifest.version, manifest.complete, manifest.rows) == (4 * CUT - 1, True, 300)
    for file in manifest.parts:
        if file.path:
            data = bucket.read(f"a/out/{file.path}")
            assert (len(data), sha256(data).hexdigest()) == (file.bytes, file.sha256)
    assert sink.parts("run-1") == manifest.files
    # Again from its spec: nothing is left to do.
    again = open_sink(sink.spec())
    assert again.begin("run-1", "labels", SCHEMA) == 4 * CUT - 1
    assert again.commit_many([part(3)]) == 4 * CUT - 1


def test_an_output_without_rows_in_s3_has_its_columns(bucket: Bucket) -> None:
    sink = bucket.begun()
    sink.finish()
    [name] = [name for name in bucket.names() if name.endswith(".parquet")]
    assert pq.read_schema(pa.BufferReader(bucket.read(name))).names == ["id", "label"]


@pytest.mark.parametrize("step", ["part-put", "head-before", "head-put"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_kill_at_any_step_leaves_whole_commits_in_s3(
    bucket: Bucket, step: str, count: int
) -> None:
    seen = 0

    def die(name: str) -> None:
        nonlocal seen
        seen += name == step
        if seen == count:
            raise Killed

    former = bucket.sink(step=die)

    def write() -> None:
        former.begin("run-1", "labels", SCHEMA)
        former.commit_many([part(0), part(1)])
        former.commit_many([part(2), part(3)])

    with pytest.raises(Killed):
        write()
    sink = bucket.sink()
    version = sink.begin("run-1", "labels", SCHEMA)
    assert version in (NOTHING, 2 * CUT - 1, 4 * CUT - 1)
    assert bucket.rows() == list(range(version + 1))
    sink.commit_many([part(0), part(1)])
    sink.commit_many([part(2), part(3)])
    sink.finish()
    assert bucket.rows() == bucket.listed() == list(range(4 * CUT))


def test_a_writer_that_lost_the_race_for_the_manifest_is_fenced(bucket: Bucket) -> None:
    successors: list[ParquetSink] = []

    def take_over(step: str) -> None:
        if step == "part-put" and not successors:
            successors.append(bucket.begun())
            successors[0].commit(*part(0))

    former = bucket.sink(step=take_over)
    former.begin("run-1", "labels", SCHEMA)
    with pytest.raises(OutputTaken):
        former.commit(*part(0))
    with pytest.raises(OutputTaken):
        former.finish()
    successors[0].commit(*part(1))
    assert bucket.rows() == list(range(2 * CUT))


def test_of_two_writers_that_read_the_same_manifest_one_is_refused(bucket: Bucket) -> None:
    """The window between the read of the manifest and its put: only the store can close it."""
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
    assert bucket.rows() == []
    others[0].commit(*part(0))
    assert bucket.rows() == list(range(CUT))


def test_two_first_writers_do_not_both_begin(bucket: Bucket) -> None:
    def race(step: str) -> None:
        if step == "head-before":
            bucket.sink().begin("run-2", "labels", SCHEMA)

    with pytest.raises(OutputTaken):
        bucket.sink(step=race).begin("run-1", "labels", SCHEMA)
    assert bucket.sink().owner() == "run-2"


def test_foreign_objects_are_refused_and_left_alone(bucket: Bucket) -> None:
    obstore.put(bucket.store, "a/out/data.parquet", b"somebody's")
    with pytest.raises(OutputNotOurs):
        bucket.sink().check_vacant()
    with pytest.raises(OutputNotOurs):
        bucket.begun()
    assert bucket.names() == ["a/out/data.parquet"]


def test_a_name_that_only_begins_alike_is_no_obstacle(bucket: Bucket) -> None:
    obstore.put(bucket.store, "a/out2/data.parquet", b"somebody's")
    obstore.put(bucket.store, "a/output", b"somebody's")
    bucket.begun().commit(*part(0))
    assert bucket.rows() == list(range(CUT))


def test_the_output_of_another_run_in_s3_is_refused(bucket: Bucket) -> None:
    bucket.begun().commit(*part(0))
    with pytest.raises(OutputNotOurs):
        bucket.sink().begin("run-2", "labels", SCHEMA)


def test_a_committed_object_that_is_gone_is_named(bucket: Bucket) -> None:
    bucket.begun().commit(*part(0))
    [name] = [name for name in bucket.names() if name.endswith(".parquet")]
    obstore.delete(bucket.store, name)
    with pytest.raises(OutputCorrupt) as told:
        bucket.begun()
    assert told.value.path == f"s3://{bucket.name}/{name}"


def test_a_bucket_that_is_not_there_is_refused_before_any_work(bucket: Bucket) -> None:
    sink = ParquetSink("s3://no-such-bucket-here/out", storage_options=bucket.options)
    with pytest.raises((OutputNotOurs, OutputError)):
        sink.check(SCHEMA)


def test_credentials_are_in_no_object_no_spec_and_no_error(bucket: Bucket, server: str) -> None:
    sink = bucket.begun()
    sink.commit(*part(0))
    sink.finish()
    kept = [bucket.read(name) for name in bucket.names()]
    assert not any(SECRET.encode() in data for data in kept)
    assert SECRET not in json.dumps(sink.spec())
    assert SECRET not in repr(sink)
    assert SECRET not in repr(vars(sink))
    wrong: Mapping[str, str] = {**bucket.options, "aws_endpoint": "http://127.0.0.1:9"}
    wrong = {**wrong, "aws_max_retries": "0"}
    with pytest.raises((OutputError, Invalid)) as told:
        ParquetSink(f"s3://{bucket.name}/b", storage_options=wrong).check_vacant()
    assert SECRET not in f"{told.value} {told.value!r} {told.value.__cause__}"


def test_a_run_that_succeeds_another_one_in_s3_keeps_unchanged_objects(bucket: Bucket) -> None:
    first = bucket.begun()
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
    assert bucket.rows() == list(range(300)), "the former output until the end"
    sink.finish()
    assert bucket.rows() == bucket.listed() == [*range(200), 777]
    assert all(bucket.read(name) == before[name] for name in sorted(before)[:2])
    assert isinstance(kept[0], KeptPart)
    with pytest.raises(OutputTaken):
        first.finish()


def test_the_output_of_a_retry_lies_below_and_has_the_same_credentials(bucket: Bucket) -> None:
    record = RunRecord("run-1", "labels", sink=dict(bucket.sink().spec()))
    spec = sink_of(record, 1)
    assert spec["path"] == f"{bucket.out}/_holdfast/retry-1"
    below = open_sink(spec)
    below.begin("run-2", "labels", SCHEMA)
    below.commit(*part(0))
    assert below.parts("run-2")[0].startswith(f"{bucket.out}/_holdfast/retry-1/part-")


def test_executors_get_the_options_of_their_own_places() -> None:
    keep_options("s3://own/a", {"aws_region": "one"})
    keep_options("s3://own/other", {"aws_region": "two"})
    keep_options("s3://own/a/b", {"aws_region": "three"})
    found = options_for("s3://own/a/b", None, "")
    assert found == {"s3://own/a": {"aws_region": "one"}, "s3://own/a/b": {"aws_region": "three"}}
    assert options_for("s3://own/ab") == {}
