"""`locate` maps an output text to a directory or an object store, or refuses it. It creates nothing."""

from pathlib import Path

import pytest

from holdfast.spark.sinks import DeltaSink, OutputUnknown, ParquetSink, locate


@pytest.mark.parametrize(
    "text",
    [
        "labels",
        "labels/",
        "./default.labels",
        "a/default.labels",
        "labels.parquet",
        "/mnt/a b #ü?*%20",
        "with:colon/../x".replace(":", "_"),
    ],
)
def test_locate_treats_a_plain_path_as_a_directory(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate(text).local == (tmp_path / text).absolute()


@pytest.mark.parametrize("text", ["file:/mnt/x", "file:///mnt/x", "file://localhost/mnt/x"])
def test_locate_treats_a_file_url_as_a_directory(text: str) -> None:
    assert locate(text).local == Path("/mnt/x")
    assert locate(text).spark_url == "file:///mnt/x"


def test_locate_treats_any_path_object_as_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate(Path("default.labels")).local == tmp_path / "default.labels"
    assert ParquetSink(Path("a:b")).path == tmp_path / "a:b"


@pytest.mark.parametrize(
    ("text", "spark"),
    [
        ("s3://b/out/x/", "s3a://b/out/x"),
        ("s3a://b/out", "s3a://b/out"),
        ("gs://b/out", "gs://b/out"),
        ("az://c/out", "az://c/out"),
        (
            "abfss://c@account.dfs.core.windows.net/out",
            "abfss://c@account.dfs.core.windows.net/out",
        ),
    ],
)
def test_locate_maps_object_store_urls_to_spark_schemes(text: str, spark: str) -> None:
    location = locate(text)
    assert location.local is None
    assert location.url == text.rstrip("/")
    assert location.spark_url == spark


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a\0b",
        "dbfs:/x",
        "dbfs:///x",
        "hdfs://nn/x",
        "http://host/x",
        "memory://x",
        "memory:",
        "a:b",
        "default.labels",
        "main.default.labels",
        "s3:/b/x",
        "s3://",
        "s3://b",
        "s3://b/",
        "s3://b/a/../c",
        "s3://b//c",
        "s3://key:secret@b/x",
        "s3://b/x?token=1",
        "file://host/x",
    ],
)
@pytest.mark.parametrize("kind", [ParquetSink, DeltaSink])
def test_sink_refuses_any_other_output_text_and_creates_nothing(
    text: str, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputUnknown) as raised:
        kind(text)
    assert "secret" not in str(raised.value)
    assert "token" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []
