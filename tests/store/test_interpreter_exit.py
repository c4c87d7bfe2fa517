"""Interpreter exit without close(): the store still answers and its writer exits, on every Python version."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.config import WriterLimits
from tests.process.watch import assert_no_process_left

LIMITS = WriterLimits(idle_exit_s=0.2)


@pytest.mark.timeout(60)
def test_submit_returns_a_result_when_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.12.1 cannot start threads during interpreter shutdown, and exit hooks run later than that."""
    home = tmp_path / "store"

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with stores.open(home, limits=LIMITS) as store:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        for n in range(3):
            store.submit(lambda txn, n=n: txn.put(("k", n), b"v")).result(30)
        monkeypatch.undo()
        assert store.read(lambda txn: [txn.get(("k", n)) for n in range(3)]) == [b"v"] * 3
        store.submit(lambda txn: txn.put(("k", 3), b"v")).result(30)
    assert_no_process_left(home, LIMITS.idle_exit_s)
