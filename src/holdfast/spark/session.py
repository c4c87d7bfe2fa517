"""A Spark session for any machine: `session()` finds or provides Java and configures the rest.

    spark = session()                            # this machine, all of its cores
    spark = session("spark://10.0.0.5:7077")     # a cluster
    spark = session(connect="sc://10.0.0.5")     # a Spark Connect server; needs no Java here

- An active session is returned unchanged. `config` is not applied to it, and a log line reports
  this.
- A local master is reachable from this machine only: driver, block manager and web UI listen on the
  loopback address.
- `config` overrides every default below.
- Spark reads JAVA_HOME, PYSPARK_PYTHON and SPARK_LOCAL_IP only from the environment. They are set
  in this process and stay set, unless they are set already.

PYSPARK_PYTHON is set because Spark's workers would otherwise use the first `python3` on PATH, which
may lack this package.

    Invalid                (errors) fix the input
    ├── PySparkMissing     PySpark, or the requested part of it, is not installed
    └── SessionActive      a session of the other kind is active in this process
    Busy                   (errors) retry later
    └── ServerUnreachable  no Connect server is reachable; PySpark would retry for minutes
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from holdfast.errors import Busy, Invalid

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOPBACK = "127.0.0.1"
LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")
# Bounds of the local driver's memory, which is a quarter of the machine's.
DRIVER_MIB_MIN = 1024
DRIVER_MIB_MAX = 8192
ARROW_BATCH_ROWS = 65_536
ARROW_BATCH_BYTES = 64 * 1024 * 1024
# Sessions on one machine start at port 4040 and take the next free one. Spark's default limit is 16
# tries.
PORT_TRIES = 200
CONNECT_PORT = 15002
CONNECT_TIMEOUT_S = 15.0

log = logging.getLogger("holdfast.spark")


class PySparkMissing(Invalid):
    code = "pyspark_missing"
    hint = "pip install 'holdfast[spark]'"


class SessionActive(Invalid):
    code = "session_active"
    hint = "a process can have classic sessions or Connect sessions, not both; stop the active session first"


class ServerUnreachable(Busy):
    code = "connect_unreachable"
    hint = "start the Spark Connect server, or correct the address: sc://HOST:PORT"


def session(
    master: str = "local[*]",
    app: str = "holdfast",
    config: Mapping[str, object] | None = None,
    connect: str | None = None,
) -> SparkSession:
    """Return the active Spark session, or start one: classic on `master`, or on the server
    `connect`.
    """
    requested = {name: _setting_text(value) for name, value in (config or {}).items()}
    remote = connect or os.environ.get("SPARK_REMOTE") or ""
    active = _active_session(remote)
    if active is not None:
        if requested:
            log.warning("a Spark session is active already; not applied: %s", sorted(requested))
        return active
    if remote:
        return _start_connect(remote, app, requested)
    _set_environment(os.environ, master)
    return _start_classic(master, app, {**defaults(master), **requested})


def defaults(master: str) -> dict[str, str]:
    """Return the default configuration of a classic session on `master`."""
    shared = {
        "spark.driver.extraJavaOptions": f'"-Dlog4j2.configurationFile={LOG_SETTINGS}"',
        "spark.port.maxRetries": str(PORT_TRIES),
        "spark.python.worker.reuse": "true",
        "spark.sql.execution.arrow.maxBytesPerBatch": str(ARROW_BATCH_BYTES),
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_BATCH_ROWS),
        # Pass query filters to Python data sources.
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.ui.showConsoleProgress": "false",  # a stage has its own display
    }
    if not _is_local(master):
        return shared
    return shared | {
        "spark.driver.bindAddress": LOOPBACK,
        "spark.driver.host": LOOPBACK,
        "spark.driver.memory": f"{_driver_mib()}m",
    }


# --- active session -----------------------------------------------------------------------------


def _active_session(remote: str) -> SparkSession | None:
    """Return the active session of the requested kind, or None."""
    try:
        from pyspark.errors import PySparkRuntimeError
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise PySparkMissing(module=error.name) from error
    try:
        active = SparkSession.active()
    except PySparkRuntimeError:
        return None
    kind = "connect" if type(active).__module__.startswith("pyspark.sql.connect.") else "classic"
    if remote and kind == "classic":
        raise SessionActive(active=kind, wanted=remote)
    return active


# --- start --------------------------------------------------------------------------------------


def _start_connect(remote: str, app: str, requested: Mapping[str, str]) -> SparkSession:
    try:
        import pyspark.sql.connect.session  # noqa: F401  # imports everything that Connect needs
    except ImportError as error:
        raise PySparkMissing(module=error.name or "pyspark[connect]") from error
    from pyspark.sql import SparkSession

    if _is_local(remote):
        _set_environment(os.environ, remote)  # the server runs in this process
        requested = {**defaults(remote), **requested}
    else:
        _require_reachable(remote)
    return _build(SparkSession.builder.remote(remote).appName(app), requested)


def _require_reachable(remote: str) -> None:
    from urllib.request import getproxies  # slow to import, rarely needed

    url = urlsplit(remote)
    # PySpark explains other addresses. Behind a proxy the address cannot be tested from here.
    if url.scheme != "sc" or not url.hostname or getproxies():
        return
    address = (url.hostname, url.port or CONNECT_PORT)
    try:
        socket.create_connection(address, CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ServerUnreachable(url=f"sc://{url.netloc}", why=str(error)) from error


def _start_classic(master: str, app: str, config: Mapping[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    return _build(SparkSession.builder.master(master).appName(app), config)


def _build(builder: Any, config: Mapping[str, str]) -> SparkSession:
    for name, value in config.items():
        builder = builder.config(name, value)
    built: SparkSession = builder.getOrCreate()
    return built


def _set_environment(environ: Any, master: str) -> None:
    """Set the environment variables that Spark reads."""
    from holdfast.spark.java import find_java

    java = find_java(environ)
    if java.home is not None:
        environ["JAVA_HOME"] = java.home
    environ.setdefault("PYSPARK_PYTHON", sys.executable)
    environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if _is_local(master):
        environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)  # the web UI listens on this address


def _setting_text(value: object) -> str:
    """Format a setting for Spark: `True` is `true`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_local(master: str) -> bool:
    return master.startswith("local")


def _driver_mib() -> int:
    mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (1 << 20)
    # Respect a container's memory limit. Without a limit the file is missing or contains "max".
    with contextlib.suppress(OSError, ValueError):
        mib = min(mib, int(Path("/sys/fs/cgroup/memory.max").read_text()) >> 20)
    return max(DRIVER_MIB_MIN, min(DRIVER_MIB_MAX, mib // 4))
