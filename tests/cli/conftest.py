"""A store with something in it, and a way to run commands in this process."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast import store as stores
from holdfast.cli import main
from holdfast.cli.redrive import Pace
from holdfast.clock import S, SystemClock
from holdfast.durable import queue
from holdfast.store.api import Store
from tests.ops.app import Deposited
from tests.ops.rig import Rig

TTL_NS = 60 * S


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line of an error."""
        [line] = self.err.splitlines()
        assert line.startswith("holdfast: ")
        return line.removeprefix("holdfast: ")


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("HOLDFAST_STORE", raising=False)

    def run(*argv: object) -> Ran:
        capsys.readouterr()
        code = main([str(word) for word in argv])
        said = capsys.readouterr()
        return Ran(code, said.out, said.err)

    return run


def pause_by(monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], None]) -> None:
    """Whoever redrives at a rate waits like this. Not by the clock of all: other threads sleep by that."""

    class Rests(SystemClock):
        def sleep(self, seconds: float) -> None:
            sleep(seconds)

    begin = Pace.__init__
    monkeypatch.setattr(
        Pace, "__init__", lambda self, rate, _, interrupt: begin(self, rate, Rests(), interrupt)
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with stores.open(path) as opened:
        yield opened


@pytest.fixture
def letters(store: Store) -> list[int]:
    """Three dead letters of the queue `mail`, by seq, among items that are alive."""
    store.transact(queue.put_many, "mail", [b"first", b"second", b"third\x1b[31m", b"alive"])
    claims = store.transact(queue.claim, "mail", "worker", 3, TTL_NS)
    for claim in claims:
        store.transact(queue.bury, claim, "no_such_user", f"ValueError: {claim.seq}\n  at line 7")
    return [claim.seq for claim in claims]


@pytest.fixture
def rig(path: Path) -> Iterator[Rig]:
    """A store with accounts: ada with three deposits, all handled, and a worker that has left."""
    made = Rig(str(path))
    with made.store:
        for amount in (1, 2, 3):
            made.account("ada").send(Deposited(amount), correlation_id=f"c-{amount}")
        made.work()
        yield made
