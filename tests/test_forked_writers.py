"""A forked writer of a test has what a spawned writer has: its command line, its session, its directory, its parent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.config import WriterLimits
from holdfast.durable import queue
from holdfast.store.lmdb import writer_process
from tests import forked_writers
from tests.process.watch import OsProcess, assert_no_process_left, writer_of

LIMITS = WriterLimits(idle_exit_s=0.05, reader_check_s=0.05)


def read_proc(writer: OsProcess, name: str) -> list[bytes]:
    return Path(f"/proc/{writer.pid}/{name}").read_bytes().rstrip(b"\0").split(b"\0")


@pytest.mark.parametrize("is_forked", [True, False])
def test_writer_has_its_command_line_session_directory_and_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_forked: bool
) -> None:
    monkeypatch.setattr(forked_writers, "is_enabled", is_forked)
    monkeypatch.chdir(tmp_path)
    with stores.open(tmp_path / "store", limits=LIMITS) as store:
        store.transact(queue.put, "mail", b"x")
        writer = writer_of(tmp_path / "store")
        assert read_proc(writer, "cmdline")[3].decode() == writer_process.WRITER_CODE
        assert os.getsid(writer.pid) == writer.pid
        assert Path(f"/proc/{writer.pid}/cwd").readlink() == tmp_path
        stat = Path(f"/proc/{writer.pid}/stat").read_text().rpartition(")")[2].split()
        assert int(stat[1]) == os.getpid()
        open_files = os.listdir(f"/proc/{writer.pid}/fd")
    assert_no_process_left(tmp_path / "store", LIMITS.idle_exit_s)
    # No file of the test process or of the fork server.
    assert len(open_files) < 20


def test_killed_forked_writer_is_replaced(tmp_path: Path) -> None:
    with stores.open(tmp_path / "store", limits=LIMITS) as store:
        store.transact(queue.put, "mail", b"x")
        first = writer_of(tmp_path / "store")
        first.kill()
        store.transact(queue.put, "mail", b"y")
        assert writer_of(tmp_path / "store", other_than=first).alive
        assert store.read(queue.counts, "mail").ready == 2


def test_tests_of_the_start_of_a_writer_spawn_it() -> None:
    for name in ("process/test_cold_start.py", "store/test_writer_client.py"):
        assert forked_writers.spawns_writers(Path(name))
    assert not forked_writers.spawns_writers(Path("store/test_store_copy.py"))
