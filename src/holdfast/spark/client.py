"""A connection to the ledger service, as tasks, their children and the driver use it.

A service that was killed comes back at the same address, so a broken line is made again for a
while (`patience_s`) and the request is sent once more: reports are numbered and answered the same
when they come twice. The owner's name stays; whether its grants are still its own, the ledger says.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.clock import SYSTEM
from holdfast.config import VALUE_BYTES_MAX
from holdfast.errors import Busy, ValueTooLarge
from holdfast.spark import wire
from holdfast.spark.spool_access import SpoolAccess

if TYPE_CHECKING:
    import pyarrow as pa

    from holdfast.spark.spool_blocks import BlockWriter

CONNECT_S = 5.0
RETRY_S = 0.1
PATIENCE_S = 30.0


class ServiceLost(Busy):
    code = "service_lost"
    hint = "the ledger service cannot be reached; run the stage again, it resumes"


class LedgerUnreachable(ServiceLost):
    """It was never reached from here: to run the stage again would not help."""

    code = "ledger_unreachable"
    hint = "executors must reach that host and port: see ledger_host=, bind=, ledger_port= of Stage"


class Address(msgspec.Struct, frozen=True):
    host: str
    port: int
    token: str
    # With TLS: the authority's certificate, and the name that the service's is for.
    ca: str = ""
    name: str = ""


class Client:
    """One line, used by one thread at a time (`ask` takes turns)."""

    def __init__(
        self,
        address: Address,
        role: str,
        patience_s: float = PATIENCE_S,
        answer_s: float | None = None,
    ) -> None:
        # How long an answer may take; a machine that vanished is noticed by the kernel's probes.
        self.answer_s = answer_s
        self.address = address
        self.owner = f"{role}/{socket.gethostname()}/{os.getpid()}/{SYSTEM.entropy(6).hex()}"
        self.patience_s = patience_s
        self.welcome: wire.Welcome | None = None
        self._line: socket.socket | None = None
        self._turn = threading.Lock()
        self._closed = False

    def ask(self, message: wire.Message, *attached: wire.Bytes) -> tuple[Any, memoryview]:
        with self._turn:
            patient_until = SYSTEM.mono_ns() + int(self.patience_s * 1e9)
            while True:
                try:
                    line = self._line or self._connect()
                    wire.send(line, message, *attached)
                    return wire.receive_answer(line)
                except (OSError, EOFError) as error:
                    self._hang_up()
                    if self._closed or SYSTEM.mono_ns() >= patient_until:
                        raise self._lost(error) from None
                    SYSTEM.sleep(RETRY_S)

    def _lost(self, error: Exception) -> ServiceLost:
        host, port = self.address.host, self.address.port
        if self.welcome is None and not self._closed:
            return LedgerUnreachable(
                host=host, port=port, executor=socket.gethostname(), why=str(error)
            )
        return ServiceLost(address=f"{host}:{port}", why=str(error))

    def wait_for(self, answer_s: float | None) -> None:
        """How long answers may take from now on."""
        self.answer_s = answer_s
        if self._line is not None:
            self._line.settimeout(answer_s)

    def connect(self) -> wire.Welcome:
        """Make the line now, if it is not there; what the service said."""
        self.ask(wire.Beat([]))
        assert self.welcome is not None
        return self.welcome

    def close(self) -> None:
        self._closed = True
        self._hang_up()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _connect(self) -> socket.socket:
        line = socket.create_connection((self.address.host, self.address.port), timeout=CONNECT_S)
        try:
            if self.address.ca:
                from holdfast.spark import tls  # rarely needed

                line = tls.connect(line, self.address.ca, self.address.name or self.address.host)
            line.settimeout(self.answer_s)
            wire.tune(line)
            wire.send(line, wire.Hello(self.address.token, self.owner))
            self.welcome, _ = wire.receive_answer(line)
        except BaseException:
            line.close()
            raise
        self._line = line
        return line

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            with contextlib.suppress(OSError):
                line.close()


class Blocks(msgspec.Struct, frozen=True):
    """Makes the line on which an ingesting task hands over its blocks. Spark pickles it."""

    address: Address
    # Where the blocks go, unless the ledger service takes them; and the run that they are of.
    spool: SpoolAccess | None = None
    run_id: str = ""
    # Of the pass over the input that Spark sorts.
    sorted: bool = False

    def __call__(self) -> BlockLine:
        # The worker that reads input now runs rows soon: its child starts up meanwhile.
        from holdfast.spark.task import warm

        warm()
        return BlockLine(self.address, self.spool, self.run_id, self.sorted)


class BlockLine:
    def __init__(
        self,
        address: Address,
        spool: SpoolAccess | None = None,
        run_id: str = "",
        sorted: bool = False,
    ) -> None:
        self._client = Client(address, "ingest")
        self._sorted = sorted
        self._blocks: BlockWriter | None = None
        if spool is not None:
            from holdfast.spark.spool_blocks import BlockWriter

            self._blocks = BlockWriter(spool, run_id)

    def put_block(self, data: bytes, in_order: bool = True) -> int:
        """Hand over an Arrow stream of one batch; its number."""
        from holdfast.spark import merge  # children do without it

        return self.put_batch(merge.decode(data), in_order)[0]

    def put_batch(self, batch: pa.RecordBatch, in_order: bool = True) -> tuple[int, int]:
        """Hand over a block; its number and its bytes."""
        if self._blocks is not None:
            at = self._blocks.put(batch)
            answer, _ = self._client.ask(wire.PutBlock(in_order, at, self._sorted))
            return int(answer.n), at.at.size
        from holdfast.spark import merge

        data = merge.encoded(batch)
        if len(data) > VALUE_BYTES_MAX:
            # The ledger service would refuse it after all of it was sent.
            raise ValueTooLarge(what="input row", bytes=len(data), max=VALUE_BYTES_MAX)
        answer, _ = self._client.ask(wire.PutBlock(in_order, None, self._sorted), data)
        return int(answer.n), len(data)

    def close(self) -> None:
        self._client.close()
