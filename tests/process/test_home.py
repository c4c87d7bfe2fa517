"""A store directory that is removed, moved or replaced while it is open: no commit is acknowledged any more.

Invariant W1: a commit is acknowledged only if it is in the store that a newcomer would open at that path.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast import __version__
from holdfast import store as stores
from holdfast.config import WriterLimits
from holdfast.errors import HoldfastError, NotFound, StoreReplaced
from holdfast.store.api import Store, Txn
from holdfast.store.backup import restore
from holdfast.store.engine import Answer, Engine, Request
from holdfast.store.reach import dial, start_writer
from holdfast.store.wire import PROTOCOL, Hello, encode, frame
from holdfast.store.writer import Writer, open_engine, take_lock
from tests.process.watch import assert_nobody_is_left, until, writer_of, writers_of
from tests.processes import Proc

pytestmark = pytest.mark.timeout(90)

CLIENTS = 4
# The promise is two seconds; a machine under load gets more.
TOLD_S = 30.0


@pytest.fixture
def left(tmp_path: Path, limits: WriterLimits) -> Iterator[Callable[[Path], Path]]:
    """Paths whose writers must have left at the end."""
    paths: list[Path] = []

    def add(path: Path) -> Path:
        paths.append(path)
        return path

    yield add
    for path in paths:
        assert_nobody_is_left(path, limits.linger_s)


class Client:
    """A thread with a store of its own process that commits until it is refused."""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.name = name
        self.acknowledged = 0
        # Commits that began after the directory was gone and were acknowledged all the same.
        self.late = 0
        self.error: HoldfastError | None = None
        self.gone = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        until(lambda: self.acknowledged > 5, "commits")

    def _run(self) -> None:
        while self.error is None:
            late = self.gone.is_set()
            try:
                self.store.transact(lambda txn: txn.put((self.name, self.acknowledged + 1), b"x"))
            except HoldfastError as error:
                self.error = error
            else:
                self.acknowledged += 1
                self.late += late

    def end(self) -> HoldfastError:
        self._thread.join(TOLD_S)
        assert self.error is not None, "it is still acknowledged"
        return self.error


def committing(home: Path, limits: WriterLimits, leaving: ExitStack) -> list[Client]:
    found = [
        Client(leaving.enter_context(stores.open(home, limits=limits)), f"c{n}")
        for n in range(CLIENTS)
    ]
    for client in found:
        client.start()
    return found


def last_of(store: Store, client: Client) -> int:
    def count(txn: Txn) -> int:
        return sum(txn.get((client.name, n + 1)) is not None for n in range(client.acknowledged))

    return store.read(count)


REMOVALS: dict[str, Callable[[Path], object]] = {
    "rm -rf": shutil.rmtree,
    "mv": lambda path: path.rename(path.with_name("moved")),
    "rm data.mdb": lambda path: (path / "data.mdb").unlink(),
}


@pytest.mark.parametrize("removal", REMOVALS)
def test_clients_that_commit_are_told_that_the_store_is_gone(
    tmp_path: Path, limits: WriterLimits, left: Callable[[Path], Path], removal: str
) -> None:
    home = left(tmp_path / "store")
    with ExitStack() as leaving:
        clients = committing(home, limits, leaving)
        REMOVALS[removal](home)
        for client in clients:
            client.gone.set()
        for client in clients:
            error = client.end()
            assert type(error).code == "store_gone"
            assert isinstance(error, NotFound)
            assert client.late == 0
        # Not the second time either, and nothing was made at the path.
        for client in clients:
            with pytest.raises(NotFound, match="removed or moved"):
                client.store.transact(lambda txn: txn.put(("again",), b"x"))
            with pytest.raises(NotFound):
                client.store.submit(lambda txn: txn.put(("again",), b"x")).result(TOLD_S)
        assert not (home / "data.mdb").exists()
        if removal == "mv":
            moved = left(home.with_name("moved"))
            with stores.open(moved, limits=limits) as store:
                for client in clients:
                    assert last_of(store, client) == client.acknowledged
                assert store.read(lambda txn: txn.get(("again",))) is None


def by_restore(home: Path, backup: Path) -> None:
    home.rename(home.with_name("former"))
    restore(backup, home)


def by_new_store(home: Path, backup: Path) -> None:
    shutil.rmtree(home)
    with stores.open(home, limits=WriterLimits(linger_s=0.2)) as store:
        store.transact(lambda txn: txn.put(("new",), b"1"))


def by_copied_files(home: Path, backup: Path) -> None:
    """Another directory at the same path, with the files of a backup."""
    home.rename(home.with_name("former"))
    shutil.copytree(backup, home)


REPLACEMENTS = {"mv and restore": by_restore, "anew": by_new_store, "copied": by_copied_files}


@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_clients_that_commit_are_told_that_the_store_was_replaced(
    tmp_path: Path, limits: WriterLimits, left: Callable[[Path], Path], replacement: str
) -> None:
    home, backup = left(tmp_path / "store"), tmp_path / "backup"
    with ExitStack() as leaving:
        clients = committing(home, limits, leaving)
        clients[0].store.backup(str(backup))
        REPLACEMENTS[replacement](home, backup)
        for client in clients:
            client.gone.set()
        for client in clients:
            # Between the two there was nothing at the path: either may be told first.
            assert isinstance(client.end(), NotFound | StoreReplaced)
            assert client.late == 0
        with stores.open(home, limits=limits) as newcomer:
            rows = newcomer.read(lambda txn: txn.scan(b"", b"\xff"))
            for client in clients:
                with pytest.raises((NotFound, StoreReplaced)):
                    client.store.transact(lambda txn: txn.put(("again",), b"x"))
            assert newcomer.read(lambda txn: txn.scan(b"", b"\xff")) == rows
    former = home.with_name("former")
    if former.exists():
        with stores.open(left(former), limits=limits) as store:
            for client in clients:
                assert last_of(store, client) == client.acknowledged


def test_clients_that_only_read_or_wait_are_told(
    tmp_path: Path, limits: WriterLimits, left: Callable[[Path], Path]
) -> None:
    home = left(tmp_path / "store")
    with ExitStack() as leaving:
        reader, waiter, idle = (
            leaving.enter_context(stores.open(home, limits=limits)) for _ in range(3)
        )
        reader.transact(lambda txn: txn.put(("k",), b"v"))
        since = waiter.wait("bell", 0, 0.0)
        told: list[BaseException] = []

        def wait() -> None:
            try:
                waiter.wait("bell", since, 600)
            except HoldfastError as error:
                told.append(error)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        shutil.rmtree(home)

        def refused() -> bool:
            try:
                reader.read(lambda txn: txn.get(("k",)))
            except NotFound:
                return True
            return False

        until(refused, "a reader is told", TOLD_S)
        waiting.join(TOLD_S)
        assert [type(error).code for error in told] == ["store_gone"]
        until(lambda: not writers_of(home), "the writer left", TOLD_S)
        with pytest.raises(NotFound):
            idle.read(lambda txn: txn.get(("k",)))
        with pytest.raises(NotFound):
            idle.transact(lambda txn: txn.put(("k",), b"w"))
        assert not home.exists()


def test_a_client_whose_writer_was_killed_does_not_make_the_store_anew(
    tmp_path: Path, limits: WriterLimits, left: Callable[[Path], Path]
) -> None:
    home = left(tmp_path / "store")
    with stores.open(home, limits=limits) as store:
        store.transact(lambda txn: txn.put(("k",), b"v"))
        writer_of(home).kill()
        shutil.rmtree(home)
        home.mkdir()
        with pytest.raises(NotFound):
            store.transact(lambda txn: txn.put(("k",), b"w"))
        assert list(home.iterdir()) == []


def test_a_link_that_the_writer_does_not_know_is_looked_at_before_each_answer(
    tmp_path: Path, limits: WriterLimits, left: Callable[[Path], Path]
) -> None:
    """The writer was started by the directory's own path, which goes on to lead to it."""
    one, other, link = left(tmp_path / "one"), left(tmp_path / "other"), tmp_path / "link"
    stores.open(other, limits=limits).close()
    link.symlink_to(one)
    with stores.open(one, limits=limits) as first, stores.open(link, limits=limits) as store:
        client = Client(store, "linked")
        client.start()
        (tmp_path / "next").symlink_to(other)
        (tmp_path / "next").replace(link)
        client.gone.set()
        assert isinstance(client.end(), StoreReplaced)
        assert client.late == 0
        first.transact(lambda txn: txn.put(("first",), b"x"))
        assert last_of(first, client) == client.acknowledged


