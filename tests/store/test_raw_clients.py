"""Clients that talk to the writer by frames of their own: what ours never say, or say and are gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast import __version__, codec
from holdfast.errors import Withdrawn
from holdfast.store.api import Txn
from holdfast.store.engine import Answer, Request
from holdfast.store.lmdb import LmdbStore
from holdfast.store.reach import dial
from holdfast.store.wire import PROTOCOL, Frames, Hello, decode_to_client, encode, frame
from holdfast.tasks import coordinator as tasks
from holdfast.tasks.coordinator import New
from holdfast.tasks.rows import KINDS, Spec, keys_of, pack_int
from holdfast.tasks.runs import status_of
from holdfast.tasks.states import State
from tests.conformance.conftest import open_store

MODULES = ("holdfast.store.writer",)
KEYS = keys_of("main")
TOPIC = KEYS.queue_topic("default")
HELLO = frame(encode(Hello(PROTOCOL, os.getpid(), __version__)))
ME = b"client01"
SUBMIT = ("main", Spec(name="t", queue="default"), [New(b"x")])
LEASE = ("main", "w", ["default"], 1, (1,) * len(KINDS), (), 0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    with open_store("lmdb", tmp_path) as opened:
        assert isinstance(opened, LmdbStore)
        yield opened


class Raw:
    def __init__(self, store: LmdbStore) -> None:
        self.sock = dial(store.path)
        self.sock.settimeout(30)
        self._frames = Frames()
        self._bodies: list[bytes] = []

    def greet(self) -> Raw:
        self.sock.sendall(HELLO)
        self._body()
        return self

    def _body(self) -> bytes:
        while not self._bodies:
            data = self.sock.recv(65536)
            assert data, "the writer has hung up"
            self._bodies += self._frames.feed(data)
        return self._bodies.pop(0)

    def topics(self) -> dict[str, int]:
        """Of the next message that tells of any."""
        while not (found := decode_to_client(self._body()).topics):
            pass
        return found

    def answers(self, count: int) -> list[Answer]:
        found: list[Answer] = []
        while len(found) < count:
            found += decode_to_client(self._body()).answers
        return found


def asking(*requests: Request, watch: tuple[str, ...] = (), unwatch: tuple[str, ...] = ()) -> bytes:
    return frame(encode([list(requests), list(watch), list(unwatch)]))


def calling(operation: object, args: tuple[object, ...]) -> list[tuple[str, msgspec.Raw]]:
    return [(operation.name, msgspec.Raw(codec.pack(args)))]  # type: ignore[attr-defined]


def standing(no: int) -> Request:
    return Request(no, ME, 0, calls=calling(tasks.lease_when, LEASE), when=[TOPIC])


def writer_of(store: LmdbStore) -> int:
    """Whose turn it is, asked by a connection of its own."""
    with LmdbStore(store.path) as another:
        return another._link.welcome.pid


def submitted(store: LmdbStore) -> State:
    [seq] = store.transact(tasks.submit, *SUBMIT)

    def state(txn: Txn) -> State:
        return status_of(txn, KEYS, pack_int(seq)).state

    return State(store.read(state))


def test_one_that_is_applied_and_called_back_in_a_batch_that_breaks_has_what_it_was_granted(
    store: LmdbStore,
) -> None:
    before = writer_of(store)
    raw = Raw(store).greet()
    raw.sock.sendall(asking(standing(1), Request(9, ME, 0, puts={b"k": b"v"})))
    assert [one.no for one in raw.answers(1)] == [9]
    # Together, so that they are one batch. The last breaks it: all is done again, one by one.
    raw.sock.sendall(
        asking(
            Request(2, ME, 0, calls=calling(tasks.submit, SUBMIT)),
            Request(1, ME, 0, resent=True, withdrawn=True),
            Request(3, ME, 0, adds={b"": 1}),
        )
    )
    told = {one.no: one for one in raw.answers(3)}
    assert told[2].error is None
    assert told[3].error is not None
    # It had its task before it was called back.
    assert told[1].error is None
    assert writer_of(store) == before


@pytest.mark.parametrize(
    ("greeted", "last"),
    [
        (False, HELLO + asking(watch=("news",))),
        # If it stood, the task would be leased to nobody until that runs out.
        (True, asking(watch=(TOPIC,)) + asking(standing(1))),
    ],
    ids=["greets and asks", "asks and stands"],
)
def test_one_that_is_gone_when_it_is_heard_harms_nobody(
    store: LmdbStore, greeted: bool, last: bytes
) -> None:
    raw = Raw(store)
    if greeted:
        raw.greet()
    pid = writer_of(store)
    # So that the writer finds all of it at once.
    os.kill(pid, signal.SIGSTOP)
    raw.sock.sendall(last)
    raw.sock.close()
    os.kill(pid, signal.SIGCONT)
    assert submitted(store) is State.WAITING
    assert writer_of(store) == pid


def test_one_that_is_called_back_is_told_so(store: LmdbStore) -> None:
    raw = Raw(store).greet()
    raw.sock.sendall(asking(standing(1)))
    raw.sock.sendall(asking(Request(1, ME, 0, resent=True, withdrawn=True)))
    [told] = raw.answers(1)
    assert told.error is not None
    assert told.error[0] == Withdrawn.code
    assert submitted(store) is State.WAITING


def test_the_writer_tells_nothing_of_a_topic_that_is_unwatched(store: LmdbStore) -> None:
    raw = Raw(store).greet()
    raw.sock.sendall(asking(watch=("a", "b")))
    assert raw.topics().keys() == {"a", "b"}
    raw.sock.sendall(asking(watch=("c",), unwatch=("a", "never watched")))
    assert raw.topics().keys() == {"c"}
    store.transact(lambda txn: (txn.notify("a"), txn.notify("b")))
    assert raw.topics().keys() == {"b"}


def test_a_topic_that_is_watched_again_has_the_commit_that_notified_it_meanwhile(
    store: LmdbStore,
) -> None:
    raw = Raw(store).greet()
    raw.sock.sendall(asking(watch=("a",)))
    before = raw.topics()["a"]
    raw.sock.sendall(asking(watch=("b",), unwatch=("a",)))
    raw.topics()
    store.transact(lambda txn: txn.notify("a"))
    raw.sock.sendall(asking(watch=("a",)))
    assert raw.topics()["a"] > before
