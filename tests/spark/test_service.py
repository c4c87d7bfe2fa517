"""The ledger service as a process: what it hands out, takes back, refuses, survives and commits."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from holdfast import codec
from holdfast.clock import SYSTEM, S, iso_time
from holdfast.durable import lease as leases
from holdfast.errors import Conflict, HoldfastError, IllegalTransition, Invalid
from holdfast.ledger import runs
from holdfast.ledger.classes import ErrorClass, Policy
from holdfast.ledger.log import verify
from holdfast.ledger.states import State
from holdfast.spark import wire
from holdfast.spark.client import Blocks, Client, ServiceLost
from holdfast.spark.ingest import HASH, TaskBody
from holdfast.spark.keeper import Keeper
from holdfast.spark.rows import stream_of
from holdfast.spark.service import EXIT_FENCED
from holdfast.spark.sinks.parquet import read_parts
from holdfast.store import open as open_store
from tests.spark.service_rig import (
    Line,
    Serving,
    charge,
    end_children,
    ids_of,
    report,
    rows_of_output,
    seal,
    serving,
    step,
    table,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", autouse=True)
def _no_child_is_left() -> Iterator[None]:
    yield
    end_children()


def failed(seq: int, kind: ErrorClass = ErrorClass.INPUT, why: str = "bad") -> wire.Other:
    return wire.Other(seq, int(State.TERMINAL_FAIL), int(kind), why)


def skipped(seq: int, why: str = "dull") -> wire.Other:
    return wire.Other(seq, int(State.TERMINAL_SKIP), 0, why)


# --- who may speak ------------------------------------------------------------------------------


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data", 100) as service:
        yield service


def test_a_wrong_token_is_refused_and_the_line_is_closed(filled: Serving) -> None:
    for token in ("", "x", filled.keeper.charge.token[:-1], filled.keeper.charge.token + "0"):
        with pytest.raises(Invalid) as refused:
            Line(filled.keeper.address, token=token)
        assert refused.value.fields == {"what": "token", "why": "not of this run"}
    assert filled.line().ask(wire.Status()).status == "open"


def is_closed(line: socket.socket) -> bool:
    """Whether the other side hangs up without a word."""
    try:
        return line.recv(1) == b""
    except ConnectionResetError:
        return True


def raw(service: Serving) -> socket.socket:
    return socket.create_connection((service.keeper.address.host, service.keeper.address.port))


JUNK = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "large": struct.pack("<II", 5000, 0),
    "huge": struct.pack("<II", 2**32 - 1, 2**32 - 1),
    "junk": struct.pack("<II", 3, 0) + b"\xc1\xc1\xc1",
    "truncated": b"\x00",
}


def test_junk_instead_of_a_greeting_ends_the_line_and_nothing_else(filled: Serving) -> None:
    for data in JUNK.values():
        with raw(filled) as line:
            line.sendall(data)
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_WR)
            assert is_closed(line)
    assert filled.line().claim(1).seqs == [0]


def test_a_request_before_the_greeting_is_refused(filled: Serving) -> None:
    with raw(filled) as line:
        wire.send(line, wire.Claim(1, 1))
        with pytest.raises((Invalid, OSError)):
            wire.receive_answer(line)
    with raw(filled) as line:
        wire.send(line, step(wire.Claim(1, 1)))
        with pytest.raises(Invalid):
            wire.receive_answer(line)
    assert filled.board().ledger.counts()[State.UNSEEN] == 100


def test_an_unknown_request_ends_the_line_and_what_it_held_is_free(filled: Serving) -> None:
    line = filled.line()
    line.claim(10)
    head = msgspec.msgpack.encode(["Explode"])
    line.socket.sendall(struct.pack("<II", len(head), 0) + head)
    assert line.closed()
    assert filled.line("child/other").claim(10, wait_ms=5000).seqs == list(range(10))


def test_a_second_greeting_is_refused_and_the_line_goes_on(filled: Serving) -> None:
    line = filled.line()
    with pytest.raises(Invalid):
        line.ask(wire.Hello(filled.keeper.charge.token, "child/x"))
    assert line.claim(1).seqs == [0]


SENSELESS: list[wire.Message] = [
    step(wire.Claim(5, -1)),
    step(wire.Claim(5, 0, 50, 10)),
    step(wire.Claim(5, 0, -5, 10)),
    step(wire.Claim(5, 0, 1 << 40, -1)),
    wire.Outcomes(-5, 10, False),
    wire.Outcomes(0, 1 << 40, True),
    wire.Outcomes(50, 10, True),
    wire.PutBlock(),
]


def test_senseless_requests_are_refused_and_the_line_goes_on(filled: Serving) -> None:
    line = filled.line()
    for request in SENSELESS:
        with pytest.raises(Invalid):
            line.ask(request)
    for grant in line.take(100):
        line.report(grant, done=grant.ranges)
    assert verify(filled.store, filled.run_id)


# --- before there is an input -------------------------------------------------------------------


def test_reports_that_do_not_wait_for_their_answers_are_answered_in_order(filled: Serving) -> None:
    line = filled.line()
    grant = line.claim(20, begin=20)
    rows = len(grant.seqs)
    moves = [report(grant, done=[(seq, seq + 1)]) for seq in grant.seqs]
    for move, data in moves:
        line.send(step(None, move), data)
    line.send(wire.Status())
    left = [line.receive().moved[0].left for _ in moves]
    assert left == list(range(rows - 1, -1, -1))
    assert line.receive().status == "open"


def test_a_report_is_durable_though_its_line_closes_at_once(filled: Serving) -> None:
    line = filled.line()
    grant = line.claim(5, begin=5)
    move, data = report(grant, done=[(grant.seqs[0], grant.seqs[-1] + 1)])
    line.send(step(None, move), data)
    line.close()
    other = filled.line("child/other")
    while not codec.unpack_as(runs.Progress, other.ask(wire.Status()).progress).ended[0]:
        pass


def test_rows_cannot_be_asked_for_before_there_are_any(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as service:
        line = service.line()
        for request in (step(wire.Claim(1, 1)), wire.Outcomes(0, 1, False), wire.Cancel()):
            with pytest.raises(Invalid) as refused:
                line.ask(request)
            assert "no input" in refused.value.fields["why"]
        assert service.stand().status == "ingesting"
        assert service.fill(3) == 3
        assert [grant.seqs for grant in line.take(3)] == [[0], [1], [2]]


def test_an_input_without_rows_is_over_at_once(tmp_path: Path) -> None:
    with serving(tmp_path / "data", 0) as service:
        assert service.wait_over().status == "finished"
        assert service.line().stepped(wire.Claim(5, 5)).state == "over"


def test_sealing_again_changes_nothing(tmp_path: Path) -> None:
    with serving(tmp_path / "data", 10) as service:
        grant = service.line().claim(4, begin=4)
        assert service.keeper.ask(seal([(0, 10)])).size == 10
        service.lines[0].report(grant, done=[(0, 4)])
        assert service.board().ledger.counts()[State.TERMINAL_SUCCESS] == 4
        assert verify(service.store, service.run_id)


def test_no_block_comes_after_the_seal(filled: Serving) -> None:
    line = Blocks(filled.keeper.address)()
    with pytest.raises(Invalid) as refused:
        line.put_block(stream_of(table(0, 5)))
    assert refused.value.fields["what"] == "input"
    line.close()


def test_blocks_that_nobody_names_are_deleted(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as service:
        line = Blocks(service.keeper.address)()
        numbers = [line.put_block(stream_of(table(i * 5, i * 5 + 5))) for i in range(4)]
        line.close()
        assert service.keeper.ask(seal([(numbers[1], 5), (numbers[3], 5)])).size == 10
        kept = [n for n in numbers if service.store.read(runs.block, service.run_id, n)]
        assert kept == [numbers[1], numbers[3]]
        assert ids_of(service.line().take(10)) == [*range(5, 10), *range(15, 20)]


def test_a_service_that_died_while_blocks_came_numbers_the_next_ones_after_them(
    tmp_path: Path,
) -> None:
    with serving(tmp_path / "data") as service:
        line = Blocks(service.keeper.address)()
        first = [line.put_block(stream_of(table(i * 5, i * 5 + 5))) for i in range(3)]
        os.kill(service.keeper.pid, signal.SIGKILL)
        service.wait_exit()
        assert service.stand().status == "ingesting"
        last = line.put_block(stream_of(table(15, 20)))
        line.close()
        assert len({*first, last}) == 4
        blocks = [(n, 5) for n in [*first, last]]
        assert service.keeper.ask(seal(blocks)).size == 20
        assert ids_of(service.line().take(20)) == list(range(20))


def test_overlapping_blocks_are_merged_in_order_by_the_service_that_came_after(
    tmp_path: Path,
) -> None:
    with serving(tmp_path / "data") as service:
        staged = []
        for part in (0, 1, 2):
            # What a Spark task does with its rows; the keys of the three interleave.
            body = TaskBody(Blocks(service.keeper.address), ("id",), 10, 1 << 20)
            ids = list(range(part, 60, 3))[::-1]
            batch = pa.record_batch({"id": pa.array(ids, pa.int64()), HASH: pa.array(ids)})
            for stats in body([batch]):
                staged += [
                    (row["n"], row["rows"], row["size_bytes"], row["bounds"])
                    for row in stats.to_pylist()
                ]
        os.kill(service.keeper.pid, signal.SIGKILL)
        service.wait_exit()
        message = msgspec.structs.replace(seal([]), merge=True, staged=staged)
        assert service.keeper.ask(message).size == 60
        assert service.keeper.ask(message).size == 60
        assert ids_of(service.line().take(60)) == list(range(60))
        kept = {n for n, _ in service.record().blocks}
        assert kept.isdisjoint(n for n, *_ in staged)
        assert not any(service.store.read(runs.block, service.run_id, n) for n, *_ in staged)


# --- claims and reports -------------------------------------------------------------------------


def test_rows_are_handed_out_once_each_with_their_input(tmp_path: Path) -> None:
    with serving(tmp_path / "data", 1000, blocks=7) as service:
        service.line("child/a")
        line = service.line("child/b")
        seen: list[int] = []
        while True:
            answer = line.stepped(wire.Claim(130, 0))
            if answer.state != "granted":
                break
            grant = line.granted(answer)
            assert grant.rows.column("id").to_pylist() == grant.seqs
            seen += grant.seqs
        assert sorted(seen) == list(range(1000))
        assert answer.state == "wait"


def test_the_same_step_sent_again_has_the_same_answer(filled: Serving) -> None:
    line = filled.line()
    grant = line.claim(10, begin=5)
    move, data = report(grant, done=[(0, 3)], others=[failed(3), skipped(4)], begin=[(5, 10)])
    first = line.stepped(None, move, data=data)
    before = filled.board().dump()
    for _ in range(3):
        assert line.stepped(None, move, data=data) == first
    assert filled.board().dump() == before
    assert filled.outcomes().records(0, 5).num_rows == 2


def test_a_report_of_another_content_under_the_same_number_halts_the_run(filled: Serving) -> None:
    line = filled.line()
    grant = line.claim(10, begin=10)
    line.report(grant, done=[(0, 3)])
    grant.n -= 1
    with pytest.raises(IllegalTransition):
        line.report(grant, done=[(0, 4)])
    assert filled.record().status is runs.Status.HALTED


ILLEGAL = {
    "ended twice": ([(0, 5)], [(0, 2)]),
    "not begun": ([], [(7, 8)]),
    "not its own": ([], [(50, 51)]),
}


@pytest.mark.spec(
    "002",
    "Illegal Transition Policy",
    "3: it says seq, prior, attempted, owner and wall clock",
    module="holdfast.spark.office",
)
@pytest.mark.parametrize(("before", "then"), ILLEGAL.values(), ids=ILLEGAL.keys())
def test_an_illegal_move_halts_the_run_and_says_all_there_is_to_say(
    filled: Serving, before: list[tuple[int, int]], then: list[tuple[int, int]]
) -> None:
    line = filled.line("child/liar")
    grant = line.claim(10, begin=5)
    if before:
        line.report(grant, done=before)
    before_ns = SYSTEM.wall_ns(), filled.store.now_ns()
    with pytest.raises(IllegalTransition) as halted:
        line.report(grant, done=then)
    told = halted.value.fields
    assert told["seq"] == then[0][0]
    assert told["attempted"] == "TERMINAL_SUCCESS"
    assert told["prior"] in {state.name for state in State}
    assert "child/liar" in told["owner"]
    after = SYSTEM.wall_ns(), filled.store.now_ns()
    for name, lo, hi in zip(("wall_ns", "store_ns"), before_ns, after, strict=True):
        assert lo - S <= told[name] <= hi + S, name
    assert told["wall_time"] == iso_time(told["wall_ns"])
    assert told["store_time"] == iso_time(told["store_ns"])

    record = filled.record()
    assert record.status is runs.Status.HALTED
    for part in (
        f"seq {told['seq']}",
        told["prior"],
        told["attempted"],
        told["owner"],
        told["wall_time"],
        told["store_time"],
    ):
        assert part in record.halted
    assert filled.stand().halted == record.halted
    assert filled.board().halted is not None

    with pytest.raises(IllegalTransition):
        filled.line("child/other").report(grant, done=[(8, 9)])
    assert filled.line("child/third").stepped(wire.Claim(5, 5)).state == "stop"
    assert verify(filled.store, filled.run_id)


def test_a_halted_run_stays_halted_after_a_restart(filled: Serving) -> None:
    line = filled.line()
    grant = line.claim(10, begin=5)
    with pytest.raises(IllegalTransition):
        line.report(grant, done=[(7, 8)])
    os.kill(filled.keeper.pid, signal.SIGKILL)
    filled.wait_exit()
    stand = filled.stand()
    assert (stand.status, bool(stand.halted)) == ("halted", True)


def test_what_was_decided_before_a_bad_part_of_a_step_is_logged(filled: Serving) -> None:
    line = filled.line()
    one, two = line.claim(5, begin=5), line.claim(5, begin=5)
    first, data = report(one, done=[(0, 5)])
    second, more = report(two, done=[(5, 10)])
    late = msgspec.structs.replace(second, n=9)
    with pytest.raises(Invalid) as refused:
        line.stepped(None, first, late, data=data + more)
    assert refused.value.fields["what"] == "n"
    with pytest.raises(Invalid):
        line.stepped(wire.Claim(5, -1), second, data=more)
    board = filled.board()
    assert board.ledger.counts()[State.TERMINAL_SUCCESS] == 10
    assert filled.progress().counts == board.ledger.counts()
    assert filled.outcomes().successes(0, 10).column("y").to_pylist() == list(range(0, 20, 2))
    assert verify(filled.store, filled.run_id)


def test_a_lost_line_gives_its_rows_back_at_once(tmp_path: Path) -> None:
    policy = Policy(lease_ns=3600 * 10**9)
    with serving(tmp_path / "data", 20, policy=policy) as service:
        gone = service.line("child/gone")
        gone.claim(10, begin=4)
        gone.close()
        service.until(lambda _: service.progress().reclaims == 1)
        heir = service.line("child/heir")
        grant = heir.claim(20, begin=20, wait_ms=5000)
        # The four that were begun come last, and alone: they may have taken their worker down.
        assert grant.seqs[:6] == list(range(4, 10)) or grant.alone
        seen = dict.fromkeys(grant.seqs, 1)
        while len(seen) < 20:
            if not grant.alone:
                heir.report(grant, done=grant.ranges)
            else:
                heir.report(grant, begin=grant.ranges)
                heir.report(grant, done=grant.ranges)
                assert grant.attempts == [2]
            if len(seen) < 20:
                grant = heir.claim(20, begin=20, wait_ms=5000)
            seen |= dict.fromkeys(grant.seqs, 1)
        assert service.progress().reclaims == 1


def test_a_fenced_report_is_dropped_and_the_later_one_counts(tmp_path: Path) -> None:
    policy = Policy(lease_ns=200_000_000, backoff_first_ns=0, backoff_max_ns=0)
    with serving(tmp_path / "data", 50, policy=policy) as service:
        zombie = service.line("child/zombie")
        old = zombie.claim(5, begin=5)
        service.until(lambda stand: service.progress().reclaims == 1)
        answer = zombie.report(old, done=old.ranges)
        assert [moved.lost for moved in answer.moved] == [True]
        assert zombie.ask(wire.Beat([old.epoch])).lost == [old.epoch]
        assert service.progress().fenced == 2
        heir = service.line("child/heir")
        for seq in range(5):
            # They hold up the commit, so they come first, one by one.
            grant = heir.claim(5, wait_ms=5000)
            assert (grant.alone, grant.seqs) == (True, [seq])
            heir.report(grant, begin=grant.ranges)
            heir.report(grant, others=[skipped(seq, "by the heir")])
        assert service.outcomes().skipped(0, 5).column("_error").to_pylist() == ["by the heir"] * 5
        assert service.outcomes().successes(0, 5).num_rows == 0


def test_a_grant_lives_as_long_as_it_is_heard_of(tmp_path: Path) -> None:
    policy = Policy(lease_ns=400_000_000)
    with serving(tmp_path / "data", 10, policy=policy) as service:
        silent, lively = service.line("child/silent"), service.line("child/lively")
        lost, kept = silent.claim(5, begin=5), lively.claim(5, begin=5)
        while not service.progress().reclaims:
            assert lively.ask(wire.Beat([kept.epoch])).lost == []
        assert lively.report(kept, done=kept.ranges).moved[0].lost is False
        assert silent.report(lost, done=lost.ranges).moved[0].lost is True


def test_a_row_that_always_takes_its_worker_down_fails_once(tmp_path: Path) -> None:
    policy = Policy(attempts_max=3, lease_ns=3600 * 10**9)
    with serving(tmp_path / "data", 1, policy=policy) as service:
        for attempt in (1, 2, 3):
            line = service.line(f"child/{attempt}")
            grant = line.claim(1, wait_ms=5000)
            assert grant.attempts == [attempt]
            line.report(grant, begin=[(0, 1)])
            line.close()
        stand = service.wait_over()
        assert stand.status == "finished"
        [row] = service.outcomes().failed(0, 1).to_pylist()
        assert (row["_attempts"], row["_error_class"]) == (3, "lease_expired")


def test_retries_come_back_until_the_budget_is_used_up(tmp_path: Path) -> None:
    policy = Policy(attempts_max=3, backoff_first_ns=0, backoff_max_ns=0)
    with serving(tmp_path / "data", 2, policy=policy) as service:
        line = service.line()
        good, bad = line.take(2)
        line.report(good, done=[(0, 1)])
        line.report(bad, others=[failed(1, ErrorClass.TRANSIENT, "once")])
        for attempt in (2, 3):
            grant = line.claim(2, begin=2, wait_ms=5000)
            assert (grant.seqs, grant.attempts) == ([1], [attempt])
            line.report(grant, others=[failed(1, ErrorClass.TRANSIENT, f"time {attempt}")])
        service.wait_over()
        [row] = service.outcomes().failed(0, 2).to_pylist()
        assert (row["_attempts"], row["_error"]) == (3, "time 3")
        assert service.progress().retries == 2


def test_chunks_that_interleave_come_out_in_order(tmp_path: Path) -> None:
    with serving(tmp_path / "data", 12) as service:
        line = service.line()
        grants = line.take(12)
        for part in (1, 0):
            for grant in reversed(grants):
                mine = [seq for seq in grant.seqs if seq % 2 == part]
                odd = [seq for seq in mine if seq % 5 == 0]
                good = [(seq, seq + 1) for seq in mine if seq % 5]
                line.report(grant, done=good, others=[skipped(seq) for seq in odd])
        service.wait_over()
        outcomes = service.outcomes()
        assert outcomes.successes(0, 12).to_pylist() == [
            {"id": seq, "y": 2 * seq} for seq in range(12) if seq % 5
        ]
        assert outcomes.skipped(0, 12).column("id").to_pylist() == [0, 5, 10]
        meta = outcomes.all(0, 12)
        assert meta.column("_seq").to_pylist() == list(range(12))
        answer = line.ask(wire.Outcomes(0, 12, False))
        assert answer.ready
        assert outcomes.successes(3, 9).column("y").to_pylist() == [6, 8, 12, 14, 16]


def test_outcomes_of_rows_that_are_at_work_are_not_ready(filled: Serving) -> None:
    line = filled.line()
    grant = line.claim(10, begin=10)
    assert line.ask(wire.Outcomes(0, 10, True)).ready is False
    line.report(grant, done=grant.ranges)
    assert line.ask(wire.Outcomes(0, len(grant.seqs), True)).ready is True


# --- back-pressure, rate ------------------------------------------------------------------------


def test_rows_are_not_handed_out_far_ahead_of_the_commit(tmp_path: Path) -> None:
    policy = Policy(ahead_rows_max=20)
    with serving(tmp_path / "data", 1000, policy=policy, file_rows=10) as service:
        line = service.line()
        held = line.claim(10, begin=10)
        ahead: list[Any] = []
        while True:
            answer = line.stepped(wire.Claim(10, 10))
            if answer.state != "granted":
                break
            ahead.append(line.granted(answer))
        assert (answer.state, answer.why) == ("wait", "lag")
        assert max(seq for grant in ahead for seq in grant.seqs) < 50
        for grant in ahead:
            line.report(grant, done=grant.ranges)
        assert line.stepped(wire.Claim(10, 10)).why == "lag"
        line.report(held, done=held.ranges)
        assert line.claim(10, wait_ms=5000).seqs


def test_the_rate_holds_across_clients(tmp_path: Path) -> None:
    with serving(tmp_path / "data", 10, rate_per_s=50) as service:
        lines = [service.line(f"child/{i}") for i in range(2)]
        began_ns = service.store.now_ns()
        given = 0
        while given < 40:
            for line in lines:
                given += line.ask(wire.Tokens(100)).count
        passed_s = (service.store.now_ns() - began_ns) / 1e9
        assert given <= 50 * (passed_s + 0.2) + 2


def test_without_a_rate_everything_is_allowed(filled: Serving) -> None:
    assert filled.line().ask(wire.Tokens(5000)) == wire.Allowed(5000, 0)


# --- cancelling ---------------------------------------------------------------------------------


def test_cancelling_lets_begun_rows_end_and_begins_no_others(tmp_path: Path) -> None:
    policy = Policy(grace_ns=3600 * 10**9)
    with serving(tmp_path / "data", 100, policy=policy) as service:
        line = service.line()
        grant = line.claim(10, begin=4)
        service.keeper.ask(wire.Cancel())
        assert service.stand().status == "cancelling"
        answer = line.report(grant, done=[(0, 2)], begin=[(4, 6)])
        assert (answer.state, answer.why) == ("stop", "cancelling")
        assert line.stepped(wire.Claim(5, 5)).state == "stop"
        line.report(grant, done=[(2, 3)], others=[failed(3, ErrorClass.TRANSIENT)])
        assert service.wait_over().status == "cancelled"
        assert service.progress().ended == [3, 0, 1, 96]
        assert service.outcomes().successes(0, 100).column("y").to_pylist() == [0, 2, 4]


def test_what_does_not_end_in_the_grace_is_cancelled(tmp_path: Path) -> None:
    policy = Policy(grace_ns=100_000_000)
    with serving(tmp_path / "data", 100, policy=policy) as service:
        line = service.line()
        grant = line.claim(10, begin=10)
        service.keeper.ask(wire.Cancel())
        assert service.wait_over().status == "cancelled"
        assert service.progress().ended == [0, 0, 0, 100]
        assert line.report(grant, done=[(0, 2)]).moved[0].lost


def test_a_request_in_the_store_cancels_the_run(filled: Serving) -> None:
    filled.line().claim(10)
    filled.store.transact(runs.request_cancel, filled.run_id)
    assert filled.wait_over().status == "cancelled"
    assert filled.record().status is runs.Status.CANCELLED


# --- ending, dying, coming back -----------------------------------------------------------------


def test_a_service_leaves_in_good_order_when_its_driver_is_gone(tmp_path: Path) -> None:
    with serving(tmp_path / "data", 100) as service:
        line = service.line()
        grant = line.claim(10, begin=10)
        line.report(grant, done=[grant.ranges[0]])
        process = service.keeper._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()
        assert service.wait_exit() == 0
        assert line.closed()
        assert service.store.read(leases.current, runs.lease_resource("job")).worker == ""
        assert service.board().ledger.counts()[State.TERMINAL_SUCCESS] == len(grant.seqs)
        assert service.record().status is runs.Status.OPEN


def test_a_service_leaves_when_it_is_asked_to(filled: Serving) -> None:
    filled.line().ask(wire.Leave())
    assert filled.wait_exit() == 0
    assert filled.store.read(leases.current, runs.lease_resource("job")).worker == ""


def test_an_interrupt_of_the_terminal_does_not_end_the_service(filled: Serving) -> None:
    os.kill(filled.keeper.pid, signal.SIGINT)
    assert filled.line().claim(5).seqs
    assert filled.keeper.restarts == 0


def test_a_service_that_lost_its_lease_ends(filled: Serving) -> None:
    line = filled.line()
    line.claim(10, begin=10)
    filled.store.transact(leases.force_release, runs.lease_resource("job"), "a test")
    assert filled.wait_exit() == EXIT_FENCED
    assert line.closed()


def test_a_service_without_its_lease_writes_nothing_more(filled: Serving) -> None:
    line = filled.line()
    grant = line.claim(10, begin=10)
    filled.store.transact(leases.force_release, runs.lease_resource("job"), "a test")
    with pytest.raises((HoldfastError, OSError)):
        line.report(grant, done=grant.ranges)
    assert filled.wait_exit() == EXIT_FENCED
    assert filled.board().ledger.counts()[State.TERMINAL_SUCCESS] == 0


def test_a_killed_service_comes_back_where_it_was_and_grants_live_on(filled: Serving) -> None:
    line = filled.line()
    grant = line.claim(10, begin=10)
    line.report(grant, done=[(0, 2)])
    before = filled.board().dump()
    port = filled.keeper.address.port
    os.kill(filled.keeper.pid, signal.SIGKILL)
    filled.wait_exit()
    assert filled.stand().status == "open"
    assert (filled.keeper.restarts, filled.keeper.address.port) == (1, port)
    assert filled.board().dump() == before
    again = filled.line()
    answer = again.report(grant, done=[(2, len(grant.seqs))])
    assert answer.moved == [wire.Moved(False, 0, "")]
    assert filled.progress().reclaims == 0
    assert verify(filled.store, filled.run_id)


def test_a_report_that_was_answered_is_answered_the_same_by_the_next_service(
    filled: Serving,
) -> None:
    line = filled.line()
    grant = line.claim(10, begin=10)
    move, data = report(grant, done=[(0, 2)])
    first = line.stepped(None, move, data=data)
    os.kill(filled.keeper.pid, signal.SIGKILL)
    filled.wait_exit()
    filled.stand()
    assert filled.line().stepped(None, move, data=data) == first
    assert filled.board().ledger.counts()[State.TERMINAL_SUCCESS] == 2


def test_a_grant_whose_answer_was_lost_with_the_service_is_given_again(filled: Serving) -> None:
    line = filled.line("child/a")
    known, lost = line.claim(5, begin=2), line.claim(5, begin=3)
    os.kill(filled.keeper.pid, signal.SIGKILL)
    filled.wait_exit()
    filled.stand()
    line = filled.line("child/a")
    line.known = [known.epoch]
    again = line.claim(5, begin=5)
    assert (again.epoch, again.seqs, again.begun) == (lost.epoch, lost.seqs, 3)
    assert again.rows == lost.rows
    assert line.report(again, done=[(5, 8)]).moved[0].lost is False
    # Another child is not given what is not its own; and all of it goes with the last line.
    other = filled.line("child/b")
    assert min(other.claim(5).seqs) >= 10
    line.close()
    assert filled.until(lambda _: filled.progress().reclaims == 2)


def test_a_client_waits_for_a_service_that_is_coming_back(filled: Serving) -> None:
    client = Client(filled.keeper.address, "child")
    client.connect()
    os.kill(filled.keeper.pid, signal.SIGKILL)
    filled.wait_exit()
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(client.ask(step(wire.Claim(5, 0)))))
    thread.start()
    filled.stand()
    thread.join(20)
    assert answers[0][0].state == "granted"
    client.close()


def test_a_client_gives_up_when_nobody_comes_back(filled: Serving) -> None:
    client = Client(filled.keeper.address, "child", patience_s=0.2)
    client.connect()
    os.kill(filled.keeper.pid, signal.SIGKILL)
    filled.wait_exit()
    with pytest.raises(ServiceLost) as lost:
        client.ask(wire.Status())
    assert str(filled.keeper.address.port) in lost.value.fields["address"]


def test_another_driver_takes_over_and_what_was_begun_is_suspect(tmp_path: Path) -> None:
    with serving(tmp_path / "data", 20) as service:
        line = service.line()
        grant = line.claim(10, begin=10)
        line.report(grant, done=[(0, 2)])
        record = service.record()
        begun = [seq for seq in grant.seqs if seq >= 2]
    made = charge(str(tmp_path / "data"), record=record)
    with serving(tmp_path / "data", made=made) as heir:
        assert heir.progress().reclaims == 1
        line = heir.line()
        alone = []
        while True:
            answer = line.stepped(wire.Claim(50, 0))
            if answer.state != "granted":
                break
            found = line.granted(answer)
            alone += found.seqs if found.alone else []
        assert alone == begun
        assert verify(heir.store, heir.run_id)


def test_a_name_has_one_service_at_a_time(filled: Serving, tmp_path: Path) -> None:
    with pytest.raises(runs.RunAtWork) as refused:
        Keeper(filled.store, charge(str(tmp_path / "data")))
    assert refused.value.fields["name"] == "job"
    assert "wait for it" in refused.value.hint
    assert filled.line().claim(5).seqs
    with serving(tmp_path / "data", 5, name="another") as other:
        assert other.line().claim(5).seqs


def test_a_service_that_cannot_listen_says_why(tmp_path: Path) -> None:
    made = msgspec.structs.replace(charge(str(tmp_path / "data")), host="203.0.113.1")
    with pytest.raises(Invalid) as refused, serving(tmp_path / "data", made=made):
        pass
    assert refused.value.fields["what"] == "ledger_host"


def test_a_run_of_another_driver_is_not_overwritten(tmp_path: Path) -> None:
    url = str(tmp_path / "data")
    with serving(tmp_path / "data", 5) as service:
        old = service.record()
    with serving(tmp_path / "data", 5) as service:
        new = service.record()
    # One goes on with the old run, one begins a new run and has not seen the last.
    for late in (charge(url, record=old), charge(url), charge(url, seen=old.run_id)):
        with pytest.raises(Conflict), serving(tmp_path / "data", made=late):
            pass
    with serving(tmp_path / "data", made=charge(url, record=new)) as service:
        assert service.stand().status == "open"


# --- the commit ---------------------------------------------------------------------------------


def parquet(path: Path) -> dict[str, str | int | bool]:
    return {"kind": "parquet", "path": str(path)}


def work_all(service: Serving, rows: int = 7) -> None:
    line = service.line()
    while True:
        answer = line.stepped(wire.Claim(rows, rows), wait_ms=1000)
        if answer.state == "over":
            return
        if answer.state == "granted":
            grant = line.granted(answer)
            if grant.begun < len(grant.seqs):
                line.report(grant, begin=grant.ranges if grant.alone else [])
            good = [(s, s + 1) for s in grant.seqs if s % 10 != 3]
            line.report(grant, done=good, others=[skipped(s) for s in grant.seqs if s % 10 == 3])


def test_rows_are_committed_in_order_in_parts_of_a_fixed_size(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with serving(tmp_path / "data", 95, sink=parquet(out), file_rows=20) as service:
        work_all(service)
        assert service.wait_over().status == "finished"
        assert service.progress().counts[State.COMMITTED] == 95
    assert rows_of_output(out) == [seq for seq in range(95) if seq % 10 != 3]
    manifest = read_parts(out)
    assert (manifest.version, manifest.complete) == (94, True)
    assert [part.hi - part.lo for part in manifest.parts] == [20, 20, 20, 20, 15]


def test_nothing_of_a_part_is_committed_before_all_of_it_ended(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with serving(tmp_path / "data", 60, sink=parquet(out), file_rows=20) as service:
        line = service.line()
        grants = line.take(60)
        late = grants[0]
        for grant in grants[1:]:
            line.report(grant, done=grant.ranges)
        assert service.progress().counts[State.COMMITTED] == 0
        line.report(late, done=late.ranges)
        service.wait_over()
    assert rows_of_output(out) == list(range(60))


class Broken:
    """A sink that raises what no sink should."""

    def __init__(self, path: str) -> None:
        self.path = path

    def spec(self) -> dict[str, str | int | bool]:
        return {"kind": "tests.spark.test_service:Broken", "path": self.path}

    def check_vacant(self) -> None:
        pass

    def begin(self, run_id: str, name: str, schema: Any) -> int:
        return -1

    def commit(self, lo: int, hi: int, table: Any) -> int:
        raise ZeroDivisionError("no such thing")

    def commit_many(self, parts: Any) -> int:
        raise ZeroDivisionError("no such thing")

    def finish(self) -> None:
        pass

    def parts(self, run_id: str) -> list[str]:
        return []


def test_a_sink_that_breaks_is_told_and_nobody_waits_for_it(tmp_path: Path) -> None:
    sink: dict[str, str | int | bool] = {"kind": "tests.spark.test_service:Broken", "path": "x"}
    with serving(tmp_path / "data", 5, sink=sink) as service:
        line = service.line()
        for grant in line.take(5):
            line.report(grant, done=grant.ranges)
        stand = service.until(lambda stand: stand.error is not None)
        assert stand.error is not None
        assert stand.error[0] == "output"
        assert "ZeroDivisionError" in stand.error[1]["why"]


class Killing:
    """Parquet, and a process that dies at a chosen place, once."""

    def __init__(self, path: str, at: str, commits: int = 1) -> None:
        from holdfast.spark.sinks.parquet import ParquetSink

        self.inner = ParquetSink(path)
        self.path, self.at, self.commits = path, at, commits

    def spec(self) -> dict[str, str | int | bool]:
        kind = "tests.spark.test_service:Killing"
        return {"kind": kind, "path": self.path, "at": self.at, "commits": self.commits}

    def _die(self, at: str) -> None:
        mark = Path(f"{self.path}.died")
        if at == self.at and not mark.exists():
            self.commits -= 1
            if self.commits <= 0:
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def check_vacant(self) -> None:
        self.inner.check_vacant()

    def begin(self, run_id: str, name: str, schema: Any) -> int:
        return self.inner.begin(run_id, name, schema)

    def commit(self, lo: int, hi: int, table: Any) -> int:
        return self.inner.commit(lo, hi, table)

    def commit_many(self, parts: Any) -> int:
        self._die("before")
        version = self.inner.commit_many(parts)
        self._die("after")
        return version

    def finish(self) -> None:
        self._die("finish")
        self.inner.finish()

    def parts(self, run_id: str) -> list[str]:
        return self.inner.parts(run_id)


@pytest.mark.parametrize("at", ["before", "after", "finish"])
def test_a_service_killed_about_a_commit_leaves_no_row_out_and_none_twice(
    tmp_path: Path, at: str
) -> None:
    out = tmp_path / "out"
    kind = "tests.spark.test_service:Killing"
    sink: dict[str, str | int | bool] = {"kind": kind, "path": str(out), "at": at}
    with serving(tmp_path / "data", 60, sink=sink, file_rows=20) as service:
        line = service.line()
        grants = line.take(60)
        for grant in grants:
            try:
                line.report(grant, done=grant.ranges)
            except OSError:
                # The service died over it; the report is sent again, as a client does.
                grant.n -= 1
                service.stand()
                line = service.line()
                line.report(grant, done=grant.ranges)
        assert service.wait_over().status == "finished"
        assert service.keeper.restarts == 1
        assert service.progress().counts[State.COMMITTED] == 60
        assert verify(service.store, service.run_id)
    assert Path(f"{out}.died").exists()
    assert rows_of_output(out) == list(range(60))
    assert read_parts(out).complete


__all__ = ["Broken", "Killing"]


def test_a_name_that_leads_elsewhere_by_now_is_not_taken(tmp_path: Path) -> None:
    """Two drivers looked, and there was no run; the slower one must not begin another."""
    path = tmp_path / "data"
    with serving(path, 5) as service:
        first = service.run_id
    with open_store(str(path)) as store, pytest.raises(Conflict, match="faster"):
        Keeper(store, charge(str(path)))
    with open_store(str(path)) as store:
        found = store.read(runs.latest, "job")
        assert found is not None
        assert found.run_id == first


def test_a_retry_that_dies_over_its_input_leaves_the_name_to_the_finished_run(
    tmp_path: Path,
) -> None:
    path = tmp_path / "data"
    with serving(path, 5) as service:
        work_all(service)
        assert service.wait_over().status == "finished"
        finished = service.record()
    retry = msgspec.structs.replace(
        finished, run_id="retry", status=runs.Status.INGESTING, retry_of=finished.run_id
    )
    made = msgspec.structs.replace(charge(str(path), record=retry, seen=finished.run_id), new=True)
    with serving(path, made=made):
        pass
    another = msgspec.structs.replace(
        charge(str(path), seen="retry"),
        record=codec.pack(msgspec.structs.replace(retry, run_id="again")),
    )
    with serving(path, made=another) as service:
        assert service.store.read(runs.get, "retry") is None, "what it took in makes room"
        assert service.store.read(runs.get, finished.run_id) is not None


def test_a_run_whose_rows_have_all_ended_is_not_cancelled(tmp_path: Path) -> None:
    with serving(tmp_path / "data", 5) as service:
        work_all(service)
        service.keeper.ask(wire.Cancel())
        assert service.wait_over().status == "finished"


def test_a_service_that_was_stopped_beyond_its_lease_is_followed_by_another(
    filled: Serving,
) -> None:
    pid = filled.keeper.pid
    os.kill(pid, signal.SIGSTOP)
    resource = runs.lease_resource("job")
    while filled.store.transact(leases.mark_stale, resource) is False:
        held = filled.store.read(leases.current, resource)
        if held is not None and held.state is not leases.State.HELD:
            break
    os.kill(pid, signal.SIGCONT)
    while filled.keeper.restarts == 0:
        filled.keeper.ask(wire.Status())
    assert filled.keeper.pid != pid