def test_a_link_that_leads_to_another_store_is_a_replacement(
    tmp_path: Path, limits: WriterLimits, left: Callable[[Path], Path]
) -> None:
    one, other, link = left(tmp_path / "one"), left(tmp_path / "other"), left(tmp_path / "link")
    with stores.open(other, limits=limits) as store:
        store.transact(lambda txn: txn.put(("of",), b"other"))
    one.mkdir()
    link.symlink_to(one)
    with stores.open(link, limits=limits) as store:
        store.transact(lambda txn: txn.put(("of",), b"one"))
        (tmp_path / "next").symlink_to(other)
        (tmp_path / "next").replace(link)
        with pytest.raises(StoreReplaced):
            store.transact(lambda txn: txn.put(("of",), b"?"))
    with stores.open(link, limits=limits) as store:
        assert store.read(lambda txn: txn.get(("of",))) == b"other"


@pytest.mark.parametrize("name", ["writer.sock", "writer.lock"])
def test_a_file_beside_the_rows_that_is_removed_costs_a_new_writer_and_no_commit(
    home: Path, limits: WriterLimits, name: str
) -> None:
    with stores.open(home, limits=limits) as store:
        store.transact(lambda txn: txn.put(("k",), b"1"))
        first = writer_of(home)
        (home / name).unlink()
        until(lambda: not first.alive, "the writer left", TOLD_S)
        store.transact(lambda txn: txn.put(("l",), b"2"))
        with stores.open(home, limits=limits) as newcomer:
            assert newcomer.read(lambda txn: (txn.get(("k",)), txn.get(("l",)))) == (b"1", b"2")


