"""The ledger service process: `python -m holdfast.spark.service`, one per active run.

It holds the run's lease and is the only writer of the run. The driver starts it with a `ServiceConfig` on
standard input and keeps that pipe open. End of file means that the driver has exited: the service then
grants no more rows, accepts the remaining reports, commits them, releases the lease and exits. On standard
output it reports its port, or its startup error.

The driver may also end a run with `END_OF_RUN`. The process then waits for the configuration of the next
run, because loading its modules takes longer than a small run. A process that still has a thread of the last
run, or that has grown, exits instead.

Threads: one that reads all connections, a pool for blocking requests, one for the log, one for the commit,
one that renews the lease and processes deadlines. With TLS each connection has a separate thread. A service
that loses its lease, or that cannot write its log, exits at once: it no longer owns the run.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import itertools
import os
import queue
import resource
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
from holdfast.ledger.lease_renewal import renew_in_background
from holdfast.ledger.log import RunLog, open_run
from holdfast.ledger.run_policy import RunPolicy
from holdfast.spark import ledger_protocol, spool_maintenance, tls
from holdfast.spark.child_connections import ChildConnection, ConnectionReader
from holdfast.spark.output_commit import OutputCommitter
from holdfast.spark.part_cuts import FILE_BYTES
from holdfast.spark.process_state import ProcessState, set_environment
from holdfast.spark.reply_ticket import ReplyTicket
from holdfast.spark.run_data import warm_up_arrow
from holdfast.spark.service_listener import listen
from holdfast.spark.service_log_writer import ServiceLogWriter
from holdfast.spark.service_requests import ServiceRequests
from holdfast.spark.sinks import (
    open_sink,
    parquet,  # noqa: F401  loaded before the first commit needs it
)
from holdfast.spark.sinks.object_store import keep_options
from holdfast.spark.spool import check_usable
from holdfast.spark.unauthenticated import HELLO_S, UnauthenticatedConnections
from holdfast.store import open as open_store
from holdfast.store.api import Store
from holdfast.wire_frames import ConnectionEnded, FrameFormat, read_frame

# Duration of the run's lease: the longest wait for a driver that died with its service.
RUN_LEASE_NS = 4_000_000_000
TICK_S = 0.1
LEASE_RENEW_NS = 1_000_000_000
PUBLISH_NS = 2_000_000_000
# Slightly longer than children need to finish their begun calls.
DRAIN_NS = 2_500_000_000
HELLO_BYTES_MAX = 4096
# Delay of the accept loop when descriptors or memory are exhausted.
ACCEPT_DELAY_S = 0.05
# A block has megabytes, so a transaction deletes only a few rows.
DELETE_ROWS = 8
EXIT_FENCED = 76
SPARE_IDLE_S = 300.0
# The configuration on standard input, and the frame that ends a finished run.
CONFIG_FRAMES = FrameFormat("<I", ledger_protocol.FRAME_BYTES_MAX)
END_OF_RUN = b""
ANOTHER_DRIVER_WHY = "another driver was faster; run it again, it resumes that run"


_EXHAUSTED_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NEEDS_INPUT = (
    ledger_protocol.Exchange
    | ledger_protocol.InheritGrant
    | ledger_protocol.FetchOutcomes
    | ledger_protocol.CancelRun
    | ledger_protocol.ResumeRun
    | ledger_protocol.RequestPart
)


class ServiceConfig(msgspec.Struct, frozen=True):
    """The configuration from the driver. `record` is the existing run, or a new one to create."""

    store: str
    token: str
    host: str
    port: int
    record: bytes
    is_new_run: bool
    # The same driver restarts its service, so grants stay valid. Otherwise they belong to a dead
    # driver.
    is_restart: bool
    file_rows: int
    rate_per_s: float
    tokens_per_min: float = 0.0
    # Spark tasks of this driver write the files of the output, if data and sink allow it.
    executors_write: bool = False
    # For a new run: the latest run of the name that the driver saw.
    expected_latest: str = ""
    # Module search path of the driver: a sink may be in one of these modules.
    paths: list[str] = []
    file_bytes: int = FILE_BYTES
    # Storage options (credentials) by URL. They are passed to this process and not stored.
    storage_options: dict[str, dict[str, str]] = {}
    # Listening address, if it differs from the advertised host.
    bind: str = ""
    # With TLS: files of the service's certificate and key, and the authority's certificate.
    cert: str = ""
    key: str = ""
    ca: str = ""
    # The environment of the driver: an idle process was started earlier. In bytes: a value need not be UTF-8.
    environment: dict[bytes, bytes] = {}


class StartupReply(msgspec.Struct, frozen=True):
    port: int
    error: list[Any] | None = None


# The reply to `END_OF_RUN`: the process waits for another configuration.
IDLE = StartupReply(0)


def main() -> None:
    # Ctrl-C is for the driver, which then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _raise_file_limit()
    source, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    threading.Thread(target=_preload_modules, daemon=True).start()
    messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_read_messages, args=(source, messages), daemon=True).start()
    while (message := _next_message(messages)) is not None:
        try:
            _serve_run(msgspec.msgpack.decode(message, type=ServiceConfig), messages, answers)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    # Exit at once, here and elsewhere: threads still block on the pipe and on claims, and the interpreter
    # would join them.
    os._exit(0)


def _read_messages(source: BinaryIO, messages: queue.SimpleQueue[bytes | None]) -> None:
    """Read the frames of the driver. None: the driver has exited."""
    with contextlib.suppress(ConnectionEnded):
        while (frame := read_frame(source, CONFIG_FRAMES)) is not None:
            messages.put(frame[0])
    messages.put(None)


def _next_message(messages: queue.SimpleQueue[bytes | None]) -> bytes | None:
    """Wait for the next configuration. None: the driver has exited, or the process is not used."""
    try:
        return messages.get(timeout=SPARE_IDLE_S)
    except queue.Empty:
        return None


def _serve_run(
    config: ServiceConfig, messages: queue.SimpleQueue[bytes | None], answers: BinaryIO
) -> None:
    """Serve a run until its end. Returns if this process can serve another one."""
    before = ProcessState.now()
    if config.environment:
        set_environment(config.environment)
    try:
        service = LedgerService(config)
    except HoldfastError as error:
        _send_startup_reply(answers, StartupReply(0, ledger_protocol.error_reply(error).error))
        os._exit(1)
    _send_startup_reply(answers, StartupReply(service.port))
    ending = threading.Thread(target=_wait_for_run_end, args=(messages, service), daemon=True)
    ending.start()
    service.serve()
    if not service.is_finished_by_driver:
        os._exit(0)
    ending.join()
    if not before.restore():
        os._exit(0)
    with contextlib.suppress(BrokenPipeError):  # the driver was killed
        _send_startup_reply(answers, IDLE)


def _preload_modules() -> None:
    """Import the modules of the first requests while the process is a spare. Most runs have an
    embedded store.
    """
    import holdfast.store.lmdb.store  # noqa: F401

    warm_up_arrow()


class LedgerService:
    def __init__(self, config: ServiceConfig, store: Store | None = None) -> None:
        """Without a store the service opens the one of its config. It closes the store when it stops."""
        self.config = config
        record = codec.unpack_as(runs.RunRecord, config.record)
        self._tls = tls.server_context(config.cert, config.key) if config.cert else None
        self._listener = listen(config.host, config.port, config.bind)
        self.port = int(self._listener.getsockname()[1])
        sys.path += [path for path in config.paths if path not in sys.path]
        for url, options in config.storage_options.items():
            keep_options(url, options)
        if record.sink:
            open_sink(record.sink)  # fail at startup if it cannot be opened
        self.store = open_store(config.store) if store is None else store
        try:
            self.lease = _acquire_lease(self.store, record.name)
            try:
                self.requests = self._open_run(record)
            except BaseException:
                with contextlib.suppress(HoldfastError):
                    self.store.transact(leases.release, self.lease)
                raise
        except BaseException:
            self.store.close()
            raise
        self._connection_numbers = itertools.count(1)
        self._connections = ConnectionReader(
            self._post_exchange, self._serve_request, self._on_closed
        )
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        # The driver has ended the run and keeps this process.
        self.is_finished_by_driver = False
        self.committer: OutputCommitter | None = None
        self._committing = threading.Lock()
        self._unauthenticated = UnauthenticatedConnections()

    def serve(self) -> None:
        # Before any request: a seal under way has a scheduler and starts its commit itself.
        if self.requests.log_writer.has_scheduler:
            self.start_commit()
        threading.Thread(target=self._accept, name="accept", daemon=True).start()
        try:
            self._tick_loop()
        finally:
            self._close()

    def drain(self) -> None:
        """Grant no more rows. Wait for the reports of calls under way."""
        requests = self.requests
        with requests.log_writer.lock:
            requests.drain()
            until_ns = SYSTEM.mono_ns() + DRAIN_NS
            while requests.has_running_rows() and (left_ns := until_ns - SYSTEM.mono_ns()) > 0:
                requests.log_writer.changed.wait(left_ns / 1e9)

    def stop(self) -> bool:
        """Shut down gracefully. Returns whether the shutdown is complete."""
        self._stopping.set()
        self.requests.wake_timer()
        return self._stopped.wait(timeout=30)

    def start_commit(self) -> None:
        with self._committing:
            if self.committer is None:
                spec = self.requests.record.sink
                sink = open_sink(spec) if spec else None
                # The driver writes its output after all rows have ended.
                sink = None if getattr(sink, "in_driver", False) else sink
                self.committer = OutputCommitter(
                    self.requests,
                    sink,
                    self.config.file_rows,
                    self.config.file_bytes,
                    self._on_sink_failed,
                    executors_write=self.config.executors_write,
                )
                self.committer.start()

    # --- starting -------------------------------------------------------------------------------

    def _open_run(self, record: runs.RunRecord) -> ServiceRequests:
        if self.config.is_new_run:
            latest = self.store.read(runs.get_latest, record.name)
            if (latest.run_id if latest else "") != self.config.expected_latest:
                raise Conflict(what="run", name=record.name, why=ANOTHER_DRIVER_WHY)
            _delete_unfinished(self.store, record.name, self.lease)
            with renew_in_background(self.store, self.lease, RUN_LEASE_NS):
                if record.spool:
                    check_usable(record)
                    spool_maintenance.sweep_leftovers(self.store)
                if record.base_run:
                    spool_maintenance.check_reuse_sources(self.store, record)
            self.store.transact(_create_run, record, self.lease)
        else:
            latest_run = self.store.read(runs.get_latest, record.name)
            if latest_run is not None and latest_run.base_run == record.run_id:
                # The run died during ingest, and this driver resumes the run before it.
                _delete_unfinished(self.store, record.name, self.lease)
                latest_run = self.store.read(runs.get_latest, record.name)
            if latest_run is None or latest_run.run_id != record.run_id:
                raise Conflict(what="run", name=record.name, why=ANOTHER_DRIVER_WHY)
            if latest_run.policy != record.policy and latest_run.status in runs.UNFINISHED:
                latest_run = self.store.transact(
                    _change_policy, latest_run.run_id, record.policy, self.lease
                )
            record = latest_run
        if record.status is runs.RunLifecycle.INGESTING:
            log_writer = ServiceLogWriter(None, RunLog(self.store, record.run_id, self.lease))
            return ServiceRequests(
                self.store,
                log_writer,
                record,
                self.config.rate_per_s,
                tokens_per_min=self.config.tokens_per_min,
            )
        if not self.config.is_restart:
            # Before any grant: check the spool and delete old unreferenced objects.
            with renew_in_background(self.store, self.lease, RUN_LEASE_NS):
                spool_maintenance.check_objects(self.store, record)
                spool_maintenance.sweep_run(self.store, record)
        log, scheduler = open_run(self.store, record.run_id, self.lease)
        log_writer = ServiceLogWriter(scheduler, log)
        requests = ServiceRequests(
            self.store,
            log_writer,
            record,
            self.config.rate_per_s,
            same_driver=self.config.is_restart,
            tokens_per_min=self.config.tokens_per_min,
        )
        requests.continue_run(same_driver=self.config.is_restart)
        # The log is ahead of the record if the last service died between the two writes.
        if scheduler.halted is not None:
            requests.mark_halted(scheduler.halted)
        elif scheduler.cancelling or (record.cancel_requested_ns and not scheduler.finished):
            requests.cancel()
        return requests

    def _accept(self) -> None:
        """Accept connections until the listener is closed. Errors of a single connection are
        ignored.
        """
        while not self._stopping.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._listener.fileno() < 0 or error.errno in (errno.EBADF, errno.EINVAL):
                    return
                if error.errno in _EXHAUSTED_ERRNOS:
                    # The connection stays in the backlog until resources are free.
                    self._unauthenticated.close_oldest()
                    self._stopping.wait(ACCEPT_DELAY_S)
                continue
            if self._tls is not None:
                try:
                    sock = tls.wrap_accepted(sock, self._tls)
                except OSError:
                    continue  # closed before the handshake
            self._unauthenticated.add(sock)
            try:
                threading.Thread(target=self._serve_connection, args=(sock,), daemon=True).start()
            except RuntimeError:
                # No thread can be started.
                self._unauthenticated.remove(sock)
                self._unauthenticated.close_oldest()
                sock.close()

    def _serve_connection(self, sock: socket.socket) -> None:
        """Authenticate a connection. With TLS this thread serves it; else the reader thread does."""
        owner = ""
        try:
            ledger_protocol.set_socket_options(sock)
            sock.settimeout(HELLO_S)
            if isinstance(sock, ssl.SSLSocket):
                tls.handshake(sock)
            owner = self._authenticate(sock)
            sock.settimeout(None)
            child = ChildConnection(sock, owner)
            if self._tls is None:
                self._connections.add(child)
                return
            while True:
                self._serve_request(child, *child.requests.wait_next())
        except (OSError, HoldfastError):
            pass
        self._close_connection(sock, owner)

    def _close_connection(self, sock: socket.socket, owner: str) -> None:
        self._unauthenticated.remove(sock)
        with contextlib.suppress(OSError):
            sock.close()
        if owner and not self._stopping.is_set():
            with contextlib.suppress(HoldfastError):
                self.requests.on_disconnect(owner)

    def _post_exchange(self, child: ChildConnection, request: Any, data: memoryview) -> bool:
        """Post an exchange to the log writer. Return False for any other request."""
        if (
            not isinstance(request, ledger_protocol.Exchange)
            or not self.requests.log_writer.has_scheduler
        ):
            return False
        child.last_ticket = ReplyTicket(child.sock)
        self.requests.post_exchange(child.owner, request, data, child.last_ticket)
        return True

    def _on_closed(self, child: ChildConnection) -> None:
        """Clean up a connection of the reader thread that has closed."""
        if not self._stopping.is_set():
            self.requests.post_disconnect(child.owner)
        if child.last_ticket is not None:
            # Another thread sends the reply: wait, so that it does not write to a reused
            # descriptor.
            child.last_ticket.wait_settled()
        self._unauthenticated.remove(child.sock)
        with contextlib.suppress(OSError):
            child.sock.close()

    def _serve_request(self, child: ChildConnection, request: Any, data: memoryview) -> None:
        try:
            answer, attached = self._dispatch(child.owner, request, data)
        except HoldfastError as error:
            answer, attached = ledger_protocol.error_reply(error), b""
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            print(f"holdfast: {type(request).__name__}: {why}", file=sys.stderr, flush=True)
            store_error = StoreError(what=type(request).__name__, why=why)
            answer, attached = ledger_protocol.error_reply(store_error), b""
        if len(attached) > ledger_protocol.FRAME_BYTES_MAX:
            too_large = ValueTooLarge(what="answer", bytes=len(attached))
            answer, attached = ledger_protocol.error_reply(too_large), b""
        ledger_protocol.send(child.sock, answer, attached)

    def _authenticate(self, sock: socket.socket) -> str:
        hello, _ = ledger_protocol.receive_request(sock, HELLO_BYTES_MAX)
        if not isinstance(hello, ledger_protocol.Hello) or not hmac.compare_digest(
            hello.token.encode(), self.config.token.encode()
        ):
            ledger_protocol.send(
                sock, ledger_protocol.error_reply(Invalid(what="token", why="not of this run"))
            )
            raise Invalid(what="token", why="not of this run")
        self._unauthenticated.remove(sock)
        record = self.requests.record
        # A reconnected child is a new owner. The grants of the old connection end with it.
        owner = f"{hello.owner}#{next(self._connection_numbers)}"
        if owner.startswith("child/"):
            self.requests.on_connect(owner)
        ledger_protocol.send(
            sock, ledger_protocol.HelloReply(record.run_id, record.size, record.policy.lease_ns)
        )
        return owner

    def _dispatch(
        self, owner: str, request: Any, data: memoryview
    ) -> tuple[ledger_protocol.WireMessage, bytes]:
        requests = self.requests
        if isinstance(request, _NEEDS_INPUT) and not requests.log_writer.has_scheduler:
            raise Invalid(what=type(request).__name__, why="the run has no input yet")
        if isinstance(request, ledger_protocol.Exchange):
            return requests.handle_exchange(owner, request, data)
        if isinstance(request, ledger_protocol.ServiceHeartbeat):
            return requests.heartbeat(request.epochs), b""
        if isinstance(request, ledger_protocol.RenewChild):
            return requests.keep_child(request.owner), b""
        if isinstance(request, ledger_protocol.AnnounceHandover):
            return requests.hand_over(request.owner), b""
        if isinstance(request, ledger_protocol.InheritGrant):
            return requests.inherit(owner, request.known_epochs)
        if isinstance(request, ledger_protocol.AcquireTokens):
            return requests.acquire_tokens(request), b""
        if isinstance(request, ledger_protocol.PutBlock):
            return requests.blocks.put(
                data, request.in_order, request.spool_block, request.sorted
            ), b""
        if isinstance(request, ledger_protocol.DropInput):
            return requests.drop_input(), b""
        if isinstance(request, ledger_protocol.FetchOutcomes):
            return requests.outcomes(request)
        if isinstance(request, ledger_protocol.GetRunStatus):
            return requests.status(), b""
        if isinstance(request, ledger_protocol.SealInput):
            sealed = requests.seal(request)
            self.start_commit()
            return sealed, b""
        if isinstance(request, ledger_protocol.CancelRun):
            return requests.cancel(), b""
        if isinstance(request, ledger_protocol.ResumeRun):
            return requests.resume(), b""
        if isinstance(request, ledger_protocol.ReportBroken):
            return requests.report_broken(from_wire(request.error)), b""
        if isinstance(request, ledger_protocol.RequestPart):
            return requests.assign_part(owner)
        if isinstance(request, ledger_protocol.PartWritten):
            return requests.part_written(owner, request.lo, request.parts), b""
        if isinstance(request, ledger_protocol.PartFailed):
            return requests.part_failed(owner, request.lo, from_wire(request.error)), b""
        if isinstance(request, ledger_protocol.ShutdownService):
            threading.Thread(target=self.stop, daemon=True).start()
            return ledger_protocol.Ok(), b""
        raise Invalid(what="request", found=type(request).__name__)

    # --- time -----------------------------------------------------------------------------------

    def _tick_loop(self) -> None:
        renew_ns = progress_ns = SYSTEM.mono_ns()
        while True:
            self.requests.wait_for_deadline(TICK_S)
            if self._stopping.is_set():
                return
            if self.requests.log_writer.error is not None:
                self._exit_fenced(self.requests.log_writer.error)
            self.requests.tick()
            self._unauthenticated.close_expired()
            now_ns = SYSTEM.mono_ns()
            if now_ns - renew_ns >= LEASE_RENEW_NS:
                renew_ns = now_ns
                self._renew_lease()
            if now_ns - progress_ns >= PUBLISH_NS:
                progress_ns = now_ns
                self._publish()

    def _renew_lease(self) -> None:
        [renewed] = self.store.transact(leases.renew, [self.lease], RUN_LEASE_NS)
        if renewed is None:
            self._exit_fenced(Fenced(resource=self.lease.resource, held=self.lease.epoch))

    def _publish(self) -> None:
        """Publish the metrics, and check for a cancel request in the store."""
        requests = self.requests
        if not requests.log_writer.has_scheduler or requests.is_over:
            return
        requests.publish()
        stored_run = self.store.read(runs.get_record, requests.record.run_id)
        if (
            stored_run is not None
            and stored_run.cancel_requested_ns
            and not requests.log_writer.scheduler.cancelling
        ):
            requests.cancel()

    def _on_sink_failed(self, error: HoldfastError) -> None:
        self.requests.sink_error = error

    def _exit_fenced(self, error: HoldfastError) -> None:
        print(f"holdfast: the ledger service ends: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_FENCED)

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the `accept` under way
        self._listener.close()
        if self.committer is not None:
            self.committer.stop()
        with contextlib.suppress(HoldfastError):
            if self.requests.log_writer.has_scheduler and self.requests.log_writer.error is None:
                self._publish()
        self.requests.log_writer.close()
        with contextlib.suppress(HoldfastError):
            self.store.transact(leases.release, self.lease)
        self.store.close()
        self._connections.close()
        self._stopped.set()


def _delete_unfinished(store: Store, name: str, lease: leases.Lease) -> None:
    """Delete a run that died during ingest. It has no outcomes."""
    unfinished = store.read(runs.get_latest, name)
    if unfinished is None or unfinished.status is not runs.RunLifecycle.INGESTING:
        return
    store.transact(_cancel_unfinished, unfinished, lease)
    with contextlib.suppress(HoldfastError):
        if unfinished.spool:
            spool_maintenance.SpoolDeletion().delete(unfinished)  # else a later sweep deletes it
    while store.transact(_delete_rows, unfinished.run_id, lease):
        pass


def _cancel_unfinished(txn: Any, record: runs.RunRecord, lease: leases.Lease) -> None:
    """Cancel an unfinished run and point its name to the run from which it was to adopt rows."""
    txn.require_live(lease)
    runs.change_status(txn, record.run_id, runs.RunEvent.CANCEL)
    if previous := record.retry_of or record.base_run:
        runs.set_latest(txn, record.name, previous)


def _delete_rows(txn: Any, run_id: str, lease: leases.Lease) -> int:
    txn.require_live(lease)
    return runs.delete_rows(txn, run_id, DELETE_ROWS)


def _change_policy(txn: Any, run_id: str, policy: RunPolicy, lease: leases.Lease) -> runs.RunRecord:
    txn.require_live(lease)
    record = msgspec.structs.replace(runs.get_existing(txn, run_id), policy=policy)
    runs.put_record(txn, record)
    return record


def _create_run(txn: Any, record: runs.RunRecord, lease: leases.Lease) -> None:
    txn.require_live(lease)
    runs.create(txn, record)


def _acquire_lease(store: Store, name: str) -> leases.Lease:
    """Acquire the run's lease. Wait for another driver's lease as long as a dead driver's could
    last.
    """
    incarnation = SYSTEM.entropy(8).hex()
    until_ns = SYSTEM.mono_ns() + RUN_LEASE_NS + 1_000_000_000
    while True:
        try:
            lease: leases.Lease = store.transact(
                leases.acquire,
                runs.lease_resource(name),
                f"ledger-{os.getpid()}",
                incarnation,
                RUN_LEASE_NS,
            )
            return lease
        except Held as held:
            if SYSTEM.mono_ns() >= until_ns:
                raise runs.RunAtWork(name=name, worker=held.worker) from None
            SYSTEM.sleep(0.05)


def _raise_file_limit() -> None:
    """Raise the limit of descriptors to its maximum: each child has a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _send_startup_reply(answers: BinaryIO, ready: StartupReply) -> None:
    answers.write(msgspec.json.encode(ready) + b"\n")
    answers.flush()


def _wait_for_run_end(messages: queue.SimpleQueue[bytes | None], service: LedgerService) -> None:
    """Stop the service when the driver has finished the run or has exited."""
    service.is_finished_by_driver = messages.get() == END_OF_RUN
    service.drain()
    if not service.stop() or not service.is_finished_by_driver:
        os._exit(0)


if __name__ == "__main__":
    main()
