"""Processes of part 3 of the demo: a Spark driver that labels documents, and the paid model.

python -m examples.demo.labels model DIR       the model; writes its address and bill to DIR
python -m examples.demo.labels drive DIR       the driver; DIR also holds the store and output
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

NAME = "labels"
DOCUMENTS = 900
EMPTY_EVERY = 45
DEADLY = frozenset({333, 666})
KINDS = ("invoice", "letter", "report")
SECONDS_PER_CALL = 0.02
COST_PER_CALL = 0.002
CONCURRENCY = 8
FLUSH_ROWS = 16
# A short job: the JVM compiles little, and Spark interprets its queries.
JVM_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
SPARK_CONFIG = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


def text_of(n: int) -> str:
    if n % EMPTY_EVERY == 0:
        return ""
    return f"{KINDS[n % 3]} number {n}" + (" %CRASH%" if n in DEADLY else "")


class Classify:
    """The stage's function: one paid call per document with a text."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, row: Any, call: Any) -> Any:
        from holdfast.spark import Skip

        if not row.text:
            return Skip("empty")
        if "%CRASH%" in row.text:
            os.kill(
                os.getpid(), signal.SIGKILL
            )  # simulates a file that crashes a parser written in C
        body = json.dumps({"text": row.text}).encode()
        asked = Request(self.url, body, {"Idempotency-Key": call.idempotency_key})
        with urlopen(asked, timeout=10) as answered:
            answer = json.load(answered)
        call.cost = answer["cost"]
        return {"label": answer["label"]}


def drive(home: Path) -> None:
    from holdfast.spark import Stage, session

    os.environ.setdefault("SPARK_SUBMIT_OPTS", JVM_OPTIONS)
    spark = session("local[2]", config=SPARK_CONFIG)
    rows = [(f"doc-{n:04}", text_of(n)) for n in range(DOCUMENTS)]
    documents = spark.createDataFrame(rows, "doc_id string, text string")
    stage = Stage(
        NAME,
        Classify((home / "model.url").read_text()),
        key="doc_id",
        schema="label string",
        store=str(home / "ledger"),
        retry_on=(OSError,),
        concurrency=CONCURRENCY,
        flush_rows=FLUSH_ROWS,
        progress="quiet",
    )
    run = stage.run(documents, output=str(home / "labels"))
    labels = [tuple(row) for row in run.output().collect()]
    found = {
        "run_id": run.run_id,
        "counts": run.counts(),
        "labels": labels,
        "cost": run.progress().cost,
        "failed": [row.doc_id for row in run.failed().collect()],
    }
    (home / "found.json").write_text(json.dumps(found))


class ModelHandler(BaseHTTPRequestHandler):
    """Charges for every call: each line of the bill is an idempotency key."""

    bill: Path

    def do_POST(self) -> None:
        with self.bill.open("a") as bill:
            bill.write(self.headers["Idempotency-Key"] + "\n")
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(SECONDS_PER_CALL)
        label = asked["text"].split()[0]
        answer = json.dumps({"label": label, "cost": COST_PER_CALL}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


class ModelServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """Ignore a client that disconnected before the answer. The call is still charged."""


def model(home: Path) -> None:
    ModelHandler.bill = home / "bill.txt"
    ModelHandler.bill.touch()
    with ModelServer(("127.0.0.1", 0), ModelHandler) as server:
        part = home / ".model.url"
        part.write_text(f"http://127.0.0.1:{server.server_port}/")
        part.replace(home / "model.url")
        server.serve_forever()


if __name__ == "__main__":
    {"model": model, "drive": drive}[sys.argv[1]](Path(sys.argv[2]))