def test_a_second_writer_does_not_start_while_the_first_has_lost_socket_and_lock_file(
    home: Path, limits: WriterLimits
) -> None:
    """The lock of the directory cannot be removed: it ends with the first writer."""
    with stores.open(home, limits=limits) as store:
        store.transact(lambda txn: txn.put(("k",), b"1"))
        first = writer_of(home)
        # It stands still, so that it cannot see what happens to its files.
        os.kill(first.pid, signal.SIGSTOP)
        try:
            for name in ("writer.sock", "writer.lock"):
                (home / name).unlink()
            assert take_lock(home) is None
            assert start_writer(home, bootstrap=False, limits=limits) == "held"
        finally:
            os.kill(first.pid, signal.SIGCONT)
        until(lambda: not first.alive, "the writer left", TOLD_S)
        store.transact(lambda txn: txn.put(("l",), b"2"))
        with stores.open(home, limits=limits) as newcomer:
            assert newcomer.read(lambda txn: (txn.get(("k",)), txn.get(("l",)))) == (b"1", b"2")


def test_a_writer_that_stands_still_without_its_files_is_ended_by_the_next_client(
    home: Path,
) -> None:
    limits = WriterLimits(linger_s=1.0, stopped_s=0.5)
    with stores.open(home, limits=limits) as store:
        store.transact(lambda txn: txn.put(("k",), b"1"))
        first = writer_of(home)
        os.kill(first.pid, signal.SIGSTOP)
        for name in ("writer.sock", "writer.lock"):
            (home / name).unlink()
        with stores.open(home, limits=limits) as newcomer:
            newcomer.transact(lambda txn: txn.put(("l",), b"2"))
            assert not first.alive
            assert newcomer.read(lambda txn: txn.get(("k",))) == b"1"


def test_without_the_reader_table_a_client_opens_again(home: Path, limits: WriterLimits) -> None:
    """Snapshots of processes that do not share it are not protected from each other."""
    with stores.open(home, limits=limits) as store:
        store.transact(lambda txn: txn.put(("k",), b"1"))
        first = writer_of(home)
        (home / "lock.mdb").unlink()
        until(lambda: not first.alive, "the writer left", TOLD_S)
        with pytest.raises(StoreReplaced):
            store.transact(lambda txn: txn.put(("l",), b"2"))
    with stores.open(home, limits=limits) as store:
        assert store.read(lambda txn: txn.get(("k",))) == b"1"
        assert os.stat(home / "lock.mdb").st_size > 0


