"""A real PgBouncer in front of a test server."""

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
def running_pgbouncer(url: str, *, mode: str, takes_options: bool = True) -> Iterator[str]:
    """Yield the URL of a pooler in front of the database at `url`.

    Without `takes_options` the pooler refuses our startup parameters, and so every connection.
    """
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
            # PgBouncer refuses to run as root, and needs access to the socket of the server.
            + (f"user = {sockets.owner()}\n" if os.geteuid() == 0 else "")
        )
        process = subprocess.Popen([program, "-q", str(file)], stderr=subprocess.DEVNULL)
        try:
            until(lambda: _is_listening(port), "the pooler")
            yield f"postgresql://postgres@{HOST}:{port}{parts.path}"
        finally:
            process.terminate()
            process.wait(30)


def _is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1):
        return True
    return False
