"""Invalid calls and invalid bytes on the writer's socket: a typed error, and no effect on other clients."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast import __version__
from holdfast import store as stores
from holdfast.config import FRAME_BYTES_MAX, KEY_BYTES_MAX, VALUE_BYTES_MAX, WriterLimits
from holdfast.durable import lease, queue
from holdfast.errors import (
    BadUrl,
    HoldfastError,
    Invalid,
    KeyTooLarge,
    StoreClosed,
    ValueTooLarge,
)
from holdfast.store.api import Store, Txn
from holdfast.store.lmdb.protocol import PROTOCOL, encode_frame
from holdfast.store.lmdb.writer_address import SOCKET_FILE, short_directory
from tests.process.conftest import LIMITS
from tests.process.refusal_checks import refused, untouched
from tests.process.watch import assert_no_process_left, writer_of
from tests.processes import python_proc

MODULES = (
    "holdfast.store.txn",
    "holdfast.store.lmdb.writer_client",
    "holdfast.store.lmdb.store",
    "holdfast.store.lmdb.writer",
    "holdfast.store.lmdb.protocol",
)

encode = msgspec.msgpack.encode


@pytest.fixture
def store(home: Path, limits: WriterLimits) -> Iterator[Store]:
    with stores.open(home, limits=limits) as opened:
        yield opened


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """One store for all invalid calls: none of them may affect the next."""
    path = tmp_path_factory.mktemp("shared") / "store"
    with stores.open(path, limits=LIMITS) as opened:
        yield opened
    assert_no_process_left(path, LIMITS.idle_exit_s)


# -- invalid calls ---------------------------------------------------------------------------------


class NoLease:
    guard = "none"


INVALID_CALLS: dict[str, tuple[Callable[[Txn], Any], type[HoldfastError]]] = {
    "a key too large": (
        lambda txn: txn.put(b"k" * (KEY_BYTES_MAX + 1), b""),
        KeyTooLarge,
    ),
    "a tuple too large": (lambda txn: txn.put(("k" * KEY_BYTES_MAX,), b""), KeyTooLarge),
    "an empty key": (lambda txn: txn.put(b"", b""), Invalid),
    "an empty key to delete": (lambda txn: txn.delete(b""), Invalid),
    "an empty key to read": (lambda txn: txn.get(b""), Invalid),
    "a counter's key too large": (lambda txn: txn.add(b"k" * (KEY_BYTES_MAX + 1), 1), KeyTooLarge),
    "a space too large": (lambda txn: txn.append(b"k" * KEY_BYTES_MAX, b""), KeyTooLarge),
    "a value too large": (
        lambda txn: txn.put(("k",), bytes(VALUE_BYTES_MAX + 1)),
        ValueTooLarge,
    ),
    "an appended value too large": (
        lambda txn: txn.append(("k",), bytes(VALUE_BYTES_MAX + 1)),
        ValueTooLarge,
    ),
    "text for a key": (lambda txn: txn.put("k", b""), Invalid),  # type: ignore[arg-type]
    "a list for a key": (lambda txn: txn.get(["k"]), Invalid),  # type: ignore[arg-type]
    "a float in a key": (lambda txn: txn.put((1.5,), b""), Invalid),  # type: ignore[arg-type]
    "a surrogate in a key": (lambda txn: txn.put(("\ud800",), b""), Invalid),
    "text for a value": (lambda txn: txn.put(("k",), "v"), Invalid),  # type: ignore[arg-type]
    "none for a value": (lambda txn: txn.put(("k",), None), Invalid),  # type: ignore[arg-type]
    "text appended": (lambda txn: txn.append(("k",), "v"), Invalid),  # type: ignore[arg-type]
    "a number appended": (lambda txn: txn.append(("k",), 5), Invalid),  # type: ignore[arg-type]
    "a float added": (lambda txn: txn.add(("k",), 1.5), Invalid),  # type: ignore[arg-type]
    "text added": (lambda txn: txn.add(("k",), "1"), Invalid),  # type: ignore[arg-type]
    "more than 64 bits added": (lambda txn: txn.add(("k",), 1 << 70), Invalid),
    "a number for a topic": (lambda txn: txn.notify(5), Invalid),  # type: ignore[arg-type]
    "a surrogate in a topic": (lambda txn: txn.notify("\ud800"), Invalid),
    "no lease": (lambda txn: txn.require_live(NoLease()), Invalid),  # type: ignore[arg-type]
    "an argument of the wrong type": (
        lambda txn: queue.put(txn, "q", "text"),  # type: ignore[arg-type]
        Invalid,
    ),
    "an argument too few": (lambda txn: queue.put(txn, "q"), Invalid),  # type: ignore[call-arg]
    "a time to live of nothing": (
        lambda txn: lease.acquire(txn, "r", "w", "1", 0),
        Invalid,
    ),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("wrong", INVALID_CALLS)
def test_invalid_call_raises_and_rolls_back_its_transaction(
    shared_store: Store, wrong: str
) -> None:
    store = shared_store
    call, kind = INVALID_CALLS[wrong]
    with pytest.raises(HoldfastError) as caught:
        store.transact(lambda txn: (txn.put(("beside",), b"1"), call(txn)))
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert store.read(lambda txn: txn.get(("beside",))) is None
    store.transact(lambda txn: txn.put(("after", wrong), b"1"))
    assert store.read(lambda txn: txn.get(("after", wrong))) == b"1"


@pytest.mark.timeout(60)
def test_invalid_transaction_does_not_fail_others_in_its_frame(store: Store) -> None:
    """Transactions of many threads share a frame. A transaction that cannot be encoded must fail alone."""
    ends: list[str] = []

    def call(n: int) -> None:
        try:
            if n % 4:
                store.transact(lambda txn: txn.add(("good",), 1))
            else:
                store.transact(lambda txn: txn.notify("\ud800"))
            ends.append("committed")
        except Invalid:
            ends.append("refused")

    threads = [threading.Thread(target=call, args=(n,)) for n in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ends) == ["committed"] * 48 + ["refused"] * 16
    assert store.read(lambda txn: txn.count(("good",))) == 48


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_transaction_larger_than_a_frame_is_invalid(store: Store, home: Path) -> None:
    def put_values(txn: Txn, name: str, values: int) -> None:
        for n in range(values):
            txn.put((name, n), bytes(VALUE_BYTES_MAX))

    writer = writer_of(home)
    with refused(Invalid, says="too large"):
        store.transact(put_values, "too many", FRAME_BYTES_MAX // VALUE_BYTES_MAX + 1)
    store.transact(put_values, "fewer", 1)
    assert store.read(lambda txn: txn.get(("too many", 0))) is None
    assert store.read(lambda txn: txn.get(("fewer", 0))) == bytes(VALUE_BYTES_MAX)
    assert writer.alive


@pytest.mark.timeout(30)
def test_calls_on_a_closed_store_raise_store_closed(home: Path, limits: WriterLimits) -> None:
    store = stores.open(home, limits=limits)
    store.close()
    store.close()
    for use in (
        lambda: store.transact(lambda txn: txn.put(("a",), b"")),
        lambda: store.read(lambda txn: txn.get(("a",))),
        lambda: store.wait("topic", 0, 0.1),
        lambda: store.submit(lambda txn: txn.put(("a",), b"")).result(10),
    ):
        with refused(StoreClosed):
            use()


# -- invalid store locations -----------------------------------------------------------------------


@pytest.mark.timeout(30)
def test_open_of_a_file_path_is_invalid_and_leaves_the_file_unchanged(
    tmp_path: Path, limits: WriterLimits
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with untouched(file):
        with refused(Invalid, says="a file, not a directory"):
            stores.open(file, limits=limits)
        with refused(Invalid, says="a file, not a directory"):
            stores.open(file / "below", limits=limits)


@pytest.mark.parametrize("url", ["", "lmdb:", "redis://host", "postgres-ish:x"])
def test_open_of_a_malformed_url_raises_bad_url(url: str) -> None:
    with refused(BadUrl):
        stores.open(url)


def test_app_opens_a_path_and_refuses_another_object(tmp_path: Path) -> None:
    app = hf.App("shop")
    with app.open(tmp_path / "data", roles=()) as rt:
        assert rt.store.url
    with refused(BadUrl):
        app.open(17)  # type: ignore[arg-type]


@pytest.mark.timeout(30)
def test_store_with_a_very_long_path_opens(tmp_path: Path, limits: WriterLimits) -> None:
    """The path of a Unix socket has at most 108 bytes. The path of a directory may be longer."""
    deep = tmp_path / ("d" * 120) / ("e" * 120) / "store"
    with stores.open(deep, limits=limits) as first, stores.open(deep, limits=limits) as second:
        first.transact(lambda txn: txn.put(("a",), b"1"))
        assert second.read(lambda txn: txn.get(("a",))) == b"1"


# -- fork ------------------------------------------------------------------------------------------

FORKER = """
import os, sys
from holdfast import store as stores
from holdfast.config import WriterLimits
from holdfast.errors import HoldfastError

