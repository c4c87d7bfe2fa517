"""Label every document by asking the model, and pay for each of them once.

python documents.py
python model.py &
python label.py            # kill it whenever you like, and run it again
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
        os.kill(os.getpid(), signal.SIGKILL)  # what a bad file does to a parser written in C
    body = json.dumps({"text": row.text}).encode()
    asked = Request(MODEL.read_text(), body, {"Idempotency-Key": call.idempotency_key})
    with urlopen(asked, timeout=10) as answered:
        answer = json.load(answered)
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
