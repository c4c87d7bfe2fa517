"""Real Spark for tests, from the PySpark wheel alone: a standalone cluster, and a Connect server.

    with cluster(tmp_path) as spark_cluster:
        spark = session(spark_cluster.url, config=spark_cluster.config)
        [first, second] = spark_cluster.executors()
        os.kill(first.pid, signal.SIGKILL)

- All of it listens on the loopback address, on ports that the kernel chose; or, with `on=`, the Master
  on the first of these hosts and a Worker on each, on the addresses of those (see `tests.spark.hosts`).
- Nothing polls for readiness: the log of a daemon is its stdout, and `Proc.expect` waits for the line
  that tells it. A failure shows the last lines of that log.
- A daemon and all below it end with the `with` block. If the test run itself is killed, the kernel
  kills the daemons, and an executor ends when its Worker is gone.
- `pythons(pid)` is what a Spark JVM runs: daemons, the workers they fork, and the children of those.
"""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyspark

from holdfast.spark.java import find
from tests.processes import ROOT, Proc
from tests.spark.hosts import ATTACHED, PYTHON, WORK, Host

LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 60.0
DAEMON_MEMORY = "256m"
DRIVER_MEMORY = "1g"
# Short-lived JVMs: compile little, collect with one thread.
JVM_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

WHEEL = Path(pyspark.__file__).parent
EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
CHILD = "holdfast.spark.child"
SERVICE = "holdfast.spark.service"
# In the environment of a Worker and of its executors: which one it is, from 0.
NODE = "HOLDFAST_NODE"


# --- a standalone cluster -----------------------------------------------------------------------


@dataclass
class Cluster:
    url: str  # spark://127.0.0.1:...
    master: Proc
    workers: list[Proc] = field(default_factory=list)
    config: dict[str, str] = field(default_factory=dict)  # for a session that uses all of it
    start_worker: Callable[[int], Proc] | None = None

    def replace_worker(self, dead: Proc) -> None:
        """A new one, registered, in the place of one that was killed."""
        assert self.start_worker
        number = self.workers.index(dead)
        self.workers[number] = self.start_worker(number)
        self.workers[number].expect("Successfully registered with master", START_TIMEOUT_S)

    def executors(self, app_id: str | None = None) -> list["Executor"]:
        """The executors that live now, of all Workers; by executor id."""
        table = _processes()
        found = [
            Executor.of(pid, table)
            for worker in self.workers
            for pid in _below(worker.pid, table)
            if EXECUTOR in table[pid].args
        ]
        found = [executor for executor in found if app_id in (None, executor.app_id)]
        return sorted(found, key=lambda executor: executor.executor_id)


@dataclass(frozen=True)
class Pythons:
    """The Python processes below a Spark JVM."""

    daemons: tuple[int, ...]  # pyspark.daemon
    workers: tuple[int, ...]  # what a daemon forked
    children: tuple[int, ...]  # what runs a stage's function for a worker


@dataclass(frozen=True)
class Executor:
    pid: int
    worker_pid: int
    app_id: str
    executor_id: int
    pythons: Pythons

    @classmethod
    def of(cls, pid: int, table: Mapping[int, "_Process"]) -> "Executor":
        args = table[pid].args
        app_id = args[args.index("--app-id") + 1]
        executor_id = int(args[args.index("--executor-id") + 1])
        return cls(pid, table[pid].parent, app_id, executor_id, _pythons(pid, table))


@contextlib.contextmanager
def cluster(
    directory: Path,
    *,
    workers: int = 2,
    cores: int = 1,
    memory_mib: int = 1024,
    env: Mapping[str, str] | None = None,
    on: Sequence[Host] = (),
) -> Iterator[Cluster]:
    """A Master and its Workers, all registered; their files go below `directory`, or on their hosts."""
    workers = len(on) or workers
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(
            _daemon(
                "spark-class",
                "org.apache.spark.deploy.master.Master",
                *("--host", on[0].address if on else LOOPBACK, "--port", "0", "--webui-port", "0"),
                directory=directory / "master",
                env=env,
                on=on[0] if on else None,
            )
        )
        url = re.search(r"spark://\S+", master.expect("Starting Spark master at", START_TIMEOUT_S))
        assert url
        driver = on[0].address if on else LOOPBACK
        made = Cluster(url[0], master, config=_whole(workers, cores, memory_mib, driver))

        def start_worker(number: int) -> Proc:
            # Addresses of their own: Spark puts the copy of a slow task on another host only.
            host = on[number].address if on else f"127.0.0.{number + 1}"
            work = f"{WORK}/work-{number}" if on else str(directory / f"work-{number}")
            return stack.enter_context(
                _daemon(
                    "spark-class",
                    "org.apache.spark.deploy.worker.Worker",
                    *("--host", host, "--port", "0", "--webui-port", "0"),
                    *("--cores", str(cores), "--memory", f"{memory_mib}m"),
                    *("--work-dir", work),
                    made.url,
                    directory=directory / f"worker-{number}",
                    env={"SPARK_LOCAL_IP": host, **(env or {}), NODE: str(number)},
                    on=on[number] if on else None,
                )
            )

        made.start_worker = start_worker
        made.workers += map(start_worker, range(workers))
        for worker in made.workers:
            worker.expect("Successfully registered with master", START_TIMEOUT_S)
        yield made


