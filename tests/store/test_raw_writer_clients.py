"""Raw protocol clients of the writer: frames that LmdbStore never sends, and clients that disconnect early."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast import codec
from holdfast.errors import RequestCancelled
from holdfast.store.api import Txn
from holdfast.store.lmdb.protocol import (
    client_hello,
    decode_writer_message,
    encode,
    encode_frame,
    new_frame_decoder,
)
from holdfast.store.lmdb.store import LmdbStore
from holdfast.store.lmdb.writer_process import connect
from holdfast.store.requests import CommitAnswer, CommitRequest
from holdfast.tasks import operations as tasks
from holdfast.tasks.model import EXECUTOR_KINDS, TaskSpec, keys_of, pack_int
from holdfast.tasks.operations import GrantRequest, TaskToSubmit
from holdfast.tasks.row_ranges import get_status
from holdfast.tasks.states import TaskState
from tests.conformance.conftest import open_store

MODULES = ("holdfast.store.lmdb.writer",)
KEYS = keys_of("main")
TOPIC = KEYS.queue_topic("default")
HELLO_FRAME = encode_frame(encode(client_hello()))
CLIENT_ID = b"client01"
SUBMIT_ARGS = ("main", TaskSpec(name="t", queue="default"), [TaskToSubmit(b"x")])
LEASE_REQUEST = GrantRequest("w", ["default"], 1, free_slots=(1,) * len(EXECUTOR_KINDS))
LEASE_ARGS = ("main", LEASE_REQUEST, 0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    with open_store("lmdb", tmp_path) as opened:
        assert isinstance(opened, LmdbStore)
        yield opened


class RawWriterClient:
    def __init__(self, store: LmdbStore) -> None:
        self.sock = connect(store.path)
        self.sock.settimeout(30)
        self._frames = new_frame_decoder()
        self._bodies: list[bytes] = []

    def handshake(self) -> RawWriterClient:
        self.sock.sendall(HELLO_FRAME)
        self._next_body()
        return self

    def _next_body(self) -> bytes:
        while not self._bodies:
            data = self.sock.recv(65536)
            assert data, "the writer has hung up"
            self._bodies += self._frames.feed(data)
        return self._bodies.pop(0)

    def next_topics(self) -> dict[str, int]:
        """Return the topics of the next message that has any."""
        while not (topics := decode_writer_message(self._next_body()).topics):
            pass
        return topics

    def receive_answers(self, count: int) -> list[CommitAnswer]:
        answers: list[CommitAnswer] = []
        while len(answers) < count:
            answers += decode_writer_message(self._next_body()).answers
        return answers


def encode_requests(
    *requests: CommitRequest, watch: tuple[str, ...] = (), unwatch: tuple[str, ...] = ()
) -> bytes:
    return encode_frame(encode([list(requests), list(watch), list(unwatch)]))


def encode_call(operation: object, args: tuple[object, ...]) -> list[tuple[str, msgspec.Raw]]:
    return [(operation.name, msgspec.Raw(codec.pack(args)))]  # type: ignore[attr-defined]


def parked_request(no: int) -> CommitRequest:
    return CommitRequest(
        no, CLIENT_ID, 0, calls=encode_call(tasks.lease_or_park, LEASE_ARGS), park_topics=[TOPIC]
    )


def writer_pid(store: LmdbStore) -> int:
    """Return the pid of the current writer, read over a new connection."""
    with LmdbStore(store.path) as another:
        return another._client.welcome.pid


def submit_and_read_state(store: LmdbStore) -> TaskState:
    [seq] = store.transact(tasks.submit, *SUBMIT_ARGS)

    def state(txn: Txn) -> TaskState:
        return get_status(txn, KEYS, pack_int(seq)).state

    return TaskState(store.read(state))


def test_parked_request_granted_before_its_cancellation_keeps_the_lease(
    store: LmdbStore,
) -> None:
    before = writer_pid(store)
    raw = RawWriterClient(store).handshake()
    raw.sock.sendall(
        encode_requests(parked_request(1), CommitRequest(9, CLIENT_ID, 0, puts={b"k": b"v"}))
    )
    assert [answer.no for answer in raw.receive_answers(1)] == [9]
    # Sent together, so that they are one batch. The last request breaks it, and the writer retries them one by one.
    raw.sock.sendall(
        encode_requests(
            CommitRequest(2, CLIENT_ID, 0, calls=encode_call(tasks.submit, SUBMIT_ARGS)),
            CommitRequest(1, CLIENT_ID, 0, resent=True, cancels_parked=True),
            CommitRequest(3, CLIENT_ID, 0, adds={b"": 1}),
        )
    )
    answers = {answer.no: answer for answer in raw.receive_answers(3)}
    assert answers[2].error is None
    assert answers[3].error is not None
    # The lease was granted before the cancellation.
    assert answers[1].error is None
    assert writer_pid(store) == before


@pytest.mark.parametrize(
    ("greeted", "last"),
    [
        (False, HELLO_FRAME + encode_requests(watch=("news",))),
        # A parked request of a disconnected client would hold the lease of the task until it expires.
        (True, encode_requests(watch=(TOPIC,)) + encode_requests(parked_request(1))),
    ],
    ids=["greets and asks", "asks and stands"],
)
def test_requests_of_a_disconnected_client_take_no_lease(
    store: LmdbStore, greeted: bool, last: bytes
) -> None:
    raw = RawWriterClient(store)
    if greeted:
        raw.handshake()
    pid = writer_pid(store)
    # The stopped writer later reads all frames and the disconnect at once.
    os.kill(pid, signal.SIGSTOP)
    raw.sock.sendall(last)
    raw.sock.close()
    os.kill(pid, signal.SIGCONT)
    assert submit_and_read_state(store) is TaskState.WAITING
    assert writer_pid(store) == pid


def test_cancelled_parked_request_is_answered_with_request_cancelled(store: LmdbStore) -> None:
    raw = RawWriterClient(store).handshake()
    raw.sock.sendall(encode_requests(parked_request(1)))
    raw.sock.sendall(
        encode_requests(CommitRequest(1, CLIENT_ID, 0, resent=True, cancels_parked=True))
    )
    [answer] = raw.receive_answers(1)
    assert answer.error is not None
    assert answer.error[0] == RequestCancelled.code
    assert submit_and_read_state(store) is TaskState.WAITING


def test_writer_sends_no_notification_of_an_unsubscribed_topic(store: LmdbStore) -> None:
    raw = RawWriterClient(store).handshake()
    raw.sock.sendall(encode_requests(watch=("a", "b")))
    assert raw.next_topics().keys() == {"a", "b"}
    raw.sock.sendall(encode_requests(watch=("c",), unwatch=("a", "never watched")))
    assert raw.next_topics().keys() == {"c"}
    store.transact(lambda txn: (txn.notify("a"), txn.notify("b")))
    assert raw.next_topics().keys() == {"b"}


def test_resubscribed_topic_has_the_commit_number_of_a_missed_notification(
    store: LmdbStore,
) -> None:
    raw = RawWriterClient(store).handshake()
    raw.sock.sendall(encode_requests(watch=("a",)))
    before = raw.next_topics()["a"]
    raw.sock.sendall(encode_requests(watch=("b",), unwatch=("a",)))
    raw.next_topics()
    store.transact(lambda txn: txn.notify("a"))
    raw.sock.sendall(encode_requests(watch=("a",)))
    assert raw.next_topics()["a"] > before
