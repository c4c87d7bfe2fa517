"""Unauthenticated connections: the ledger service bounds their threads and file descriptors."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.spark import ledger_protocol, unauthenticated
from holdfast.spark.unauthenticated import UNAUTHENTICATED_MAX, UnauthenticatedConnections
from tests.ledger_service.service_rig import ServiceRig, running_service
from tests.process.watch import until

MODULES = ("holdfast.spark.unauthenticated", "holdfast.spark.service")
PEERS = 500


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[ServiceRig]:
    with running_service(tmp_path / "data", 100) as service:
        yield service


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    sockets: list[socket.socket] = []
    yield sockets
    for sock in sockets:
        sock.close()


def raw_socket(service: ServiceRig) -> socket.socket:
    address = service.supervisor.address
    return socket.create_connection((address.host, address.port), timeout=30)


def threads_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def files_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("said", [b"", b"\x00"], ids=["nothing", "a byte"])
def test_unauthenticated_peers_use_a_bounded_number_of_threads(
    filled: ServiceRig, sockets: list[socket.socket], said: bytes
) -> None:
    pid = filled.supervisor.pid
    before = threads_of(pid)
    for _ in range(PEERS):
        sockets.append(raw_socket(filled))
        sockets[-1].sendall(said)
    # All peers were accepted before this connection. Threads of closed connections are exiting.
    assert filled.connect().request(ledger_protocol.GetRunStatus()).status == "open"
    assert threads_of(pid) - before < PEERS // 2
    until(
        lambda: threads_of(pid) <= before + UNAUTHENTICATED_MAX + 2,
        "threads of those that went end",
    )


def test_unauthenticated_peers_do_not_close_an_authenticated_connection(
    filled: ServiceRig, sockets: list[socket.socket]
) -> None:
    child = filled.connect()
    for _ in range(2 * UNAUTHENTICATED_MAX):
        sockets.append(raw_socket(filled))
    assert sockets[0].recv(1) == b""
    assert child.request(ledger_protocol.GetRunStatus()).status == "open"


def test_service_accepts_again_after_running_out_of_file_descriptors(
    filled: ServiceRig, sockets: list[socket.socket]
) -> None:
    pid = filled.supervisor.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    few = files_of(pid) + 3
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (few, limits[1]))
    for _ in range(20):
        sockets.append(raw_socket(filled))
    # Without a free descriptor the service closes the oldest unauthenticated connection.
    assert sockets[0].recv(1) == b""
    assert filled.connect().request(ledger_protocol.GetRunStatus()).status == "open"
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    for line in sockets:
        line.close()
    assert filled.connect().claim(1).seqs == [0]


def test_service_raises_its_file_descriptor_limit_to_the_maximum(filled: ServiceRig) -> None:
    soft, hard = resource.prlimit(filled.supervisor.pid, resource.RLIMIT_NOFILE)
    assert soft == hard


def test_unauthenticated_connection_is_closed_after_the_hello_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connections = UnauthenticatedConnections()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connections.add(ours)
        connections.close_expired()
        assert len(connections) == 1
        monkeypatch.setattr(unauthenticated, "HELLO_S", -1.0)
        connections.close_expired()
        assert len(connections) == 0
        assert theirs.recv(1) == b""
