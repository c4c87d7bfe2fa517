"""A driver program with a stage. It takes the URL of the store. A second argument starts a new run.

Its rows fail while the file `scale-is-broken` exists, and do not return while `scale-is-slow` exists. Each call touches the
file `called`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from holdfast.spark import Stage, session
from holdfast.spark.stop import Stop

BROKEN, SLOW, CALLED = (
    Path.cwd() / name for name in ("scale-is-broken", "scale-is-slow", "called")
)


def label(row: Any, call: Any) -> dict[str, str]:
    CALLED.touch()
    while SLOW.exists():
        time.sleep(0.05)
    if BROKEN.exists():
        raise ValueError("the scale does not answer")
    return {"label": f"{row.n}"}


if __name__ == "__main__":
    stage = Stage(
        "labels", label, key="n", schema="label string", stop_after=Stop(failures=3), flush_rows=1
    )
    _, store, *fresh = sys.argv
    rows = session("local[1]").range(40).toDF("n")
    output = "labels-2" if fresh else "labels"
    run = stage.run(rows, output=output, store=store, fresh=bool(fresh))
    print(run.counts())