path = sys.argv[1]
limits = WriterLimits(idle_exit_s=0.2)
store = stores.open(path, limits=limits)
store.transact(lambda txn: txn.put(("parent",), b"before"))

def tell(what, fn):
    try:
        print(what, fn(), flush=True)
    except HoldfastError as error:
        print(what, type(error).__name__, error, flush=True)

# A child that does nothing but end, forked in the middle of a read: ending tears down its copies.
def look(txn):
    seen = txn.get(("large",))[:6]
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
    with stores.open(path, limits=limits) as other:
        for n in range(20):
            other.transact(lambda txn: txn.put(("large",), b"later " * 20_000))
    return seen == txn.get(("large",))[:6]

store.transact(lambda txn: txn.put(("large",), b"first " * 20_000))
tell("parent still sees what it saw:", lambda: store.read(look))

child = os.fork()
if child == 0:
    tell("child transact", lambda: store.transact(lambda txn: txn.put(("child",), b"1")))
    tell("child read", lambda: store.read(lambda txn: txn.get(("parent",))))
    tell("child submit", lambda: store.submit(lambda txn: txn.put(("child",), b"1")).result(9))
    tell("child wait", lambda: store.wait("t", 0, 0.1))
    tell("child backup", lambda: store.backup(path + ".backup"))
    store.close()
    with stores.open(path, limits=limits) as again:
        again.transact(lambda txn: txn.put(("reopened",), b"1"))
        tell("child reopened", lambda: again.read(lambda txn: txn.get(("parent",))))
    sys.exit(0)
