"""A Spark session that starts on any machine: `session()` finds or brings Java and sets the rest.

    spark = session()                            # this machine, all of its cores
    spark = session("spark://10.0.0.5:7077")     # a cluster
    spark = session(connect="sc://10.0.0.5")     # a Spark Connect server; needs no Java here

- A session that is already active is returned as it is. Its settings are its owner's: what `config`
  asks for is not applied to it, and a log line says so.
- A local master is reached from this machine alone: driver, block manager and web UI listen on the
  loopback address.
- What `config` says wins over every default below.
- Spark reads JAVA_HOME, PYSPARK_PYTHON and SPARK_LOCAL_IP from the environment and offers no other
  way, so they are set in this process, and stay set, unless somebody has set them already.

Why PYSPARK_PYTHON: left alone, Spark's workers are whatever `python3` PATH holds, which need not be
the Python that has this package.

    Invalid                (errors) fix the input
    ├── PySparkMissing     PySpark, or the part of it that is asked for, is not installed
    └── SessionActive      a session of the other kind is active in this process
    Busy                   (errors) retry later
    └── ServerUnreachable  no Connect server answers there; PySpark would try for minutes
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
# Of the memory there is, the driver of a local session takes a quarter, within these bounds.
DRIVER_MIB_MIN = 1024
DRIVER_MIB_MAX = 8192
ARROW_BATCH_ROWS = 65_536
ARROW_BATCH_BYTES = 64 * 1024 * 1024
# Every session on a machine wants port 4040 and takes the next free one; Spark gives up after 16.
PORT_TRIES = 200
CONNECT_PORT = 15002
CONNECT_TIMEOUT_S = 15.0

log = logging.getLogger("holdfast.spark")


class PySparkMissing(Invalid):
    code = "pyspark_missing"
    hint = "pip install 'holdfast[spark]'"


class SessionActive(Invalid):
    code = "session_active"
    hint = "a process has classic sessions or Connect sessions; stop the active one first"


class ServerUnreachable(Busy):
    code = "connect_unreachable"
    hint = "start the Spark Connect server, or correct the address: sc://HOST:PORT"


def session(
    master: str = "local[*]",
    app: str = "holdfast",
    config: Mapping[str, object] | None = None,
    connect: str | None = None,
) -> SparkSession:
    """The active Spark session, or a new one: classic on `master`, or on the server `connect`."""
    asked = {name: _told(value) for name, value in (config or {}).items()}
    remote = connect or os.environ.get("SPARK_REMOTE") or ""
    active = _active(remote)
    if active is not None:
        if asked:
            log.warning("a Spark session is active already; not applied: %s", sorted(asked))
        return active
    if remote:
        return _connected(remote, app, asked)
    _prepare(os.environ, master)
    return _started(master, app, {**defaults(master), **asked})


def defaults(master: str) -> dict[str, str]:
    """What a classic session on `master` is configured with unless the caller says otherwise."""
    shared = {
        "spark.driver.extraJavaOptions": f'"-Dlog4j2.configurationFile={LOG_SETTINGS}"',
        "spark.port.maxRetries": str(PORT_TRIES),
        "spark.python.worker.reuse": "true",
        "spark.sql.execution.arrow.maxBytesPerBatch": str(ARROW_BATCH_BYTES),
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_BATCH_ROWS),
        # Data sources written in Python get the filters of a query.
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.ui.showConsoleProgress": "false",  # a stage draws its own
    }
    if not _is_local(master):
        return shared
    return shared | {
        "spark.driver.bindAddress": LOOPBACK,
        "spark.driver.host": LOOPBACK,
        "spark.driver.memory": f"{_driver_mib()}m",
    }


# --- what is there already ----------------------------------------------------------------------


def _active(remote: str) -> SparkSession | None:
    """The session to use instead of a new one, if there is one of the kind that is asked for."""
    try:
        from pyspark.errors import PySparkRuntimeError
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise PySparkMissing(module=error.name) from error
    try:
        found = SparkSession.active()
    except PySparkRuntimeError:
        return None
    kind = "connect" if type(found).__module__.startswith("pyspark.sql.connect.") else "classic"
    if remote and kind == "classic":
        raise SessionActive(active=kind, wanted=remote)
    return found


# --- starting one -------------------------------------------------------------------------------


def _connected(remote: str, app: str, asked: Mapping[str, str]) -> SparkSession:
    try:
        import pyspark.sql.connect.session  # noqa: F401  # it imports all that Connect needs
    except ImportError as error:
        raise PySparkMissing(module=error.name or "pyspark[connect]") from error
    from pyspark.sql import SparkSession

    if _is_local(remote):
        _prepare(os.environ, remote)  # the server is started in this process
        asked = {**defaults(remote), **asked}
    else:
        _require_listener(remote)
    return _built(SparkSession.builder.remote(remote).appName(app), asked)


def _require_listener(remote: str) -> None:
    from urllib.request import getproxies  # heavy, and rarely needed

    url = urlsplit(remote)
    # What is no such address PySpark explains; behind a proxy it cannot be tried from here.
    if url.scheme != "sc" or not url.hostname or getproxies():
        return
    address = (url.hostname, url.port or CONNECT_PORT)
    try:
        socket.create_connection(address, CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ServerUnreachable(url=f"sc://{url.netloc}", why=str(error)) from error


def _started(master: str, app: str, config: Mapping[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    return _built(SparkSession.builder.master(master).appName(app), config)


def _built(builder: Any, config: Mapping[str, str]) -> SparkSession:
    for name, value in config.items():
        builder = builder.config(name, value)
    made: SparkSession = builder.getOrCreate()
    return made


def _prepare(environ: Any, master: str) -> None:
    """Put into the environment what Spark reads from there."""
    from holdfast.spark.java import find

    found = find(environ)
    if found.home is not None:
        environ["JAVA_HOME"] = found.home
    environ.setdefault("PYSPARK_PYTHON", sys.executable)
    environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if _is_local(master):
        environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)  # the web UI listens where this says


def _told(value: object) -> str:
    """A setting as Spark spells it: `True` is `true`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_local(master: str) -> bool:
    return master.startswith("local")


def _driver_mib() -> int:
    mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (1 << 20)
    # A container may use less than the machine has. No limit is the word "max", or no such file.
    with contextlib.suppress(OSError, ValueError):
        mib = min(mib, int(Path("/sys/fs/cgroup/memory.max").read_text()) >> 20)
    return max(DRIVER_MIB_MIN, min(DRIVER_MIB_MAX, mib // 4))