class Removing(Engine):
    """The engine of a writer whose directory is removed right behind a commit."""

    path: Path

    def decide(self, requests: Sequence[Request]) -> list[Answer]:
        answers = super().decide(requests)
        if any(request.puts for request in requests):
            shutil.rmtree(self.path)
        return answers


def test_a_commit_whose_directory_goes_before_its_answer_is_not_acknowledged(
    tmp_path: Path, limits: WriterLimits
) -> None:
    lock = take_lock(tmp_path)
    assert lock is not None
    backend, engine = open_engine(tmp_path, bootstrap=True)
    engine.__class__, engine.path = Removing, tmp_path
    writer = Writer(tmp_path, backend, engine, limits)
    ended: list[BaseException] = []

    def serve() -> None:
        try:
            writer.serve()
        except NotFound as error:
            ended.append(error)
        writer.close()

    serving = threading.Thread(target=serve)
    serving.start()
    with dial(tmp_path) as sock:
        sock.settimeout(TOLD_S)
        sock.sendall(frame(encode(Hello(PROTOCOL, os.getpid(), __version__))))
        assert sock.recv(65536), "it says welcome"
        request = Request(1, b"client01", engine._backend.last_id(), puts={b"k": b"v"})
        sock.sendall(frame(encode([[request], []])))
        try:
            answer = sock.recv(65536)
        except ConnectionResetError:  # it hangs up before it has read everything
            answer = b""
        assert answer == b"", "it hangs up without an answer"
    serving.join(TOLD_S)
    lock.close()
    assert [type(error).code for error in ended] == ["store_gone"]


# -- processes ---------------------------------------------------------------------------------------

APP = """
import holdfast as hf

@hf.task
def double(n: int) -> int:
    return 2 * n

@hf.effect("wire")
def wire(n: int) -> int:
    return n

class Account(hf.World):
    pass

app = hf.App("shop", worlds=[Account], effects=[wire], tasks=[double])
"""
ENDINGS: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "rm -rf": (lambda home, backup: shutil.rmtree(home), "store_gone"),
    "mv": (lambda home, backup: home.rename(home.with_name("former")), "store_gone"),
    "replaced": (lambda home, backup: backup.rename(home), "store_replaced"),
}


@pytest.mark.parametrize("roles", ["all roles", "one role"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_up_ends_with_one_line_and_no_acknowledgement(
    tmp_path: Path, left: Callable[[Path], Path], ending: str, roles: str
) -> None:
    home, backup = left(tmp_path / "data"), tmp_path / "backup"
    (tmp_path / "shop.py").write_text(APP, encoding="utf-8")
    options = [
        "--http",
        "127.0.0.1:0",
        *(["--role", "orchestrator"] if roles == "one role" else []),
    ]
    argv = [sys.executable, "-m", "holdfast.cli", "up", "shop:app", "--store", "data", *options]
    with Proc.spawn(argv, cwd=tmp_path) as up:
        address = up.lines[0].rpartition("://")[2]
        status, made = submit(address)
        assert status in (200, 201), made
        end, code = ENDINGS[ending]
        if ending == "replaced":
            with stores.open(home) as store:
                store.backup(str(backup))
            home.rename(home.with_name("former"))
        end(home, backup)
        try:
            status, made = submit(address)
        except OSError:
            pass  # it has ended already
        else:
            assert status >= 500, made
        assert up.wait(60) == 1
        [line] = [line for line in up.errors if code in line or "store_gone" in line]
        assert line.startswith("holdfast: ")
        assert not any("Traceback" in line for line in up.errors)
    left(home.with_name("former"))
    if ending == "replaced":
        with stores.open(home) as store:
            assert store.read(lambda txn: txn.get(("again",))) is None
    else:
        assert not home.exists()


def submit(address: str) -> tuple[int, object]:
    connection = http.client.HTTPConnection(address, timeout=50)
    try:
        body = json.dumps({"name": "double", "args": [21]})
        connection.request("POST", "/v1/tasks", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()
