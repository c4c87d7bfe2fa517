"""The service supervisor: the driver starts the ledger service, sends requests to it and restarts
it.

The process of a finished run serves the next run of this driver.

A restarted service listens at the same address with the same token, so tasks reconnect without new
settings. The supervisor knows for certain that the predecessor is dead (it was a child process), so it
releases the predecessor's lease at once.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import subprocess
import sys
import threading
from typing import Any

import msgspec
from msgspec.structs import replace

from holdfast import codec
from holdfast.child_process import ChildPool, SpawnedChild
from holdfast.clock import SYSTEM
from holdfast.durable import lease as leases
from holdfast.errors import HoldfastError, from_wire
from holdfast.ledger import runs
from holdfast.spark import ledger_protocol
from holdfast.spark.errors import RunFailed
from holdfast.spark.ledger_client import LedgerClient, ServiceAddress, ServiceLost
from holdfast.spark.service import CONFIG_FRAMES, END_OF_RUN, ServiceConfig, StartupReply
from holdfast.spark.sinks.api import KINDS
from holdfast.store.api import Store, Txn

RESTARTS_MAX = 10
STOP_TIMEOUT_S = 20.0
REPLY_RETRY_NS = 30_000_000_000
# How long to retry the connection before checking the process.
RECONNECT_S = 0.2
REPLY_TIMEOUT_S = 20.0
WATCH_INTERVAL_S = 0.5
# Loopback addresses for a service that listens on all interfaces.
LOOPBACK_OF_WILDCARD = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class ServiceSupervisor:
    def __init__(self, store: Store, config: ServiceConfig) -> None:
        self.store = store
        self.config = config
        self.restarts = 0
        self._position = b""
        self._restarts_in_a_row = 0
        self._process: ServiceProcess | None = None
        self._client: LedgerClient | None = None
        self._lock = threading.RLock()
        self._stopped = False
        # The service has reported the end of the run.
        self._is_over = False
        self._driver_pid = os.getpid()
        self._start(config)

    @property
    def address(self) -> ServiceAddress:
        """The address that executors use."""
        return ServiceAddress(self.config.host, self.config.port, self.config.token, self.config.ca)

    @property
    def local_address(self) -> ServiceAddress:
        """The address that this machine uses: the advertised host may resolve only elsewhere."""
        listens = self.config.bind or self.config.host
        near = LOOPBACK_OF_WILDCARD.get(listens, listens)
        return replace(self.address, host=near, name=self.config.host)

    @property
    def run_id(self) -> str:
        return codec.unpack_as(runs.RunRecord, self.config.record).run_id

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def request(self, message: ledger_protocol.WireMessage) -> Any:
        """Send one request. If the service has died, restart it first."""
        retry_until_ns = SYSTEM.mono_ns() + REPLY_RETRY_NS
        # Sealing may have to sort the whole input.
        reply_timeout_s = (
            None if isinstance(message, ledger_protocol.SealInput) else REPLY_TIMEOUT_S
        )
        replaced = False
        with self._lock:
            while True:
                self._restart_if_dead()
                assert self._client is not None
                self._client.set_reply_timeout(reply_timeout_s)
                try:
                    answer, _ = self._client.request(message)
                    self._track_progress(answer)
                    return answer
                except ServiceLost:
                    # The service was killed, or only the connection broke.
                    if self._stopped:
                        raise
                    if SYSTEM.mono_ns() >= retry_until_ns:
                        if replaced or self._process is None:
                            raise
                        # The service runs but does not reply: replace it.
                        self._process.kill()
                        self._process.process.wait()
                        replaced = True
                        retry_until_ns = SYSTEM.mono_ns() + REPLY_RETRY_NS
                except HoldfastError:
                    if self._process is not None and self._process.is_alive():
                        raise

    def _track_progress(self, answer: Any) -> None:
        """Reset the count of consecutive restarts when the run has progressed."""
        if not isinstance(answer, ledger_protocol.RunStatusReply):
            return
        self._is_over = answer.over
        if answer.position != self._position:
            if self._position:
                self._restarts_in_a_row = 0
            self._position = answer.position

    def start_watch(self) -> None:
        """Start a thread that keeps the service alive without requests from the driver."""
        threading.Thread(
            target=self._watch_loop, name="ledger-service-supervisor", daemon=True
        ).start()

    def _watch_loop(self) -> None:
        while not self._stopped:
            with contextlib.suppress(HoldfastError):
                self.request(ledger_protocol.GetRunStatus())
            SYSTEM.sleep(WATCH_INTERVAL_S)

    def stop(self) -> None:
        """Stop the service gracefully and wait until its process has exited. Its state is durable, its
        lease is released.
        """
        process = self._take_process()
        if process is not None:
            process.discard()

    def release(self, *, wait: bool) -> None:
        """End the run gracefully, like `stop`, and keep the process for the next run if possible. With
        `wait` the lease is released when this returns.
        """
        process = self._take_process()
        if process is None:
            return
        is_kept = self._has_builtin_sink() and not _services.is_full and process.end_run()
        if is_kept and (not wait or process.wait_idle()):
            _services.put(process)
            _discard_idle_at_exit()
        elif wait:
            process.discard()
        else:
            process.discard_in_background()

    def _take_process(self) -> ServiceProcess | None:
        """Send no more requests. Return the process, if there is one."""
        if os.getpid() != self._driver_pid:
            return None  # a forked child: the service belongs to the parent
        self._stopped = True
        if self._client is not None:
            self._client.close()
        with self._lock:
            process, self._process = self._process, None
        return process

    def __enter__(self) -> ServiceSupervisor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None and self._is_over:
            self.release(wait=False)
        elif kind is None:
            # Children may still call rows: do not wait for them.
            if (process := self._take_process()) is not None:
                process.discard_in_background()
        elif issubclass(kind, Exception):
            self.release(wait=True)
        else:
            self.stop()

    def _has_builtin_sink(self) -> bool:
        """Whether the service has imported no module of the user, which may change before the next run."""
        sink = codec.unpack_as(runs.RunRecord, self.config.record).sink
        return not sink or sink.get("kind") in KINDS

    def _restart_if_dead(self) -> None:
        if self._stopped or self._process is None:
            raise ServiceLost(why="the supervisor has stopped")
        status = self._process.process.poll()
        if status is None:
            return
        if self._restarts_in_a_row >= RESTARTS_MAX:
            raise RunFailed(why="the ledger service died too often", exit_status=status)
        self.restarts += 1
        self._restarts_in_a_row += 1
        record = codec.unpack_as(runs.RunRecord, self.config.record)
        self._release_dead_lease(record.name, self._process.pid)
        self._start(replace(self.config, is_new_run=False, is_restart=True))

    def _release_dead_lease(self, name: str, pid: int) -> None:
        """Release the lease of a service that is known to be dead."""
        resource = runs.lease_resource(name)
        self.store.transact(_release_lease_of, resource, f"ledger-{pid}")

    def _start(self, config: ServiceConfig) -> None:
        if self._client is not None:
            self._client.close()
        message = msgspec.msgpack.encode(replace(config, environment=dict(os.environb)))
        while True:
            process = _take_idle_service()
            with contextlib.suppress(OSError):
                process.stdin.write(CONFIG_FRAMES.encode(message))
                process.stdin.flush()
            line = process.stdout.readline()
            status = None if line else process.process.wait()
            if status != 0:
                break
            # Its idle time ended before it read the message.
            process.discard()
        if status is not None:
            raise RunFailed(why="the ledger service did not start", exit_status=status)
        reply = msgspec.json.decode(line, type=StartupReply)
        if reply.error is not None:
            process.process.wait()
            raise from_wire(reply.error)
        self._process = process
        self.config = replace(config, port=reply.port)
        self._client = LedgerClient(self.local_address, "driver", reconnect_s=RECONNECT_S)


class ServiceProcess(SpawnedChild):
    """A process of the ledger service. It waits a few minutes for each configuration, and exits when this
    process closes its pipe or ends.
    """

    def __init__(self) -> None:
        super().__init__(
            [sys.executable, "-m", "holdfast.spark.service"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        # The process has not reported the end of its last run yet.
        self._is_ending = False

    def end_run(self) -> bool:
        """End the run. The process then waits for the next one. False if it has exited."""
        try:
            self.stdin.write(CONFIG_FRAMES.encode(END_OF_RUN))
            self.stdin.flush()
        except OSError:
            return False
        self._is_ending = True
        return True

    def wait_idle(self) -> bool:
        """Wait until the last run has ended. False if the process has exited instead or does not end it."""
        if not self._is_ending:
            return True
        self._is_ending = False
        # Not `select`: it refuses descriptors above 1023.
        poll = select.poll()
        poll.register(self.stdout, select.POLLIN)
        return bool(poll.poll(STOP_TIMEOUT_S * 1000) and self.stdout.readline())

    def close_input(self) -> None:
        """Let the service stop gracefully."""
        with contextlib.suppress(OSError):
            self.stdin.close()

    def discard(self) -> None:
        self.close_input()
        self.end(STOP_TIMEOUT_S)

    def discard_in_background(self) -> None:
        self.close_input()
        threading.Thread(target=self.discard, name="ledger-service-discard").start()


# One process that served a run, and one that was started for the next.
_services = ChildPool(ServiceProcess, idle_max=2)


def _take_idle_service() -> ServiceProcess:
    """Take an idle service, or start one."""
    while not (process := _services.take()).wait_idle():
        process.discard()
    return process


def prestart_service() -> None:
    """Start a spare service for the next run: most of its startup time is loading modules."""
    _services.prestart()
    _discard_idle_at_exit()


def _discard_idle_at_exit() -> None:
    atexit.unregister(_services.discard_idle)
    atexit.register(_services.discard_idle)


def _release_lease_of(txn: Txn, resource: str, worker: str) -> None:
    """Release the lease only if this worker still holds it: another one may have acquired it."""
    lease = leases.current_status(txn, resource)
    if lease is not None and lease.worker == worker:
        leases.force_release(txn, resource, "its process died")


def new_token() -> str:
    return SYSTEM.entropy(24).hex()