def _whole(workers: int, cores: int, memory_mib: int, driver: str) -> dict[str, str]:
    return {
        "spark.cores.max": str(workers * cores),
        "spark.driver.bindAddress": driver,
        "spark.driver.host": driver,
        "spark.driver.memory": DRIVER_MEMORY,
        "spark.executor.cores": str(cores),
        "spark.executor.extraJavaOptions": JVM_OPTIONS,
        "spark.executor.memory": f"{memory_mib // 2}m",
        # The first job too runs on all executors.
        "spark.scheduler.maxRegisteredResourcesWaitingTime": f"{START_TIMEOUT_S:.0f}s",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.ui.enabled": "false",
    }


# --- a Connect server ---------------------------------------------------------------------------


@dataclass
class ConnectServer:
    url: str  # sc://127.0.0.1:...
    server: Proc


@contextlib.contextmanager
def connect_server(
    directory: Path,
    *,
    master: str = "local[2]",
    config: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[ConnectServer]:
    """A Spark Connect server that asks for no token; its own Spark driver runs on `master`."""
    if not list(WHEEL.glob("jars/spark-connect_*.jar")):
        raise AssertionError(
            "this PySpark has no Connect server: pip install 'pyspark[connect]>=4.1'"
        )
    settings = {
        "spark.connect.grpc.binding.address": LOOPBACK,
        "spark.connect.grpc.binding.port": "0",
        "spark.driver.bindAddress": LOOPBACK,
        "spark.driver.host": LOOPBACK,
        "spark.driver.memory": DRIVER_MEMORY,
        "spark.driver.extraJavaOptions": JVM_OPTIONS,
        "spark.ui.enabled": "false",
        **(config or {}),
    }
    with _daemon(
        "spark-submit",
        *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
        *("--master", master),
        *(word for item in settings.items() for word in ("--conf", "=".join(item))),
        "spark-internal",
        directory=directory,
        # To Spark this is a daemon as well: it takes its memory from there.
        env={"SPARK_DAEMON_MEMORY": DRIVER_MEMORY, **(env or {})},
    ) as server:
        line = server.expect("Spark Connect server started at", START_TIMEOUT_S)
        port = re.search(r":(\d+)\D*$", line)
        assert port, line
        yield ConnectServer(f"sc://{LOOPBACK}:{port[1]}", server)


# --- processes ----------------------------------------------------------------------------------


def pythons(pid: int) -> Pythons:
    """The Python processes below `pid`: an executor, a local driver, or whatever started one."""
    return _pythons(pid, _processes())


def services(pid: int) -> list[int]:
    """The ledger services below `pid`, which a driver started."""
    table = _processes()
    return [each for each in _below(pid, table) if SERVICE in table[each].args]


def service_of(pid: int, store: Path) -> int:
    """The ledger service below `pid` that has this store open. One of an earlier run may still be leaving."""
    [found] = [each for each in services(pid) if _has_open(each, str(store))]
    return found


def _has_open(pid: int, directory: str) -> bool:
    try:
        files = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return any(file.startswith(f"{directory}/") for file in files)


def _daemon(
    program: str,
    *args: str,
    directory: Path,
    env: Mapping[str, str] | None,
    on: Host | None = None,
) -> Proc:
    if on is not None:
        place = f"{WORK}/{directory.name}"
        settings = {
            "SPARK_HOME": on.spark_home,
            "SPARK_LOCAL_IP": on.address,
            "SPARK_LOCAL_DIRS": place,
            "SPARK_DAEMON_MEMORY": DAEMON_MEMORY,
            "SPARK_DAEMON_JAVA_OPTS": JVM_OPTIONS,
            "PYSPARK_PYTHON": PYTHON,
            **(env or {}),
        }
        command = [f"{on.spark_home}/bin/{program}", *args]
        return on.spawn(*command, directory=place, env=settings, ready=None)
    directory.mkdir(parents=True, exist_ok=True)
    found = find(os.environ)
    settings = {
        "SPARK_HOME": str(WHEEL),
        "SPARK_LOCAL_IP": LOOPBACK,
        "SPARK_LOCAL_DIRS": str(directory),
        "SPARK_DAEMON_MEMORY": DAEMON_MEMORY,
        "SPARK_DAEMON_JAVA_OPTS": JVM_OPTIONS,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        **({"JAVA_HOME": found.home} if found.home else {}),
        **(env or {}),
    }
    command = [sys.executable, "-c", ATTACHED, str(WHEEL / "bin" / program), *args]
    return Proc.spawn(command, ready=None, env=settings, cwd=directory)


@dataclass(frozen=True)
class _Process:
    parent: int
    args: list[str]


def _processes() -> dict[int, _Process]:
    """Every live process of this machine, read once, so that a walk sees one moment."""
    table = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()
            if stat[0] not in (b"Z", b"X"):
                args = Path(f"/proc/{entry}/cmdline").read_bytes().decode("utf-8", "replace")
                table[int(entry)] = _Process(int(stat[1]), args.split("\0"))
    return table


def _below(pid: int, table: Mapping[int, _Process]) -> list[int]:
    """The descendants of `pid`, parents before their children."""
    found = [pid]
    for parent in found:
        found += sorted(each for each, process in table.items() if process.parent == parent)
    return found[1:]


def _pythons(pid: int, table: Mapping[int, _Process]) -> Pythons:
    below = _below(pid, table)
    # A daemon's workers are its forks, and look like it.
    alike = [each for each in below if "pyspark.daemon" in table[each].args]
    daemons = [each for each in alike if table[each].parent not in alike]
    workers = [each for each in alike if each not in daemons]
    children = [each for each in below if CHILD in table[each].args]
    return Pythons(tuple(daemons), tuple(workers), tuple(children))
