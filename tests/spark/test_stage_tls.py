"""A stage whose ledger service uses TLS."""

from pathlib import Path

from pyspark.sql import SparkSession

from tests.ledger_service.test_service_tls import TlsFiles
from tests.spark.test_stage import StageRig, double, tuples


def test_a_stage_runs_with_tls(spark: SparkSession, tmp_path: Path) -> None:
    files = TlsFiles.issue(tmp_path / "files", "127.0.0.1")
    place = StageRig(tmp_path)
    stage = place.stage(double, tls=files.tls, bind="127.0.0.1")
    with stage.run(spark.range(20), output=place.output) as run:
        assert tuples(run.output()) == [(n, 2 * n) for n in range(20)]
