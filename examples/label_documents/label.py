"""Label every document with the model, and pay for each document once.

python documents.py
python model.py &
python label.py            # kill it at any time, and run it again
"""

import json
import os
import signal
from pathlib import Path
from urllib.request import Request, urlopen

from holdfast.spark import Skip, Stage, session

MODEL = Path("model.url").resolve()


def classify(row, call):
    if not row.text:
        return Skip("empty")
    if "%CRASH%" in row.text:
        os.kill(os.getpid(), signal.SIGKILL)  # like a bad file in a parser written in C
    body = json.dumps({"text": row.text}).encode()
    request = Request(MODEL.read_text(), body, {"Idempotency-Key": call.idempotency_key})
    with urlopen(request, timeout=10) as response:
        answer = json.load(response)
    call.cost = answer["cost"]
    return {"label": answer["label"]}


stage = Stage(
    "labels",
    classify,
    key="doc_id",
    schema="label string",
    retry_on=(OSError,),
    attempts=3,
    concurrency=8,
    flush_rows=16,
)

if __name__ == "__main__":
    spark = session()
    run = stage.run(spark.read.parquet("docs.parquet"), output="labels", store="data")
    print(run.report())
    run.output().groupBy("label").count().orderBy("label").show()
