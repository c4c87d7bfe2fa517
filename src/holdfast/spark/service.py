"""The ledger service: `python -m holdfast.spark.service`, one process for each run at work.

It holds the run's lease and is the only one that writes about it. The driver starts it with its
charge on standard input and keeps that pipe open: the end of it means that the driver is gone, and
the service hands out nothing more, takes what children have still to tell, commits it, gives the
lease back and leaves. On standard output it says, once, where it listens, or why it cannot.

Threads: one that reads all connections, a pool for requests that wait, one for the log, one for the
commit, one that renews the lease and lets time pass. With TLS each connection has a thread of its own. A service that loses its lease, or whose log fails, ends at once: whatever it
might still say would be about a run that is not its own.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import itertools
import os
import resource
import select
import signal
import socket
import ssl
import sys
import threading
import traceback
from typing import Any, BinaryIO

import msgspec

from holdfast import codec
from holdfast.clock import SYSTEM
from holdfast.durable import lease as leases
from holdfast.errors import (
    Conflict,
    Fenced,
    Held,
    HoldfastError,
    Invalid,
    StoreError,
    ValueTooLarge,
    from_wire,
)
from holdfast.ledger import runs
from holdfast.ledger.classes import Policy
from holdfast.ledger.lease_renewal import renewed
from holdfast.ledger.log import RunLog, open_run
from holdfast.spark import spool_upkeep, tls, wire
from holdfast.spark.child_lines import ChildLine, ChildLines
from holdfast.spark.commit import Committer
from holdfast.spark.desk import Desk
from holdfast.spark.journal import limber_up
from holdfast.spark.office import Office
from holdfast.spark.part_cuts import FILE_BYTES
from holdfast.spark.reply_ticket import ReplyTicket
from holdfast.spark.sinks import (
    open_sink,
    parquet,  # noqa: F401  loaded before the first commit needs it
)
from holdfast.spark.sinks.object_store import keep_options
from holdfast.spark.spool import check_usable
from holdfast.spark.strangers import HELLO_S, Strangers
from holdfast.store import open as open_store
from holdfast.store.api import Store

# The run's lease: a driver that died with its service is waited for this long at most.
LEASE_NS = 4_000_000_000
TICK_S = 0.1
RENEW_NS = 1_000_000_000
PROGRESS_NS = 2_000_000_000
# A little longer than children take to end what they have begun.
DRAIN_NS = 2_500_000_000
HELLO_BYTES_MAX = 4096
BACKLOG = 512
# How long the accept loop rests when there is no descriptor, or no memory, for another connection.
EXHAUSTED_S = 0.05
# Blocks are megabytes: a few at a time.
DELETE_ROWS = 8
EXIT_FENCED = 76
IDLE_S = 300.0
ANOTHER_DRIVER = "another driver was faster; run it again, it goes on with that run"


_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ABOUT_ROWS = wire.Step | wire.Inherit | wire.Outcomes | wire.Cancel | wire.Resume | wire.TakePart


class Charge(msgspec.Struct, frozen=True):
    """What the driver wants served. `record` is the run as it is, or a new one to be made."""

    store: str
    token: str
    host: str
    port: int
    record: bytes
    new: bool
    # The same driver starts its service again: grants live on. Else they belong to a dead driver.
    again: bool
    file_rows: int
    rate_per_s: float
    tokens_per_min: float = 0.0
    # Spark tasks of this driver write the files of the output, where data and sink allow it.
    executors_write: bool = False
    # For a new run: the one that the name led to when the driver looked.
    seen: str = ""
    # Where the driver finds its modules: a sink may be one of them.
    paths: list[str] = []
    file_bytes: int = FILE_BYTES
    # By URL: credentials of outputs. They are told to this process, and kept nowhere.
    storage_options: dict[str, dict[str, str]] = {}
    # Where to listen, when that is not the host that executors are told.
    bind: str = ""
    # With TLS: files of the service's certificate and key, and the authority's certificate.
    cert: str = ""
    key: str = ""
    ca: str = ""


class Ready(msgspec.Struct, frozen=True):
    port: int
    error: list[Any] | None = None


def main() -> None:
    # Ctrl-C is for the driver, which then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _raise_file_limit()
    source, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    threading.Thread(target=_load_early, daemon=True).start()
    if not select.select([source], [], [], IDLE_S)[0]:
        sys.exit(0)  # made ready for a run that did not come
    head = source.read(4)
    if len(head) < 4:
        sys.exit(0)
    size = int.from_bytes(head, "little")
    charge = msgspec.msgpack.decode(source.read(size), type=Charge)
    try:
        service = Service(charge)
    except HoldfastError as error:
        _tell(answers, Ready(0, wire.refused(error).error))
        sys.exit(1)
    _tell(answers, Ready(service.port))
    threading.Thread(target=_until_alone, args=(source, service), daemon=True).start()
    try:
        service.serve()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # At once: threads still read the pipe and wait for claims, and the interpreter would wait for them.
    os._exit(0)


def _load_early() -> None:
    """Load what the first requests need, while no run has come: most runs have an embedded store."""
    import holdfast.store.lmdb  # noqa: F401

    limber_up()


class Service:
    def __init__(self, charge: Charge) -> None:
        self.charge = charge
        record = codec.unpack_as(runs.RunRecord, charge.record)
        self._tls = tls.server_context(charge.cert, charge.key) if charge.cert else None
        self._listener = _listen(charge)
        self.port = int(self._listener.getsockname()[1])
        sys.path += [path for path in charge.paths if path not in sys.path]
        for url, options in charge.storage_options.items():
            keep_options(url, options)
        if record.sink:
            open_sink(record.sink)  # or say now that it cannot be
        self.store = open_store(charge.store)
        try:
            self.lease = _acquire(self.store, record.name)
            try:
                self.office = self._office(record)
            except BaseException:
                with contextlib.suppress(HoldfastError):
                    self.store.transact(leases.release, self.lease)
                raise
        except BaseException:
            self.store.close()
            raise
        self._line_numbers = itertools.count(1)
        self._lines = ChildLines(self._post, self._serve_one, self._ended)
        self._leaving = threading.Event()
        self._stopped = threading.Event()
        self.committer: Committer | None = None
        self._committing = threading.Lock()
        self._strangers = Strangers()

    def serve(self) -> None:
        # Before anybody can ask: a seal that is under way has a board, and begins its own commit.
        if self.office.desk.has_board:
            self.begin_commit()
        threading.Thread(target=self._accept, name="accept", daemon=True).start()
        try:
            self._pass_time()
        finally:
            self._close()

    def drain(self) -> None:
        """Hand out nothing more, and take what children still tell of calls that were under way."""
        office = self.office
        with office.desk.lock:
            office.leave()
            until_ns = SYSTEM.mono_ns() + DRAIN_NS
            while office.at_work() and (left_ns := until_ns - SYSTEM.mono_ns()) > 0:
                office.desk.changed.wait(left_ns / 1e9)

    def leave(self) -> None:
        """Ask it to end in good order; returns when it has."""
        self._leaving.set()
        self.office.wake_timer()
        self._stopped.wait(timeout=30)

    def begin_commit(self) -> None:
        with self._committing:
            if self.committer is None:
                spec = self.office.record.sink
                sink = open_sink(spec) if spec else None
                # One that the driver writes is written when all rows have ended.
                sink = None if getattr(sink, "in_driver", False) else sink
                self.committer = Committer(
                    self.office,
                    sink,
                    self.charge.file_rows,
                    self.charge.file_bytes,
                    self._sink_failed,
                    executors_write=self.charge.executors_write,
                )
                self.committer.start()

    # --- starting -------------------------------------------------------------------------------

    def _office(self, record: runs.RunRecord) -> Office:
        if self.charge.new:
            latest = self.store.read(runs.latest, record.name)
            if (latest.run_id if latest else "") != self.charge.seen:
                raise Conflict(what="run", name=record.name, why=ANOTHER_DRIVER)
            _discard_unfinished(self.store, record.name, self.lease)
            with renewed(self.store, self.lease, LEASE_NS):
                if record.spool:
                    check_usable(record)
                    spool_upkeep.sweep_leftovers(self.store)
                if record.base_run:
                    spool_upkeep.check_donors(self.store, record)
            self.store.transact(_create, record, self.lease)
        else:
            found = self.store.read(runs.latest, record.name)
            if found is not None and found.base_run == record.run_id:
                # It died over its input, and this driver goes on with the run before it.
                _discard_unfinished(self.store, record.name, self.lease)
                found = self.store.read(runs.latest, record.name)
            if found is None or found.run_id != record.run_id:
                raise Conflict(what="run", name=record.name, why=ANOTHER_DRIVER)
            if found.policy != record.policy and found.status in runs.GOING:
                found = self.store.transact(_retuned, found.run_id, record.policy, self.lease)
            record = found
        if record.status is runs.Status.INGESTING:
            desk = Desk(None, RunLog(self.store, record.run_id, self.lease))
            return Office(
                self.store,
                desk,
                record,
                self.charge.rate_per_s,
                tokens_per_min=self.charge.tokens_per_min,
            )
        if not self.charge.again:
            # Before anything is handed out; what nothing names and is old goes.
            with renewed(self.store, self.lease, LEASE_NS):
                spool_upkeep.check(self.store, record)
                spool_upkeep.sweep(self.store, record)
        log, board = open_run(self.store, record.run_id, self.lease)
        desk = Desk(board, log)
        office = Office(
            self.store,
            desk,
            record,
            self.charge.rate_per_s,
            same_driver=self.charge.again,
            tokens_per_min=self.charge.tokens_per_min,
        )
        office.start(same_driver=self.charge.again)
        # The log knows more than the record if the last service died between the two.
        if board.halted is not None:
            office.mark_halted(board.halted)
        elif board.cancelling or (record.cancel_requested_ns and not board.finished):
            office.cancel()
        return office

    def _accept(self) -> None:
        """Admit connections until the listener is closed, whatever becomes of one of them."""
        while not self._leaving.is_set():
            try:
                line, _ = self._listener.accept()
            except OSError as error:
                if self._listener.fileno() < 0 or error.errno in (errno.EBADF, errno.EINVAL):
                    return
                if error.errno in _EXHAUSTED:
                    # The connection stays in the backlog until there is room for it.
                    self._strangers.make_room()
                    self._leaving.wait(EXHAUSTED_S)
                continue
            if self._tls is not None:
                try:
                    line = tls.accepted(line, self._tls)
                except OSError:
                    continue  # gone before it began
            self._strangers.add(line)
            try:
                threading.Thread(target=self._converse, args=(line,), daemon=True).start()
            except RuntimeError:
                # There is no thread for it.
                self._strangers.remove(line)
                self._strangers.make_room()
                line.close()

    def _converse(self, line: socket.socket) -> None:
        """Admit a connection. With TLS this thread serves it; else all are read by one thread."""
        owner = ""
        try:
            wire.tune(line)
            line.settimeout(HELLO_S)
            if isinstance(line, ssl.SSLSocket):
                tls.handshake(line)
            owner = self._admit(line)
            line.settimeout(None)
            child = ChildLine(line, owner)
            if self._tls is None:
                self._lines.add(child)
                return
            while True:
                self._serve_one(child, *child.requests.next())
        except (OSError, HoldfastError):
            pass
        self._hang_up(line, owner)

    def _hang_up(self, line: socket.socket, owner: str) -> None:
        self._strangers.remove(line)
        with contextlib.suppress(OSError):
            line.close()
        if owner and not self._leaving.is_set():
            with contextlib.suppress(HoldfastError):
                self.office.gone(owner)

    def _post(self, child: ChildLine, request: Any, data: memoryview) -> bool:
        """Post a step to the writer of the log. False: it is another request."""
        if not isinstance(request, wire.Step) or not self.office.desk.has_board:
            return False
        child.sent = ReplyTicket(child.line)
        self.office.post_step(child.owner, request, data, child.sent)
        return True

    def _ended(self, child: ChildLine) -> None:
        """A connection that was read by the thread of all lines has ended."""
        if not self._leaving.is_set():
            self.office.post_gone(child.owner)
        if child.sent is not None:
            # Its reply is sent by another thread: not to a descriptor that is used again.
            child.sent.until_settled()
        self._strangers.remove(child.line)
        with contextlib.suppress(OSError):
            child.line.close()

    def _serve_one(self, child: ChildLine, request: Any, data: memoryview) -> None:
        try:
            answer, attached = self._answer(child.owner, request, data)
        except HoldfastError as error:
            answer, attached = wire.refused(error), b""
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            print(f"holdfast: {type(request).__name__}: {why}", file=sys.stderr, flush=True)
            told = StoreError(what=type(request).__name__, why=why)
            answer, attached = wire.refused(told), b""
        if len(attached) > wire.FRAME_BYTES_MAX:
            too_large = ValueTooLarge(what="answer", bytes=len(attached))
            answer, attached = wire.refused(too_large), b""
        wire.send(child.line, answer, attached)

    def _admit(self, line: socket.socket) -> str:
        hello, _ = wire.receive_request(line, HELLO_BYTES_MAX)
        if not isinstance(hello, wire.Hello) or not hmac.compare_digest(
            hello.token.encode(), self.charge.token.encode()
        ):
            wire.send(line, wire.refused(Invalid(what="token", why="not of this run")))
            raise Invalid(what="token", why="not of this run")
        self._strangers.remove(line)
        record = self.office.record
        # A child that connects again is another owner: what the old line held goes with that line.
        owner = f"{hello.owner}#{next(self._line_numbers)}"
        if owner.startswith("child/"):
            self.office.connected(owner)
        wire.send(line, wire.Welcome(record.run_id, record.size, record.policy.lease_ns))
        return owner

    def _answer(self, owner: str, request: Any, data: memoryview) -> tuple[wire.Message, bytes]:
        office = self.office
        if isinstance(request, _ABOUT_ROWS) and not office.desk.has_board:
            raise Invalid(what=type(request).__name__, why="the run has no input yet")
        if isinstance(request, wire.Step):
            return office.step(owner, request, data)
        if isinstance(request, wire.Beat):
            return office.beat(request.epochs), b""
        if isinstance(request, wire.ChildAlive):
            return office.keep(request.owner), b""
        if isinstance(request, wire.HandOver):
            return office.hand_over(request.owner), b""
        if isinstance(request, wire.Inherit):
            return office.inherit(owner, request.held)
        if isinstance(request, wire.Tokens):
            return office.tokens(request), b""
        if isinstance(request, wire.PutBlock):
            return office.put_block(data, request.in_order, request.at, request.sorted), b""
        if isinstance(request, wire.DropInput):
            return office.drop_input(), b""
        if isinstance(request, wire.Outcomes):
            return office.outcomes(request)
        if isinstance(request, wire.Status):
            return office.status(), b""
        if isinstance(request, wire.Seal):
            sealed = office.seal(request)
            self.begin_commit()
            return sealed, b""
        if isinstance(request, wire.Cancel):
            return office.cancel(), b""
        if isinstance(request, wire.Resume):
            return office.resume(), b""
        if isinstance(request, wire.Broken):
            return office.broken(from_wire(request.error)), b""
        if isinstance(request, wire.TakePart):
            return office.take_part(owner)
        if isinstance(request, wire.PartWritten):
            return office.part_written(owner, request.lo, request.parts), b""
        if isinstance(request, wire.PartFailed):
            return office.part_failed(owner, request.lo, from_wire(request.error)), b""
        if isinstance(request, wire.Leave):
            threading.Thread(target=self.leave, daemon=True).start()
            return wire.Ok(), b""
        raise Invalid(what="request", found=type(request).__name__)

    # --- time -----------------------------------------------------------------------------------

    def _pass_time(self) -> None:
        renew_ns = progress_ns = SYSTEM.mono_ns()
        while True:
            self.office.wait_for_time(TICK_S)
            if self._leaving.is_set():
                return
            if self.office.desk.error is not None:
                self._abandon(self.office.desk.error)
            self.office.tick()
            self._strangers.end_late()
            now_ns = SYSTEM.mono_ns()
            if now_ns - renew_ns >= RENEW_NS:
                renew_ns = now_ns
                self._renew()
            if now_ns - progress_ns >= PROGRESS_NS:
                progress_ns = now_ns
                self._publish()

    def _renew(self) -> None:
        [renewed] = self.store.transact(leases.renew, [self.lease], LEASE_NS)
        if renewed is None:
            self._abandon(Fenced(resource=self.lease.resource, held=self.lease.epoch))

    def _publish(self) -> None:
        """Show the figures, and see whether somebody asked for the end of it."""
        office = self.office
        if not office.desk.has_board or office.over:
            return
        office.publish()
        found = self.store.read(runs.get, office.record.run_id)
        if found is not None and found.cancel_requested_ns and not office.desk.board.cancelling:
            office.cancel()

    def _sink_failed(self, error: HoldfastError) -> None:
        self.office.sink_error = error

    def _abandon(self, error: HoldfastError) -> None:
        print(f"holdfast: the ledger service ends: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_FENCED)

    def _close(self) -> None:
        self._listener.close()
        if self.committer is not None:
            self.committer.stop()
        with contextlib.suppress(HoldfastError):
            if self.office.desk.has_board and self.office.desk.error is None:
                self._publish()
        self.office.desk.close()
        with contextlib.suppress(HoldfastError):
            self.store.transact(leases.release, self.lease)
        self.store.close()
        self._stopped.set()


def _discard_unfinished(store: Store, name: str, lease: leases.Lease) -> None:
    """A run that died over its input has no outcome: what it took in makes room for another."""
    found = store.read(runs.latest, name)
    if found is None or found.status is not runs.Status.INGESTING:
        return
    store.transact(_given_up, found, lease)
    with contextlib.suppress(HoldfastError):
        if found.spool:
            spool_upkeep.Deletion().delete(found)  # else it is a leftover
    while store.transact(_deleted, found.run_id, lease):
        pass


def _given_up(txn: Any, record: runs.RunRecord, lease: leases.Lease) -> None:
    """A run that came to nothing leaves its name to the run whose rows it was to take over."""
    txn.require_live(lease)
    runs.move(txn, record.run_id, runs.Event.CANCEL)
    if before := record.retry_of or record.base_run:
        runs.point(txn, record.name, before)


def _deleted(txn: Any, run_id: str, lease: leases.Lease) -> int:
    txn.require_live(lease)
    return runs.delete(txn, run_id, DELETE_ROWS)


def _retuned(txn: Any, run_id: str, policy: Policy, lease: leases.Lease) -> runs.RunRecord:
    txn.require_live(lease)
    record = msgspec.structs.replace(runs.the(txn, run_id), policy=policy)
    runs.put(txn, record)
    return record


def _create(txn: Any, record: runs.RunRecord, lease: leases.Lease) -> None:
    txn.require_live(lease)
    runs.create(txn, record)


def _acquire(store: Store, name: str) -> leases.Lease:
    """The run's lease; another driver's is waited for as long as a dead one's could last."""
    incarnation = SYSTEM.entropy(8).hex()
    until_ns = SYSTEM.mono_ns() + LEASE_NS + 1_000_000_000
    while True:
        try:
            found: leases.Lease = store.transact(
                leases.acquire,
                runs.lease_resource(name),
                f"ledger-{os.getpid()}",
                incarnation,
                LEASE_NS,
            )
            return found
        except Held as held:
            if SYSTEM.mono_ns() >= until_ns:
                raise runs.RunAtWork(name=name, worker=held.worker) from None
            SYSTEM.sleep(0.05)


def _raise_file_limit() -> None:
    """As many descriptors as the system allows: each child has a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listen(charge: Charge) -> socket.socket:
    host, port = charge.bind or charge.host, charge.port
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        what = "bind" if charge.bind else "ledger_host"
        raise Invalid(what=what, host=host, port=port, why=_why_not(charge, error)) from None
    listener.listen(BACKLOG)
    return listener


def _why_not(charge: Charge, error: OSError) -> str:
    if error.errno == errno.EADDRNOTAVAIL and not charge.bind:
        return f"{error.strerror}; bind= says where to listen, ledger_host= where executors connect"
    return error.strerror or str(error)


def _tell(answers: BinaryIO, ready: Ready) -> None:
    answers.write(msgspec.json.encode(ready) + b"\n")
    answers.flush()


def _until_alone(source: BinaryIO, service: Service) -> None:
    while source.read(4096):
        pass
    service.drain()
    service.leave()
    os._exit(0)


if __name__ == "__main__":
    main()
