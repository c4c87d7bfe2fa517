"""A driver process with one Spark session that calls functions of the tests on request.

    python -m tests.spark.host_driver MASTER '{"spark.cores.max": "2"}'
    < {"call": "tests.spark.host_jobs:places_of_tasks", "args": {"tasks": 2}}
    > answer {"value": [...]}            or            answer {"error": "output_not_shared", "text": "..."}

`HostDriver` is the client: a test starts one on a host and sends it calls.
"""

import json
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.spark.session import session
from tests.processes import Proc
from tests.spark.hosts import PYTHON, WORK, NamespaceHost

START_S = 90.0
ANSWER_S = 120.0


class DriverError(Exception):
    """The error of the driver: the code and the text of a Holdfast error, or the name of its type."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class HostDriver:
    def __init__(self, proc: Proc) -> None:
        self.proc = proc

    def call(self, function: str, **args: Any) -> Any:
        self.start_call(function, **args)
        return self.wait_for_answer()

    def start_call(self, function: str, **args: Any) -> None:
        self.proc.send(json.dumps({"call": f"tests.spark.host_jobs:{function}", "args": args}))

    def wait_for_answer(self) -> Any:
        line = self.proc.expect("answer {", ANSWER_S)
        reply = json.loads(line.partition(" ")[2])
        if "error" in reply:
            raise DriverError(reply["error"], reply["text"])
        return reply["value"]


@contextmanager
def driver_on(
    host: NamespaceHost,
    master: str,
    config: Mapping[str, str],
    env: Mapping[str, str] | None = None,
) -> Iterator[HostDriver]:
    """Start a driver on this host with a session on `master`."""
    own = {"spark.driver.host": host.address, "spark.driver.bindAddress": host.address}
    settings = {"PYSPARK_PYTHON": PYTHON, "SPARK_LOCAL_IP": host.address, **(env or {})}
    command = [PYTHON, "-m", __name__, master, json.dumps({**config, **own})]
    with host.spawn(*command, directory=f"{WORK}/driver", env=settings, timeout_s=START_S) as proc:
        yield HostDriver(proc)


def main() -> None:
    master, config = sys.argv[1], json.loads(sys.argv[2])
    spark = session(master, app="tests", config=config)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        module, _, name = request["call"].partition(":")
        try:
            function = getattr(import_module(module), name)
            reply = {"value": function(spark, **request["args"])}
        except HoldfastError as error:
            traceback.print_exc()
            reply = {"error": error.code, "text": str(error)}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": type(error).__name__, "text": str(error)}
        print(f"answer {json.dumps(reply)}", flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
