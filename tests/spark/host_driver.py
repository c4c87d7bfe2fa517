"""A driver process with one Spark session, which calls functions of the tests on demand.

    python -m tests.spark.host_driver MASTER '{"spark.cores.max": "2"}'
    < {"call": "tests.spark.host_jobs:hosts_of_tasks", "args": {"tasks": 2}}
    > answer {"value": [...]}            or            answer {"error": "output_not_shared", "text": "..."}

`Driver` is the other end of it: a test starts one on a host and asks it.
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
from tests.spark.hosts import PYTHON, WORK, Host

START_S = 90.0
ANSWER_S = 120.0


class Refused(Exception):
    """What the driver raised: the code and the text of a Holdfast error, or its type's name."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class Driver:
    def __init__(self, proc: Proc) -> None:
        self.proc = proc

    def call(self, function: str, **args: Any) -> Any:
        self.begin(function, **args)
        return self.answer()

    def begin(self, function: str, **args: Any) -> None:
        self.proc.send(json.dumps({"call": f"tests.spark.host_jobs:{function}", "args": args}))

    def answer(self) -> Any:
        line = self.proc.expect("answer {", ANSWER_S)
        found = json.loads(line.partition(" ")[2])
        if "error" in found:
            raise Refused(found["error"], found["text"])
        return found["value"]


@contextmanager
def driver_on(
    host: Host, master: str, config: Mapping[str, str], env: Mapping[str, str] | None = None
) -> Iterator[Driver]:
    """A driver on this host, with a session on `master`."""
    own = {"spark.driver.host": host.address, "spark.driver.bindAddress": host.address}
    settings = {"PYSPARK_PYTHON": PYTHON, "SPARK_LOCAL_IP": host.address, **(env or {})}
    command = [PYTHON, "-m", __name__, master, json.dumps({**config, **own})]
    with host.spawn(*command, directory=f"{WORK}/driver", env=settings, timeout_s=START_S) as proc:
        yield Driver(proc)


def main() -> None:
    master, config = sys.argv[1], json.loads(sys.argv[2])
    spark = session(master, app="tests", config=config)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        module, _, name = asked["call"].partition(":")
        try:
            function = getattr(import_module(module), name)
            found = {"value": function(spark, **asked["args"])}
        except HoldfastError as error:
            traceback.print_exc()
            found = {"error": error.code, "text": str(error)}
        except Exception as error:
            traceback.print_exc()
            found = {"error": type(error).__name__, "text": str(error)}
        print(f"answer {json.dumps(found)}", flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
