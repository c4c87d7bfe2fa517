"""Delta and Iceberg sinks: partitions, added columns, races, and refusals before any write."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import load_catalog

from holdfast.errors import HoldfastError, Invalid
from holdfast.spark.sinks import (
    NOTHING,
    Base,
    DeltaSink,
    IcebergSink,
    OutputCorrupt,
    OutputNotOurs,
    OutputUnknown,
    Part,
    Same,
    open_sink,
)
from tests.sinks.test_sink_modes import iceberg_sink

KINDS = ["delta", "iceberg"]
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("lang", pa.string()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "Europe/Berlin")),
        ("price", pa.decimal128(9, 2)),
        ("good", pa.bool_()),
        ("small", pa.int16()),
        ("tags", pa.list_(pa.string())),
    ]
)
LANGS = [None, "en", "a/b=c% d", "ü"]


class IcebergSinkKilled(BaseException):
    """Simulates a kill of the process."""


def rows(lo: int, hi: int) -> pa.Table:
    columns: dict[str, list[Any]] = {
        "id": list(range(lo, hi)),
        "lang": [LANGS[i % 4] for i in range(lo, hi)],
        "day": [date(2024, 1, 1 + i % 2) for i in range(lo, hi)],
        "at": [datetime(2024, 2, 29, i % 2, 59, 1, 7, tzinfo=UTC) for i in range(lo, hi)],
        "price": [Decimal(i % 2) + Decimal("0.25") for i in range(lo, hi)],
        "good": [i % 3 == 0 for i in range(lo, hi)],
        "small": [i % 2 for i in range(lo, hi)],
        "tags": [["x"] * (i % 3) for i in range(lo, hi)],
    }
    return pa.table(columns, schema=SCHEMA)


def part(lo: int, hi: int) -> Part:
    return Part(lo, hi, rows(lo, hi))


def sink_at(kind: str, path: Path, **options: Any) -> Any:
    return (
        iceberg_sink(path, **options) if kind == "iceberg" else DeltaSink(path / "table", **options)
    )


def table_of(kind: str, path: Path) -> Any:
    """The table as its own library reads it, ordered by id."""
    if kind == "delta":
        found = DeltaTable(path / "table").to_pyarrow_table()
    else:
        iceberg_sink(path)
        catalog = {"type": "sql", "uri": f"sqlite:///{path}/catalog.db"}
        found = load_catalog("cat", **catalog).load_table("db.labels").scan().to_arrow()
    return found.sort_by("id")


def ids(kind: str, path: Path) -> list[int]:
    found: list[int] = table_of(kind, path)["id"].to_pylist()
    return found


def plain_rows(table: pa.Table) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = table.to_pylist()
    return found


PARTITIONS = [["lang"], ["day", "good"], ["at"], ["price", "small"]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", [*PARTITIONS, ["month(day)", "hour(at)"]], ids=str)
def test_partitioned_table_holds_the_rows_of_every_partition(
    kind: str, by: list[str], tmp_path: Path
) -> None:
    if kind == "delta" and "(" in by[0]:
        with pytest.raises(Invalid):
            sink_at(kind, tmp_path, partition_by=by).check(SCHEMA)
        return
    sink = sink_at(kind, tmp_path, partition_by=by)
    sink.check_vacant()
    sink.check(SCHEMA)
    assert sink.begin("run-1", "labels", SCHEMA) == NOTHING
    assert sink.commit_many([part(0, 10), part(10, 20)]) == 19
    assert sink.commit_many([Part(20, 25, SCHEMA.empty_table())]) == 24
    sink.finish()
    assert plain_rows(table_of(kind, tmp_path)) == plain_rows(rows(0, 20))
    again = open_sink(sink.spec())
    assert again.begin("run-1", "labels", SCHEMA) == 24
    assert len(again.parts("run-1")) > 2
    # A changed input keeps or removes a part together with all its partitions.
    after: Any = open_sink(sink.spec())
    begun = after.begin_after(Base("run-1", [Same(0, 10, 0)]), "run-2", "labels", SCHEMA)
    assert [(one.lo, one.hi) for one in begun.kept] == [(0, 10)]
    after.commit_many([*begun.kept, Part(10, 15, rows(30, 35))])
    assert ids(kind, tmp_path) == list(range(20)), "the former table until the end"
    after.finish()
    assert ids(kind, tmp_path) == [*range(10), *range(30, 35)]
    third: Any = open_sink(sink.spec())
    begun = third.begin_after(Base("run-2", [Same(0, 15, 0)]), "run-3", "labels", SCHEMA)
    assert [(one.lo, one.hi) for one in begun.kept] == [(0, 10), (10, 15)]


@pytest.mark.parametrize("kind", KINDS)
def test_partitioned_part_files_do_not_depend_on_row_groups(kind: str, tmp_path: Path) -> None:
    found = []
    for at, step in enumerate((3, 50)):
        home = tmp_path / str(at)
        home.mkdir()
        sink = sink_at(kind, home, partition_by="lang")
        sink.begin("run-1", "labels", SCHEMA)

        def groups(step: int = step) -> Any:
            return (rows(lo, min(lo + step, 50)) for lo in range(0, 50, step))

        sink.commit_many([Part(0, 50, groups)])
        files = sorted(home.rglob("part-*.parquet"))
        found.append({file.name: file.read_bytes() for file in files})
    assert found[0] == found[1]
    assert len(found[0]) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_columns_are_added_only_with_merge_schema(kind: str, tmp_path: Path) -> None:
    first = sink_at(kind, tmp_path)
    first.begin("run-1", "labels", SCHEMA)
    first.commit_many([part(0, 4)])
    first.finish()
    wider = pa.schema([field for field in SCHEMA if field.name != "tags"])
    wider = wider.append(pa.field("score", pa.float64()))
    table = rows(10, 12).drop_columns(["tags"]).append_column("score", pa.array([0.5, 1.5]))
    with pytest.raises(Invalid) as raised:
        sink_at(kind, tmp_path, append=True).check(wider)
    assert raised.value.what == "schema"
    sink = sink_at(kind, tmp_path, append=True, merge_schema=True)
    sink.check_vacant()
    sink.check(wider)
    sink.begin("run-2", "labels", wider)
    sink.commit_many([Part(0, 2, table)])
    sink.finish()
    found = plain_rows(table_of(kind, tmp_path))
    assert [(row["id"], row["score"], row["tags"]) for row in found[3:]] == [
        (3, None, []),
        (10, 0.5, None),
        (11, 1.5, None),
    ]
    other = pa.schema([("id", pa.int64()), ("lang", pa.int64())])
    with pytest.raises(Invalid) as raised:
        sink_at(kind, tmp_path, append=True, merge_schema=True).check(other)
    assert raised.value.what == "schema"


def refusals() -> list[tuple[str, dict[str, Any], pa.Schema]]:
    return [
        ("partition_by", {"partition_by": "nothing"}, SCHEMA),
        ("partition_by", {"partition_by": ["tags"]}, SCHEMA),
        ("partition_by", {"partition_by": ["bucket(4, id)"]}, SCHEMA),
        ("schema", {}, pa.schema([("id", pa.int64()), ("at", pa.timestamp("ns"))])),
        ("schema", {}, pa.schema([("id", pa.int64()), ("nothing", pa.null())])),
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("what", "options", "schema"), refusals())
def test_check_refuses_unsupported_partitions_and_types(
    kind: str, what: str, options: dict[str, Any], schema: pa.Schema, tmp_path: Path
) -> None:
    if kind == "delta" and "nothing" in schema.names:
        pytest.xfail("Delta has a type for it")
    with pytest.raises(Invalid) as raised:
        sink_at(kind, tmp_path, **options).check(schema)
    assert raised.value.what == what
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_check_refuses_another_partition_by_than_the_table(kind: str, tmp_path: Path) -> None:
    first = sink_at(kind, tmp_path, partition_by="lang")
    first.begin("run-1", "labels", SCHEMA)
    first.finish()
    with pytest.raises(Invalid) as raised:
        sink_at(kind, tmp_path, append=True, partition_by="day").check(SCHEMA)
    assert raised.value.what == "partition_by"
    # Without `partition_by`, the sink uses the partitioning of the table.
    sink = sink_at(kind, tmp_path, append=True)
    sink.check(SCHEMA)
    sink.begin("run-2", "labels", SCHEMA)
    sink.commit_many([part(0, 8)])
    assert plain_rows(table_of(kind, tmp_path)) == plain_rows(rows(0, 8))
    assert len(sink.parts("run-2")) == 4


@pytest.mark.parametrize("name", ["labels", "db.labels", "./a.b.c", "s3://b/t", "cat.db.la bels"])
def test_iceberg_sink_refuses_a_path_as_name(name: str) -> None:
    with pytest.raises(OutputUnknown):
        IcebergSink(name)


@pytest.mark.parametrize("name", ["default.labels", "dbfs:/labels"])
def test_delta_sink_refuses_a_table_name(name: str) -> None:
    with pytest.raises(OutputUnknown):
        DeltaSink(name)


def test_missing_iceberg_catalog_or_namespace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid) as raised:
        IcebergSink("unknown.db.labels").check_vacant()
    assert raised.value.what == "catalog"
    iceberg_sink(tmp_path)
    with pytest.raises(Invalid) as raised:
        IcebergSink("cat.other.labels").check_vacant()
    assert raised.value.what == "table"


# --- races and kills ----------------------------------------------------------------------------


def test_iceberg_snapshot_with_a_lost_reply_is_committed_once(tmp_path: Path) -> None:
    lost = 0

    def lose(step: str) -> None:
        nonlocal lost
        lost += step == "snapshot"
        if step == "snapshot" and lost == 2:
            raise IcebergSinkKilled

    sink = iceberg_sink(tmp_path, step=lose)
    sink.begin("run-1", "labels", SCHEMA)
    with pytest.raises(IcebergSinkKilled):
        sink.commit_many([part(0, 4)])
    assert sink.commit_many([part(0, 4)]) == 3
    assert iceberg_sink(tmp_path).begin("run-1", "labels", SCHEMA) == 3
    assert ids("iceberg", tmp_path) == [0, 1, 2, 3]


def test_two_iceberg_sinks_racing_for_a_part_commit_it_once(tmp_path: Path) -> None:
    others: list[IcebergSink] = []

    def be_slower(step: str) -> None:
        if step == "files" and armed and not others:
            others.append(iceberg_sink(tmp_path))
            others[0].begin("run-1", "labels", SCHEMA)
            others[0].commit_many([part(0, 4)])

    armed = False
    sink = iceberg_sink(tmp_path, step=be_slower)
    sink.begin("run-1", "labels", SCHEMA)
    armed = True
    assert sink.commit_many([part(0, 4), part(4, 8)]) == 7
    assert others
    assert ids("iceberg", tmp_path) == list(range(8))


def append_to_table(path: Path, table: pa.Table) -> None:
    catalog = {"type": "sql", "uri": f"sqlite:///{path}/catalog.db"}
    load_catalog("cat", **catalog).load_table("db.labels").append(table)


def in_utc(table: pa.Table) -> pa.Table:
    kind = pa.timestamp("us", "UTC")
    at = table.schema.get_field_index("at")
    return table.set_column(at, pa.field("at", kind), table["at"].cast(kind))


@pytest.mark.parametrize("mode", ["upsert", "replace"])
def test_iceberg_commit_survives_a_concurrent_append(mode: str, tmp_path: Path) -> None:
    armed = 0

    def intrude(step: str) -> None:
        nonlocal armed
        if step == "files" and armed:
            armed -= 1
            append_to_table(tmp_path, in_utc(rows(90, 91)))

    sink = iceberg_sink(tmp_path, mode=mode, step=intrude)
    sink.begin("run-1", "labels", SCHEMA)
    armed = 3
    assert sink.commit_many([part(0, 4)]) == 3
    sink.finish()
    assert ids("iceberg", tmp_path) == [0, 1, 2, 3, 90, 90, 90]
    after = iceberg_sink(tmp_path, mode=mode)
    base = Base("run-1", [Same(0, 2, 0)])
    if mode == "replace":
        with pytest.raises(OutputNotOurs):
            after.begin_after(base, "run-2", "labels", SCHEMA)
        return
    begun = after.begin_after(base, "run-2", "labels", SCHEMA)
    assert begun.kept == []
    after.commit_many([part(0, 2)])
    append_to_table(tmp_path, in_utc(rows(95, 96)))
    after.finish()
    assert ids("iceberg", tmp_path) == [0, 1, 90, 90, 90, 95], "rows of others stay"


def test_run_with_expired_snapshots_finds_its_parts_by_file_name(tmp_path: Path) -> None:
    sink = iceberg_sink(tmp_path)
    sink.begin("run-1", "labels", SCHEMA)
    sink.commit_many([part(0, 4)])
    append_to_table(tmp_path, in_utc(rows(90, 91)))
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db"}
    table = load_catalog("cat", **catalog).load_table("db.labels")
    current = table.current_snapshot()
    assert current is not None
    old = [one.snapshot_id for one in table.metadata.snapshots if one != current]
    table.maintenance.expire_snapshots().by_ids(old).commit()
    again = iceberg_sink(tmp_path)
    assert again.begin("run-1", "labels", SCHEMA) == 3
    again.commit_many([part(0, 4), part(4, 6)])
    assert ids("iceberg", tmp_path) == [*range(6), 90]


def test_foreign_iceberg_table_is_refused_without_append(tmp_path: Path) -> None:
    first = iceberg_sink(tmp_path)
    first.begin("run-1", "labels", SCHEMA)
    first.commit_many([part(0, 4)])
    first.finish()
    with pytest.raises(OutputNotOurs):
        iceberg_sink(tmp_path).check_vacant()
    with pytest.raises(OutputNotOurs):
        iceberg_sink(tmp_path).begin("run-2", "labels", SCHEMA)
    sink = iceberg_sink(tmp_path, append=True)
    assert sink.begin("run-2", "labels", SCHEMA) == NOTHING
    sink.commit_many([part(4, 6)._replace(lo=0, hi=2)])
    assert ids("iceberg", tmp_path) == list(range(6))


def test_only_one_of_two_runs_writes_an_empty_iceberg_table(tmp_path: Path) -> None:
    one, two = iceberg_sink(tmp_path), iceberg_sink(tmp_path)
    one.begin("run-1", "labels", SCHEMA)
    two.begin("run-2", "labels", SCHEMA)
    with pytest.raises(OutputNotOurs):
        one.commit_many([part(0, 4)])
    two.commit_many([part(0, 4)])
    assert ids("iceberg", tmp_path) == [0, 1, 2, 3]


@pytest.mark.parametrize("step", ["write", "rename", "files", "snapshot"])
def test_upsert_killed_at_any_step_leaves_one_complete_table(step: str, tmp_path: Path) -> None:
    def die(name: str) -> None:
        if name == step:
            raise IcebergSinkKilled

    first = iceberg_sink(tmp_path)
    first.begin("run-1", "labels", SCHEMA)
    first.commit_many([part(0, 4), part(4, 8)])
    first.finish()

    def follow(sink: IcebergSink) -> None:
        base = Base("run-1", [Same(0, 4, 0)])
        begun = sink.begin_after(base, "run-2", "labels", SCHEMA)
        if begun.version < 5:
            sink.commit_many([*begun.kept, Part(4, 6, rows(30, 32))])
        sink.finish()

    if step == "files":
        follow(iceberg_sink(tmp_path, step=die))
    else:
        with pytest.raises(IcebergSinkKilled):
            follow(iceberg_sink(tmp_path, step=die))
        assert ids("iceberg", tmp_path) in (list(range(8)), [0, 1, 2, 3, 30, 31])
        follow(iceberg_sink(tmp_path))
    assert ids("iceberg", tmp_path) == [0, 1, 2, 3, 30, 31]
    assert iceberg_sink(tmp_path).owner() == "run-2"


def test_missing_list_of_kept_files_raises_output_corrupt(tmp_path: Path) -> None:
    first = iceberg_sink(tmp_path)
    first.begin("run-1", "labels", SCHEMA)
    first.commit_many([part(0, 4)])
    first.finish()
    sink = iceberg_sink(tmp_path)
    begun = sink.begin_after(Base("run-1", [Same(0, 4, 0)]), "run-2", "labels", SCHEMA)
    sink.commit_many([*begun.kept, Part(4, 6, rows(30, 32))])
    sink.finish()
    [listed] = tmp_path.rglob("run-run-2.json")
    listed.unlink()
    with pytest.raises(OutputCorrupt):
        iceberg_sink(tmp_path).begin_after(Base("run-2", []), "run-3", "labels", SCHEMA)


def test_catalog_properties_are_in_no_spec_or_error(tmp_path: Path) -> None:
    secret = "postgresql-password-7"
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/no/{secret}/catalog.db"}
    sink = IcebergSink("hidden.db.labels", catalog=catalog)
    assert secret not in f"{sink.spec()} {sink!r} {vars(sink)}"
    with pytest.raises(HoldfastError) as raised:
        sink.check_vacant()
    assert secret not in f"{raised.value} {raised.value!r} {raised.value.__cause__}"


def test_append_adds_to_a_foreign_partitioned_delta_table(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "table"), in_utc(rows(0, 4)), partition_by=["lang"])
    sink = DeltaSink(tmp_path / "table", append=True)
    sink.check(SCHEMA)
    sink.begin("run-1", "labels", SCHEMA)
    sink.commit_many([Part(0, 4, rows(4, 8))])
    assert plain_rows(table_of("delta", tmp_path)) == plain_rows(rows(0, 8))