_, status = os.waitpid(child, 0)
print("child ended", status, flush=True)
store.transact(lambda txn: txn.put(("parent",), b"after"))
tell("parent read", lambda: store.read(lambda txn: txn.get(("parent",))))
tell("parent child", lambda: store.read(lambda txn: txn.get(("child",))))
tell("parent reopened", lambda: store.read(lambda txn: txn.get(("reopened",))))
store.close()
"""


@pytest.mark.timeout(60)
def test_store_of_the_parent_raises_store_forked_in_a_forked_child(home: Path) -> None:
    with python_proc(FORKER, str(home), ready=None) as forker:
        assert forker.expect("parent still sees").endswith("True")
        for use in ("transact", "read", "submit", "wait", "backup"):
            line = forker.expect(f"child {use}")
            assert "StoreForked store_forked" in line
            assert "open it in the child, or spawn instead" in line
        assert forker.expect("child reopened").endswith("b'before'")
        assert forker.expect("child ended").endswith(" 0")
        assert forker.expect("parent read").endswith("b'after'")
        assert forker.expect("parent child").endswith("None")
        assert forker.expect("parent reopened").endswith("b'1'")
        assert forker.wait() == 0


# -- invalid input on the writer's socket ----------------------------------------------------------

HELLO = encode_frame(encode([PROTOCOL, 1, __version__]))


def encoded_request(**fields: Any) -> bytes:
    """The frame of one valid transaction, with some fields replaced."""
    values: dict[str, Any] = {
        **{"no": 1, "client": b"stranger", "snapshot": 0, "resent": False},
        **{"reads": [], "ranges": [], "guards": [], "puts": {}, "deletes": [], "appends": []},
        **{"adds": {}, "calls": [], "topics": []},
    }
    return encode_frame(encode([[list({**values, **fields}.values())]]))


def with_raw_arguments(raw: bytes) -> bytes:
    body = encode([[[1, b"stranger", 0, False, [], [], [], {}, [], [], {}, [["name", 0]], []]]])
    at = body.rindex(encode("name")) + len(encode("name"))
    return encode_frame(body[:at] + raw + body[at + 1 :])


INVALID_INPUTS: dict[str, bytes] = {
    "nothing": b"",
    "noise": random.Random(3).randbytes(5000),
    "a length beyond all bounds": b"\xff\xff\xff\xff" + b"x" * 1000,
    "half a length": b"\x00\x00",
    "half a frame": (1 << 16).to_bytes(4, "big") + b"the beginning",
    "empty frames": bytes(4000),
    "a hello of another kind": encode_frame(encode({"hello": "world"})),
    "a hello of another version": encode_frame(encode([PROTOCOL, 1, "9.9.9"])),
    "a hello of another protocol, and a transaction": (
        encode_frame(encode([PROTOCOL + 1, 1, __version__]))
        + encoded_request(puts={b"stranger": b"1"})
    ),
    "a hello that is not UTF-8": encode_frame(b"\x93\x01\x05\xa1\xff"),
    "a transaction before the hello": encoded_request(puts={b"stranger": b"1"}),
    "noise after the hello": HELLO + encode_frame(random.Random(4).randbytes(300)),
    "an operation that is not UTF-8": HELLO + encode_frame(b"\x91\x91\x9c" + b"\xa1\xff" * 12),
    "nesting without end": HELLO + with_raw_arguments(b"\x91" * 100_000 + b"\xc0"),
    "an operation of another package": HELLO + encoded_request(calls=[["os:system", ["true"]]]),
    "a function that is no operation": (
        HELLO + encoded_request(calls=[["holdfast.store.lmdb.writer:main", [["x"]]]])
    ),
    "a module that is not there": HELLO + encoded_request(calls=[["holdfast.nowhere:x", []]]),
    "an operation with other arguments": (HELLO + encoded_request(calls=[["queue.put", {"a": 1}]])),
    "an empty key": HELLO + encoded_request(puts={b"stranger": b"1", b"": b"1"}),
    "a key too large": HELLO + encoded_request(puts={b"stranger": b"1", b"k" * 600: b"1"}),
    "an empty key to delete": HELLO + encoded_request(puts={b"stranger": b"1"}, deletes=[b""]),
    "a guard on nothing": HELLO
    + encoded_request(guards=[["r", b"", b"", b"", 1]], puts={b"stranger": b""}),
    "a counter beyond 64 bits": HELLO + encoded_request(adds={b"stranger": (1 << 64) - 1}),
    "a snapshot from before": HELLO
    + encoded_request(snapshot=-9, reads=[b"a"], puts={b"stranger": b"1"}),
    "a topic of another type": HELLO + encode_frame(encode([[], [5]])),
}


def send_raw(home: Path, data: bytes) -> None:
    """Connect to the writer, send raw bytes, and close once the writer has read them or closed."""
    with socket.socket(socket.AF_UNIX) as peer, short_directory(home) as directory:
        peer.connect(f"{directory}/{SOCKET_FILE}")
        peer.settimeout(10)
        try:
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(65536):
                pass
        except (BrokenPipeError, ConnectionResetError):
            pass


@pytest.mark.timeout(60)
def test_writer_survives_invalid_frames_on_its_socket(store: Store, home: Path) -> None:
    writer = writer_of(home)
    for what, data in INVALID_INPUTS.items():
        send_raw(home, data)
        store.transact(lambda txn, what=what: txn.put(("after",), what.encode()))
        assert writer.alive, f"the writer died of {what}"
    assert store.read(lambda txn: txn.get(b"stranger")) is None


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("probe_writers")
def test_writer_survives_random_bytes_after_the_hello_frame(store: Store, home: Path) -> None:
    """Random bytes, and requests with some changed bytes."""
    writer = writer_of(home)
    noise = random.Random(os.environ.get("PYTEST_SEED", "noise"))
    whole = encoded_request(puts={b"stranger": b"1"}, calls=[["probe.now", []]])
    for _ in range(300):
        if noise.random() < 0.5:
            data = encode_frame(noise.randbytes(noise.randrange(100)))
        else:
            spoiled = bytearray(whole)
            for _ in range(noise.randrange(1, 4)):
                spoiled[noise.randrange(4, len(spoiled))] = noise.randrange(256)
            data = bytes(spoiled)
        send_raw(home, HELLO + data)
    store.transact(lambda txn: txn.put(("after",), b"1"))
    assert writer.alive


@pytest.mark.timeout(60)
def test_silent_connections_do_not_delay_commits(store: Store, home: Path) -> None:
    peers = []
    try:
        for data in (b"", b"\x00", HELLO, HELLO + b"\x00\x00\x40\x00half") * 8:
            peer = socket.socket(socket.AF_UNIX)
            peers.append(peer)
            with short_directory(home) as directory:
                peer.connect(f"{directory}/{SOCKET_FILE}")
            peer.sendall(data)
        for _ in range(50):
            store.transact(lambda txn: txn.add(("n",), 1))
        assert store.read(lambda txn: txn.count(("n",))) == 50
    finally:
        for peer in peers:
            peer.close()
