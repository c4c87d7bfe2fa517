"""Real Spark for tests, from the PySpark wheel alone: a standalone cluster and a Connect server.

    with cluster(tmp_path) as spark_cluster:
        spark = session(spark_cluster.url, config=spark_cluster.config)
        [first, second] = spark_cluster.executors()
        os.kill(first.pid, signal.SIGKILL)

- All processes listen on the loopback address, on ports that the kernel chooses. With `on=`, the Master runs on the
  first of these hosts and a Worker on each, on the addresses of the hosts (see `tests.spark.hosts`).
- Nothing polls for readiness: the log of a daemon is its stdout, and `Proc.expect` waits for the line
  that signals it. A failure shows the last lines of that log.
- A daemon and its descendants end with the `with` block. If the test run itself is killed, the kernel
  kills the daemons, and an executor ends when its Worker is gone.
- `python_processes_below(pid)` lists the Python processes of a Spark JVM: daemons, their forked workers, and the
  child processes of the workers.
"""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyspark

from holdfast.spark.java import find_java
from tests.processes import ROOT, Proc
from tests.spark.class_archive import jvm_options
from tests.spark.hosts import ATTACHED_CODE, PYTHON, WORK, NamespaceHost

LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 60.0
DAEMON_MEMORY = "256m"
DRIVER_MEMORY = "1g"

WHEEL = Path(pyspark.__file__).parent
EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
# The modules of the daemon of Python workers: of Spark, and of the tests.
DAEMONS = {"pyspark.daemon", "tests.spark.warm_daemon"}
CHILD = "holdfast.spark.child"
SERVICE = "holdfast.spark.service"
# Environment variable of a Worker and its executors: the number of the Worker, from 0.
NODE = "HOLDFAST_NODE"


# --- a standalone cluster -----------------------------------------------------------------------


@dataclass
class SparkCluster:
    url: str  # spark://127.0.0.1:...
    master: Proc
    workers: list[Proc] = field(default_factory=list)
    config: dict[str, str] = field(default_factory=dict)  # for a session that uses all of it
    start_worker: Callable[[int], Proc] | None = None

    def replace_worker(self, dead: Proc) -> None:
        """Start a new Worker in the place of a killed one and wait until it is registered."""
        assert self.start_worker
        number = self.workers.index(dead)
        self.workers[number] = self.start_worker(number)
        self.workers[number].expect("Successfully registered with master", START_TIMEOUT_S)

    def executors(self, app_id: str | None = None) -> list["Executor"]:
        """The live executors of all Workers, sorted by executor id."""
        processes = _read_processes()
        executors = [
            Executor.of(pid, processes)
            for worker in self.workers
            for pid in _descendants(worker.pid, processes)
            if EXECUTOR in processes[pid].args
        ]
        executors = [executor for executor in executors if app_id in (None, executor.app_id)]
        return sorted(executors, key=lambda executor: executor.executor_id)


@dataclass(frozen=True)
class PythonProcesses:
    """The Python processes below a Spark JVM."""

    daemons: tuple[int, ...]  # pyspark.daemon
    workers: tuple[int, ...]  # forked by a daemon
    children: tuple[int, ...]  # run the function of a stage for a worker


@dataclass(frozen=True)
class Executor:
    pid: int
    worker_pid: int
    app_id: str
    executor_id: int
    python_processes: PythonProcesses

    @classmethod
    def of(cls, pid: int, processes: Mapping[int, "_ProcessEntry"]) -> "Executor":
        args = processes[pid].args
        app_id = args[args.index("--app-id") + 1]
        executor_id = int(args[args.index("--executor-id") + 1])
        return cls(
            pid, processes[pid].parent, app_id, executor_id, _python_processes(pid, processes)
        )


