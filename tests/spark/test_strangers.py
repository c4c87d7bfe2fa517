"""Peers without a token: they take neither the ledger service's threads nor its descriptors for good."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.spark import strangers, wire
from holdfast.spark.strangers import STRANGERS_MAX, Strangers
from tests.process.watch import until
from tests.spark.service_rig import Serving, serving

MODULES = ("holdfast.spark.strangers", "holdfast.spark.service")
PEERS = 500


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data", 100) as service:
        yield service


@pytest.fixture
def opened() -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    yield made
    for line in made:
        line.close()


def raw(service: Serving) -> socket.socket:
    address = service.keeper.address
    return socket.create_connection((address.host, address.port), timeout=30)


def threads_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def files_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("said", [b"", b"\x00"], ids=["nothing", "a byte"])
def test_peers_without_a_token_take_a_bounded_number_of_threads(
    filled: Serving, opened: list[socket.socket], said: bytes
) -> None:
    pid = filled.keeper.pid
    before = threads_of(pid)
    for _ in range(PEERS):
        opened.append(raw(filled))
        opened[-1].sendall(said)
    # All of them were accepted before this one. The threads of those that had to go are ending.
    assert filled.line().ask(wire.Status()).status == "open"
    assert threads_of(pid) - before < PEERS // 2
    until(lambda: threads_of(pid) <= before + STRANGERS_MAX + 2, "threads of those that went end")


def test_a_child_that_is_admitted_is_not_put_out_by_strangers(
    filled: Serving, opened: list[socket.socket]
) -> None:
    child = filled.line()
    for _ in range(2 * STRANGERS_MAX):
        opened.append(raw(filled))
    assert opened[0].recv(1) == b""
    assert child.ask(wire.Status()).status == "open"


def test_the_service_accepts_again_after_it_had_no_descriptors(
    filled: Serving, opened: list[socket.socket]
) -> None:
    pid = filled.keeper.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    few = files_of(pid) + 3
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (few, limits[1]))
    for _ in range(20):
        opened.append(raw(filled))
    until(lambda: files_of(pid) >= few, "it has no descriptor left")
    # Strangers give way one by one, and what waits to be accepted is.
    assert filled.line().ask(wire.Status()).status == "open"
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    for line in opened:
        line.close()
    assert filled.line().claim(1).seqs == [0]


def test_the_service_has_as_many_descriptors_as_the_system_allows(filled: Serving) -> None:
    soft, hard = resource.prlimit(filled.keeper.pid, resource.RLIMIT_NOFILE)
    assert soft == hard


def test_a_stranger_has_a_time_however_slowly_it_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Strangers()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        lines.add(ours)
        lines.end_late()
        assert len(lines) == 1
        monkeypatch.setattr(strangers, "HELLO_S", -1.0)
        lines.end_late()
        assert len(lines) == 0
        assert theirs.recv(1) == b""
