"""A driver of the stage of `test_changed_input`, in a process that a test can kill.

Each line of standard input is a job as JSON. When the job is done, the driver prints one line of standard output
with the rows of the output in the order in which they were read.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from holdfast.spark import Stage
from holdfast.spark.session import session
from holdfast.spark.sinks import ParquetSink
from tests.spark.conftest import LOCAL
from tests.spark.row_functions import LabelOverHttp
from tests.spark.test_changed_input import frame, output_rows


def main() -> None:
    spark = session("local[2]", app="growing", config=LOCAL)
    print("ready", flush=True)
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        stage = Stage(
            "grow", LabelOverHttp(job["url"]), key="id", schema="label string", store=job["store"], tasks=2,
            # A row that was begun when its driver was killed has used an attempt.
            concurrency=4, flush_rows=8, attempts=3, file_rows=16, progress="quiet", lease_s=300,
        )  # fmt: skip
        input_rows = {int(key): text for key, text in job["world"].items()}
        sink = ParquetSink(job["out"], grace_s=0)
        with stage.run(frame(spark, input_rows), output=sink, changed="extend") as run:
            print("done " + json.dumps(output_rows(run.output())), flush=True)


if __name__ == "__main__":
    main()
