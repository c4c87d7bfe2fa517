"""The reader thread of the ledger service closes its connections."""

from __future__ import annotations

import socket
import threading
from typing import Any

from holdfast.spark import ledger_protocol
from holdfast.spark.child_connections import ChildConnection, ConnectionReader

WAIT_S = 30.0


def test_connection_of_a_request_under_way_is_closed_after_its_reply() -> None:
    """Otherwise its child would wait for the next reply until it gives up."""
    ours, theirs = socket.socketpair()
    ours.settimeout(WAIT_S)
    serving, may_reply = threading.Event(), threading.Event()

    def serve(child: ChildConnection, request: Any, data: memoryview) -> None:
        serving.set()
        may_reply.wait(WAIT_S)
        ledger_protocol.send(child.sock, ledger_protocol.Ok())

    reader = ConnectionReader(lambda *_: False, serve, lambda child: None)
    reader.add(ChildConnection(theirs, "child/1"))
    ledger_protocol.send(ours, ledger_protocol.GetRunStatus())
    assert serving.wait(WAIT_S)
    reader.close()
    may_reply.set()
    with ours:
        received = b""
        while piece := ours.recv(4096):
            received += piece
    assert received, "the reply"
