"""The environment in which a Spark task starts its child process."""

from __future__ import annotations

import os
from pathlib import Path

import pyspark
import pytest

from holdfast.spark import spark_task

ARCHIVES = ["/opt/spark/python/lib/pyspark.zip", "/opt/spark/python/lib/py4j-0.10.9-src.zip"]
OTHERS = ["/work/my.zip", "/work/src"]


@pytest.fixture(autouse=True)
def _python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*ARCHIVES, *OTHERS]))


def test_child_imports_the_installed_pyspark_instead_of_the_archives_of_spark() -> None:
    assert spark_task._child_python_path().split(os.pathsep) == OTHERS


def test_child_imports_the_archives_of_spark_if_another_pyspark_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pyspark, "__version__", "3.5.9")
    assert spark_task._child_python_path().split(os.pathsep) == [*ARCHIVES, *OTHERS]


def test_child_imports_the_archives_of_spark_if_no_pyspark_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.path", ARCHIVES)
    assert spark_task._child_python_path().split(os.pathsep) == [*ARCHIVES, *OTHERS]


def test_child_imports_py4j_of_a_spark_distribution_from_its_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`bin/pyspark` of a distribution adds its directory `python`, which has no Py4J, and the archive of Py4J."""
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "version.py").write_text(f'__version__ = "{pyspark.__version__}"\n')
    monkeypatch.setattr("sys.path", [str(tmp_path), *ARCHIVES])
    assert spark_task._child_python_path().split(os.pathsep) == [*ARCHIVES, *OTHERS]
