"""The driver's side of the ledger service: starts it, asks it, starts it again when it dies.

A service that is started again listens at the same address under the same token, so tasks find it
without being told. That its predecessor is dead is known here for certain (it was our child), so
its lease need not run out first.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import threading
from typing import Any

import msgspec
from msgspec.structs import replace

from holdfast import codec
from holdfast.clock import SYSTEM
from holdfast.durable import lease as leases
from holdfast.errors import HoldfastError, from_wire
from holdfast.ledger import runs
from holdfast.spark import wire
from holdfast.spark.client import Address, Client, ServiceLost
from holdfast.spark.errors import RunFailed
from holdfast.spark.service import Charge, Ready
from holdfast.store.api import Store, Txn

RESTARTS_MAX = 10
LEAVE_S = 20.0
PATIENCE_NS = 30_000_000_000
# The line is tried again so long before the process is looked at.
LOOK_S = 0.2
ANSWER_S = 20.0
WATCH_S = 0.5
# Where a service that listens everywhere is reached from its own machine.
ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Keeper:
    def __init__(self, store: Store, charge: Charge) -> None:
        self.store = store
        self.charge = charge
        self.restarts = 0
        self._position = b""
        self._in_a_row = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._client: Client | None = None
        self._turn = threading.RLock()
        self._left = False
        self._pid = os.getpid()
        self._start(charge)

    @property
    def address(self) -> Address:
        """Where executors reach the service."""
        return Address(self.charge.host, self.charge.port, self.charge.token, self.charge.ca)

    @property
    def own_address(self) -> Address:
        """Where this machine does: the advertised host may be known to others only."""
        listens = self.charge.bind or self.charge.host
        near = ANY.get(listens, listens)
        return replace(self.address, host=near, name=self.charge.host)

    @property
    def run_id(self) -> str:
        return codec.unpack_as(runs.RunRecord, self.charge.record).run_id

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def ask(self, message: wire.Message) -> Any:
        """One request; a service that died meanwhile is started again first."""
        patient_until_ns = SYSTEM.mono_ns() + PATIENCE_NS
        # Sealing may have to sort all of the input.
        answer_s = None if isinstance(message, wire.Seal) else ANSWER_S
        replaced = False
        with self._turn:
            while True:
                self._revive()
                assert self._client is not None
                self._client.wait_for(answer_s)
                try:
                    answer, _ = self._client.ask(message)
                    self._note(answer)
                    return answer
                except ServiceLost:
                    # Killed, most likely; or alive, and only this line broke.
                    if self._left:
                        raise
                    if SYSTEM.mono_ns() >= patient_until_ns:
                        if replaced or self._process is None:
                            raise
                        # It lives and says nothing: stopped, or stuck. Another one goes on.
                        self._process.kill()
                        self._process.wait()
                        replaced = True
                        patient_until_ns = SYSTEM.mono_ns() + PATIENCE_NS
                except HoldfastError:
                    if self._process is not None and self._process.poll() is None:
                        raise

    def _note(self, answer: Any) -> None:
        """Deaths count in a row: whoever got on since is not at its end."""
        if isinstance(answer, wire.Stand) and answer.position != self._position:
            if self._position:
                self._in_a_row = 0
            self._position = answer.position

    def watch(self) -> None:
        """For a service that nobody here asks anything: see to it that it lives."""
        threading.Thread(target=self._watch, name="keeper", daemon=True).start()

    def _watch(self) -> None:
        while not self._left:
            with contextlib.suppress(HoldfastError):
                self.ask(wire.Status())
            SYSTEM.sleep(WATCH_S)

    def leave(self, *, wait: bool = True) -> None:
        """End the service in good order: what it knows is durable, its lease is free.

        Without `wait` that goes on behind the caller's back, and the process ends after it.
        """
        if os.getpid() != self._pid:
            return  # a forked child: the service is the parent's
        self._left = True
        if self._client is not None:
            self._client.close()
        with self._turn:
            process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        if wait:
            _reap(process)
        else:
            threading.Thread(target=_reap, args=(process,), name="reaper").start()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self.leave(wait=kind is not None)

    def _revive(self) -> None:
        if self._left or self._process is None:
            raise ServiceLost(why="the keeper has left")
        status = self._process.poll()
        if status is None:
            return
        if self._in_a_row >= RESTARTS_MAX:
            raise RunFailed(why="the ledger service died too often", exit_status=status)
        self.restarts += 1
        self._in_a_row += 1
        record = codec.unpack_as(runs.RunRecord, self.charge.record)
        self._free(record.name, self._process.pid)
        self._start(replace(self.charge, new=False, again=True))

    def _free(self, name: str, pid: int) -> None:
        """Release the lease of a service that is known to be dead."""
        resource = runs.lease_resource(name)
        self.store.transact(_release_of, resource, f"ledger-{pid}")

    def _start(self, charge: Charge) -> None:
        if self._client is not None:
            self._client.close()
        process = _taken() or _spawned()
        assert process.stdin is not None
        assert process.stdout is not None
        data = msgspec.msgpack.encode(charge)
        with contextlib.suppress(OSError):
            process.stdin.write(len(data).to_bytes(4, "little") + data)
            process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RunFailed(why="the ledger service did not start", exit_status=process.wait())
        ready = msgspec.json.decode(line, type=Ready)
        if ready.error is not None:
            process.wait()
            raise from_wire(ready.error)
        self._process = process
        self.charge = replace(charge, port=ready.port)
        self._client = Client(self.own_address, "driver", patience_s=LOOK_S)


def warm() -> None:
    """Have a service ready for the next run: most of its start is loading modules."""
    while _spare and _spare[-1].poll() is not None:
        _reap(_spare.pop())
    if not _spare:
        _spare.append(_spawned())
        atexit.register(_dismiss)


# It waits for its charge, for a few minutes; and leaves at once when this process ends.
_spare: list[subprocess.Popen[bytes]] = []
# A forked child has no part in it.
os.register_at_fork(after_in_child=_spare.clear)


def _dismiss() -> None:
    atexit.unregister(_dismiss)
    while _spare:
        process = _spare.pop()
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        _reap(process)


def _taken() -> subprocess.Popen[bytes] | None:
    while _spare:
        process = _spare.pop()
        if process.poll() is None:
            return process
        _reap(process)
    return None


def _spawned() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast.spark.service"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def _reap(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()


def _release_of(txn: Txn, resource: str, worker: str) -> None:
    """Only of this worker: another may have taken over meanwhile."""
    held = leases.current(txn, resource)
    if held is not None and held.worker == worker:
        leases.force_release(txn, resource, "its process died")


def new_token() -> str:
    return SYSTEM.entropy(24).hex()
