"""A driver program with a stage. Its rows fail while the file `scale-is-broken` exists. It takes the URL of the store."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from holdfast.spark import Stage, session
from holdfast.spark.stop import Stop

BROKEN = Path.cwd() / "scale-is-broken"


def label(row: Any, call: Any) -> dict[str, str]:
    if BROKEN.exists():
        raise ValueError("the scale does not answer")
    return {"label": f"{row.n}"}


if __name__ == "__main__":
    stage = Stage(
        "labels", label, key="n", schema="label string", stop_after=Stop(failures=3), flush_rows=1
    )
    run = stage.run(session("local[1]").range(40).toDF("n"), output="labels", store=sys.argv[1])
    print(run.counts())
