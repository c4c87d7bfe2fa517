"""A real pooler, PgBouncer, in front of a test's server."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tests.pgcluster import free_port
from tests.process.watch import until

HOST = "127.0.0.1"


@contextlib.contextmanager
def pooled(url: str, *, mode: str, takes_options: bool = True) -> Iterator[str]:
    """The URL of a pooler in front of the database at `url`. One that takes no options of ours refuses
    every connection at the door."""
    program = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
    assert os.access(program, os.X_OK), "pgbouncer is missing: apt-get install -y pgbouncer"
    parts = urlsplit(url)
    sockets = Path(parse_qs(parts.query)["host"][0])
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="hf-pool-") as home:
        os.chmod(home, 0o777)
        file = Path(home) / "pgbouncer.ini"
        file.write_text(
            f"[databases]\n* = host={sockets} user=postgres\n"
            f"[pgbouncer]\nlisten_addr = {HOST}\nlisten_port = {port}\nunix_socket_dir =\n"
            f"auth_type = any\npool_mode = {mode}\nlogfile = {home}/log\npidfile = {home}/pid\n"
            + ("ignore_startup_parameters = extra_float_digits,options\n" if takes_options else "")
            # It refuses to run as root, and has to get at the server's socket.
            + (f"user = {sockets.owner()}\n" if os.geteuid() == 0 else "")
        )
        process = subprocess.Popen([program, "-q", str(file)], stderr=subprocess.DEVNULL)
        try:
            until(lambda: _listens(port), "the pooler")
            yield f"postgresql://postgres@{HOST}:{port}{parts.path}"
        finally:
            process.terminate()
            process.wait(30)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1):
        return True
    return False
