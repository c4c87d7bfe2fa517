"""A program that ends without closing its runtime: what it holds is given back on every version of Python."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.config import WriterLimits
from tests.process.watch import assert_nobody_is_left

LIMITS = WriterLimits(linger_s=0.2)


@pytest.mark.timeout(60)
def test_a_submission_is_answered_when_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.12.1 starts no thread once the interpreter exits, and exit hooks run after that."""
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
    assert_nobody_is_left(home, LIMITS.linger_s)
