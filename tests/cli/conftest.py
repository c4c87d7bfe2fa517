"""Fixtures of the CLI tests: sample stores, and a function that runs a command in this process."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast import config
from holdfast import store as stores
from holdfast.cli import main, restore, selection
from holdfast.clock import S, SystemClock
from holdfast.durable import queue
from holdfast.ops import rebuild, store_copy
from holdfast.store.api import Store
from holdfast.store.lmdb import backup
from tests.ops.account_rig import AccountRig
from tests.ops.app import QuotedDeposit

TTL_NS = 60 * S


@dataclass(frozen=True)
class CommandResult:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The error line on stderr, without its prefix."""
        [line] = self.err.splitlines()
        assert line.startswith("holdfast: ")
        return line.removeprefix("holdfast: ")


RunCommand = Callable[..., CommandResult]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunCommand:
    monkeypatch.delenv("HOLDFAST_STORE", raising=False)

    def run(*argv: object, store: Path | None = None) -> CommandResult:
        capsys.readouterr()
        store_option = [] if store is None else ["--store", store]
        code = main([str(word) for word in [*argv, *store_option]])
        captured = capsys.readouterr()
        return CommandResult(code, captured.out, captured.err)

    return run


def replace_rate_limit_sleep(
    monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], None]
) -> None:
    """Give the rate limit of a command a clock with another sleep. Other threads keep the system clock."""

    class RateLimitClock(SystemClock):
        def sleep(self, seconds: float) -> None:
            sleep(seconds)

    monkeypatch.setattr(selection, "SYSTEM", RateLimitClock())


@pytest.fixture
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer exits soon after its last client. A command waits for its lock as long as a busy machine needs."""
    monkeypatch.setattr(config, "WRITER_IDLE_EXIT_S", 0.05)
    monkeypatch.setattr(config, "READER_CHECK_S", 0.05)
    _set_lock_waits(monkeypatch, 20.0)


@pytest.fixture
def short_lock_waits(short_linger: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command waits only a moment for the lock of a store that the test keeps open."""
    _set_lock_waits(monkeypatch, 0.1)
    monkeypatch.setattr(backup, "WRITER_EXIT_WAIT_S", 0.1)


def _set_lock_waits(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    for module in (rebuild, store_copy, restore):
        monkeypatch.setattr(module, "GRACE_S", seconds)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with stores.open(path) as opened:
        yield opened


@pytest.fixture
def letters(store: Store) -> list[int]:
    """The seqs of three dead letters of the queue `mail`, which also has a ready item."""
    store.transact(queue.put_many, "mail", [b"first", b"second", b"third\x1b[31m", b"alive"])
    claims = store.transact(queue.claim, "mail", "worker", 3, TTL_NS)
    for claim in claims:
        store.transact(
            queue.dead_letter, claim, "no_such_user", f"ValueError: {claim.seq}\n  at line 7"
        )
    return [claim.seq for claim in claims]


@pytest.fixture
def rig(path: Path) -> Iterator[AccountRig]:
    """A store with the account ada: three deposits, all handled, and a worker that has stopped."""
    opened = AccountRig(str(path))
    with opened.store:
        for amount in (1, 2, 3):
            opened.account("ada").send(QuotedDeposit(amount), correlation_id=f"c-{amount}")
        opened.run_worker()
        yield opened
