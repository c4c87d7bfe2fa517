"""Stage: expensive work per record on Spark, done once and paid once.

    from holdfast.spark import Stage, Skip, session

    stage = Stage("labels", classify, key="doc_id", schema="label string", store="./data")
    run = stage.run(spark.read.parquet("docs/"), output="labels/")      # resumes by name

Names are loaded when they are first asked for: a child process needs few of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# At once, for it takes the place of its module, and that module is light.
from holdfast.spark.session import session

if TYPE_CHECKING:
    from holdfast.spark.error_classes import transient
    from holdfast.spark.errors import RowsFailed, RunStopped
    from holdfast.spark.outcome import Call, Fail, Retry, Skip
    from holdfast.spark.run import Run
    from holdfast.spark.stage import Stage
    from holdfast.spark.stop import Stop
    from holdfast.spark.tls import Tls

_HOMES = {
    "Call": "outcome",
    "Fail": "outcome",
    "Retry": "outcome",
    "RowsFailed": "errors",
    "Run": "run",
    "RunStopped": "errors",
    "Skip": "outcome",
    "Stage": "stage",
    "Stop": "stop",
    "Tls": "tls",
    "transient": "error_classes",
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
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = found
    return found
