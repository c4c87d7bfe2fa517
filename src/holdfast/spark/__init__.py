"""Stage: expensive work per record on Spark, called once and paid once.

    from holdfast.spark import Stage, Skip, session

    stage = Stage("labels", classify, key="doc_id", schema="label string", store="./data")
    run = stage.run(spark.read.parquet("docs/"), output="labels/")      # resumes by name

Exported names are loaded on first use, because a child process needs few of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Imported eagerly: the function replaces its module of the same name, which is light.
from holdfast.spark.session import session

if TYPE_CHECKING:
    from holdfast.spark.errors import RowsFailed, RunStopped
    from holdfast.spark.exception_rules import transient
    from holdfast.spark.row_results import Call, Fail, Retry, Skip
    from holdfast.spark.run import Run
    from holdfast.spark.stage import Stage
    from holdfast.spark.stop import Stop
    from holdfast.spark.tls import Tls

_MODULE_OF = {
    "Call": "row_results",
    "Fail": "row_results",
    "Retry": "row_results",
    "RowsFailed": "errors",
    "Run": "run",
    "RunStopped": "errors",
    "Skip": "row_results",
    "Stage": "stage",
    "Stop": "stop",
    "Tls": "tls",
    "transient": "exception_rules",
}

__all__ = [
    "Call",
    "Fail",
    "Retry",
    "RowsFailed",
    "Run",
    "RunStopped",
    "Skip",
    "Stage",
    "Stop",
    "Tls",
    "session",
    "transient",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    exported = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = exported
    return exported