@contextlib.contextmanager
def cluster(
    directory: Path,
    *,
    workers: int = 2,
    cores: int = 1,
    memory_mib: int = 1024,
    env: Mapping[str, str] | None = None,
    on: Sequence[NamespaceHost] = (),
) -> Iterator[SparkCluster]:
    """Start a Master and its Workers, and wait until they have registered.

    Their files are below `directory`. With `on`, they are below `WORK` on each host.
    """
    workers = len(on) or workers
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(
            _start_daemon(
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
        spark_cluster = SparkCluster(
            url[0], master, config=_session_config(workers, cores, memory_mib, driver)
        )

        def start_worker(number: int) -> Proc:
            # Each Worker has its own address: Spark starts the copy of a slow task only on another host.
            host = on[number].address if on else f"127.0.0.{number + 1}"
            work = f"{WORK}/work-{number}" if on else str(directory / f"work-{number}")
            return stack.enter_context(
                _start_daemon(
                    "spark-class",
                    "org.apache.spark.deploy.worker.Worker",
                    *("--host", host, "--port", "0", "--webui-port", "0"),
                    *("--cores", str(cores), "--memory", f"{memory_mib}m"),
                    *("--work-dir", work),
                    spark_cluster.url,
                    directory=directory / f"worker-{number}",
                    env={"SPARK_LOCAL_IP": host, **(env or {}), NODE: str(number)},
                    on=on[number] if on else None,
                )
            )

        spark_cluster.start_worker = start_worker
        spark_cluster.workers += map(start_worker, range(workers))
        for worker in spark_cluster.workers:
            worker.expect("Successfully registered with master", START_TIMEOUT_S)
        yield spark_cluster


def _session_config(workers: int, cores: int, memory_mib: int, driver: str) -> dict[str, str]:
    return {
        "spark.cores.max": str(workers * cores),
        "spark.driver.bindAddress": driver,
        "spark.driver.host": driver,
        "spark.driver.memory": DRIVER_MEMORY,
        "spark.executor.cores": str(cores),
        "spark.executor.extraJavaOptions": jvm_options(),
        "spark.executor.memory": f"{memory_mib // 2}m",
        # The first job waits for all executors, too.
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
    """A Spark Connect server without authentication. Its Spark driver runs on `master`."""
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
        "spark.driver.extraJavaOptions": jvm_options(),
        "spark.ui.enabled": "false",
        **(config or {}),
    }
    with _start_daemon(
        "spark-submit",
        *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
        *("--master", master),
        *(word for item in settings.items() for word in ("--conf", "=".join(item))),
        "spark-internal",
        directory=directory,
        # Spark starts the server as a daemon, so this variable sets its memory.
        env={"SPARK_DAEMON_MEMORY": DRIVER_MEMORY, **(env or {})},
    ) as server:
        line = server.expect("Spark Connect server started at", START_TIMEOUT_S)
        port = re.search(r":(\d+)\D*$", line)
        assert port, line
        yield ConnectServer(f"sc://{LOOPBACK}:{port[1]}", server)


# --- processes ----------------------------------------------------------------------------------


def python_processes_below(pid: int) -> PythonProcesses:
    """The Python processes below `pid`: an executor, a local driver, or an ancestor of one."""
    return _python_processes(pid, _read_processes())


def service_pids(pid: int) -> list[int]:
    """The ledger services that the driver `pid` started."""
    processes = _read_processes()
    return [
        child_pid
        for child_pid in _descendants(pid, processes)
        if processes[child_pid].args[1:3] == ["-m", SERVICE]
    ]


def service_pid(pid: int, store: Path) -> int:
    """The ledger service below `pid` that has this store open. The service of an earlier run may still be stopping."""
    [service] = [
        candidate for candidate in service_pids(pid) if _has_open_file_in(candidate, str(store))
    ]
    return service


def _has_open_file_in(pid: int, directory: str) -> bool:
    try:
        files = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return any(file.startswith(f"{directory}/") for file in files)


def _start_daemon(
    program: str,
    *args: str,
    directory: Path,
    env: Mapping[str, str] | None,
    on: NamespaceHost | None = None,
) -> Proc:
    if on is not None:
        work_directory = f"{WORK}/{directory.name}"
        settings = {
            "SPARK_HOME": on.spark_home,
            "SPARK_LOCAL_IP": on.address,
            "SPARK_LOCAL_DIRS": work_directory,
            "SPARK_DAEMON_MEMORY": DAEMON_MEMORY,
            "SPARK_DAEMON_JAVA_OPTS": jvm_options(),
            "PYSPARK_PYTHON": PYTHON,
            **(env or {}),
        }
        command = [f"{on.spark_home}/bin/{program}", *args]
        return on.spawn(*command, directory=work_directory, env=settings, ready=None)
    directory.mkdir(parents=True, exist_ok=True)
    java = find_java(os.environ)
    settings = {
        "SPARK_HOME": str(WHEEL),
        "SPARK_LOCAL_IP": LOOPBACK,
        "SPARK_LOCAL_DIRS": str(directory),
        "SPARK_DAEMON_MEMORY": DAEMON_MEMORY,
        "SPARK_DAEMON_JAVA_OPTS": jvm_options(),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        **({"JAVA_HOME": java.home} if java.home else {}),
        **(env or {}),
    }
    command = [sys.executable, "-c", ATTACHED_CODE, str(WHEEL / "bin" / program), *args]
    return Proc.spawn(command, ready=None, env=settings, cwd=directory)


@dataclass(frozen=True)
class _ProcessEntry:
    parent: int
    args: list[str]


def _read_processes() -> dict[int, _ProcessEntry]:
    """Every live process of this machine, read once, so that a walk sees a consistent snapshot."""
    processes = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()
            if stat[0] not in (b"Z", b"X"):
                args = Path(f"/proc/{entry}/cmdline").read_bytes().decode("utf-8", "replace")
                processes[int(entry)] = _ProcessEntry(int(stat[1]), args.split("\0"))
    return processes


def _descendants(pid: int, processes: Mapping[int, _ProcessEntry]) -> list[int]:
    """The descendants of `pid`, parents before their children."""
    pids = [pid]
    for parent in pids:
        pids += sorted(child for child, process in processes.items() if process.parent == parent)
    return pids[1:]


def _python_processes(pid: int, processes: Mapping[int, _ProcessEntry]) -> PythonProcesses:
    descendants = _descendants(pid, processes)
    # The workers of a daemon are its forks and have the same arguments.
    daemons_and_forks = [
        child for child in descendants if not DAEMONS.isdisjoint(processes[child].args)
    ]
    daemons = [
        child for child in daemons_and_forks if processes[child].parent not in daemons_and_forks
    ]
    workers = [child for child in daemons_and_forks if child not in daemons]
    children = [child for child in descendants if CHILD in processes[child].args]
    return PythonProcesses(tuple(daemons), tuple(workers), tuple(children))
