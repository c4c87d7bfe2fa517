"""The ledger client: a connection to the ledger service, used by tasks, their children and the
driver.

A restarted service listens at the same address. The client therefore reconnects for `reconnect_s` and
resends the request. Resending is idempotent: reports are numbered, and a duplicate gets the same reply.
The client keeps its owner name. The ledger decides whether its grants are still valid.
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
from holdfast.spark import ledger_protocol
from holdfast.spark.spool_access import SpoolAccess

if TYPE_CHECKING:
    import pyarrow as pa

    from holdfast.spark.spool_block_writer import BlockWriter

CONNECT_S = 5.0
RETRY_S = 0.1
RECONNECT_S = 30.0


class ServiceLost(Busy):
    code = "service_lost"
    hint = "the ledger service cannot be reached; run the stage again, it resumes"


class LedgerUnreachable(ServiceLost):
    """No connection ever succeeded from here, so running the stage again would not help."""

    code = "ledger_unreachable"
    hint = "executors must reach that host and port: see ledger_host=, bind=, ledger_port= of Stage"


class ServiceAddress(msgspec.Struct, frozen=True):
    host: str
    port: int
    token: str
    # With TLS: the certificate of the authority, and the host name in the certificate of the
    # service.
    ca: str = ""
    name: str = ""


class LedgerClient:
    """One connection. `request` serializes its callers with a lock."""

    def __init__(
        self,
        address: ServiceAddress,
        role: str,
        reconnect_s: float = RECONNECT_S,
        reply_timeout_s: float | None = None,
    ) -> None:
        # Reply timeout. TCP keepalive detects a machine that has vanished.
        self.reply_timeout_s = reply_timeout_s
        self.address = address
        self.owner = f"{role}/{socket.gethostname()}/{os.getpid()}/{SYSTEM.entropy(6).hex()}"
        self.reconnect_s = reconnect_s
        self.welcome: ledger_protocol.HelloReply | None = None
        self._sock: socket.socket | None = None
        self._lock = threading.Lock()
        self._closed = False

    def request(
        self, message: ledger_protocol.WireMessage, *attached: ledger_protocol.BytesLike
    ) -> tuple[Any, memoryview]:
        with self._lock:
            reconnect_until = SYSTEM.mono_ns() + int(self.reconnect_s * 1e9)
            while True:
                try:
                    sock = self._sock or self._connect()
                    ledger_protocol.send(sock, message, *attached)
                    return ledger_protocol.receive_reply(sock)
                except (OSError, EOFError) as error:
                    self._disconnect()
                    if self._closed or SYSTEM.mono_ns() >= reconnect_until:
                        raise self._lost_error(error) from None
                    SYSTEM.sleep(RETRY_S)

    def _lost_error(self, error: Exception) -> ServiceLost:
        host, port = self.address.host, self.address.port
        if self.welcome is None and not self._closed:
            return LedgerUnreachable(
                host=host, port=port, executor=socket.gethostname(), why=str(error)
            )
        return ServiceLost(address=f"{host}:{port}", why=str(error))

    def set_reply_timeout(self, reply_timeout_s: float | None) -> None:
        """Set the reply timeout for later requests."""
        self.reply_timeout_s = reply_timeout_s
        if self._sock is not None:
            self._sock.settimeout(reply_timeout_s)

    def connect(self) -> ledger_protocol.HelloReply:
        """Connect if not connected. Return the service's welcome."""
        self.request(ledger_protocol.ServiceHeartbeat([]))
        assert self.welcome is not None
        return self.welcome

    def close(self) -> None:
        self._closed = True
        self._disconnect()

    def __enter__(self) -> LedgerClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _connect(self) -> socket.socket:
        sock = socket.create_connection((self.address.host, self.address.port), timeout=CONNECT_S)
        try:
            if self.address.ca:
                from holdfast.spark import tls  # needed with TLS only

                sock = tls.wrap_client(
                    sock, self.address.ca, self.address.name or self.address.host
                )
            sock.settimeout(self.reply_timeout_s)
            ledger_protocol.set_socket_options(sock)
            ledger_protocol.send(sock, ledger_protocol.Hello(self.address.token, self.owner))
            self.welcome, _ = ledger_protocol.receive_reply(sock)
        except BaseException:
            sock.close()
            raise
        self._sock = sock
        return sock

    def _disconnect(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.close()


class BlockUploaderFactory(msgspec.Struct, frozen=True):
    """A picklable factory of the connection on which an ingest task sends its blocks."""

    address: ServiceAddress
    # The spool for the blocks, if there is one; and the run that owns them.
    spool: SpoolAccess | None = None
    run_id: str = ""
    # Set in the pass over the input that Spark sorted.
    sorted: bool = False

    def __call__(self) -> BlockUploader:
        # The worker that reads input now will run rows soon: start its child meanwhile.
        from holdfast.spark.spark_task import children

        children.prestart()
        return BlockUploader(self.address, self.spool, self.run_id, self.sorted)


class BlockUploader:
    def __init__(
        self,
        address: ServiceAddress,
        spool: SpoolAccess | None = None,
        run_id: str = "",
        sorted: bool = False,
    ) -> None:
        self._client = LedgerClient(address, "ingest")
        self._sorted = sorted
        self._spool_writer: BlockWriter | None = None
        if spool is not None:
            from holdfast.spark.spool_block_writer import BlockWriter

            self._spool_writer = BlockWriter(spool, run_id)

    def put_block(self, data: bytes, in_order: bool = True) -> int:
        """Send an Arrow stream of one batch. Return the block number."""
        from holdfast.spark import block_merge  # not needed in children

        return self.put_batch(block_merge.decode_block(data), in_order)[0]

    def put_batch(self, batch: pa.RecordBatch, in_order: bool = True) -> tuple[int, int]:
        """Send a block. Return its number and its size in bytes."""
        if self._spool_writer is not None:
            at = self._spool_writer.put(batch)
            answer, _ = self._client.request(ledger_protocol.PutBlock(in_order, at, self._sorted))
            return int(answer.number), at.at.size
        from holdfast.spark import block_merge

        data = block_merge.encode_block_view(batch)
        if len(data) > VALUE_BYTES_MAX:
            # Fail before the transfer: the ledger service would refuse it afterwards.
            raise ValueTooLarge(what="input row", bytes=len(data), max=VALUE_BYTES_MAX)
        answer, _ = self._client.request(
            ledger_protocol.PutBlock(in_order, None, self._sorted), data
        )
        return int(answer.number), len(data)

    def close(self) -> None:
        self._client.close()
