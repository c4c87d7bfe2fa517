"""The place that an output names: a directory, an object store, or a refusal; nothing is made."""

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
def test_a_plain_path_is_a_directory(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate(text).local == (tmp_path / text).absolute()


@pytest.mark.parametrize("text", ["file:/mnt/x", "file:///mnt/x", "file://localhost/mnt/x"])
def test_a_file_url_is_a_directory(text: str) -> None:
    assert locate(text).local == Path("/mnt/x")
    assert locate(text).spark_url == "file:///mnt/x"


def test_a_path_object_is_a_directory_whatever_its_letters_are(
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
def test_an_object_store_is_known_by_its_scheme_and_spark_by_its_own(text: str, spark: str) -> None:
    place = locate(text)
    assert place.local is None
    assert place.url == text.rstrip("/")
    assert place.spark_url == spark


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
def test_every_other_text_is_refused_and_nothing_is_made(
    text: str, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputUnknown) as told:
        kind(text)
    assert "secret" not in str(told.value)
    assert "token" not in str(told.value)
    assert list(tmp_path.iterdir()) == []
