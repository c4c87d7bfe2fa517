"""The ledger service process: connections, claims, reports, cancellation, restarts and commits."""

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

from holdfast import codec, failpoints
from holdfast.clock import SYSTEM, S, iso_time
from holdfast.durable import lease as leases
from holdfast.errors import Conflict, HoldfastError, IllegalTransition, Invalid
from holdfast.ledger import runs
from holdfast.ledger.log import verify_run
from holdfast.ledger.run_policy import ErrorClass, RunPolicy
from holdfast.ledger.states import RowState
from holdfast.spark import ledger_protocol
from holdfast.spark.arrow_rows import encode_stream
from holdfast.spark.ingest import HASH_COLUMN, IngestTask
from holdfast.spark.ledger_client import BlockUploaderFactory, LedgerClient, ServiceLost
from holdfast.spark.service import EXIT_FENCED
from holdfast.spark.service_supervisor import ServiceSupervisor
from holdfast.spark.sinks.parquet import read_parts
from holdfast.store import open as open_store
from tests.ledger_service.service_rig import (
    MemoryStore,
    RawConnection,
    ServiceRig,
    exchange_request,
    input_ids,
    input_table,
    kill_idle_children,
    next_report,
    output_ids,
    running_service,
    seal_request,
    service_config,
    service_thread,
)
from tests.process.watch import until

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", autouse=True)
def _no_child_is_left() -> Iterator[None]:
    yield
    kill_idle_children()


def failed(
    seq: int, kind: ErrorClass = ErrorClass.INPUT, why: str = "bad"
) -> ledger_protocol.ResultlessRowReport:
    return ledger_protocol.ResultlessRowReport(seq, int(RowState.TERMINAL_FAIL), int(kind), why)


def skipped(seq: int, why: str = "dull") -> ledger_protocol.ResultlessRowReport:
    return ledger_protocol.ResultlessRowReport(seq, int(RowState.TERMINAL_SKIP), 0, why)


# --- authentication -----------------------------------------------------------------------------


@pytest.fixture
def filled() -> Iterator[ServiceRig]:
    with service_thread(100) as service:
        yield service


@pytest.fixture
def killable(tmp_path: Path) -> Iterator[ServiceRig]:
    """A service in a process that the test may kill."""
    with running_service(tmp_path / "data", 100) as service:
        yield service


def test_wrong_token_is_refused(filled: ServiceRig) -> None:
    for token in (
        "",
        "x",
        filled.supervisor.config.token[:-1],
        filled.supervisor.config.token + "0",
    ):
        with pytest.raises(Invalid) as refused:
            RawConnection(filled.supervisor.address, token=token)
        assert refused.value.fields == {"what": "token", "why": "not of this run"}
    assert filled.connect().request(ledger_protocol.GetRunStatus()).status == "open"


def is_closed(sock: socket.socket) -> bool:
    """Whether the service closes the connection without a reply."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def raw_socket(service: ServiceRig) -> socket.socket:
    return socket.create_connection(
        (service.supervisor.address.host, service.supervisor.address.port)
    )


JUNK = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "large": struct.pack("<II", 5000, 0),
    "huge": struct.pack("<II", 2**32 - 1, 2**32 - 1),
    "junk": struct.pack("<II", 3, 0) + b"\xc1\xc1\xc1",
    "truncated": b"\x00",
}


def test_junk_before_hello_closes_only_its_connection(filled: ServiceRig) -> None:
    for data in JUNK.values():
        with raw_socket(filled) as line:
            line.sendall(data)
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_WR)
            assert is_closed(line)
    assert filled.connect().claim(1).seqs == [0]


def test_request_before_hello_is_refused(filled: ServiceRig) -> None:
    with raw_socket(filled) as line:
        ledger_protocol.send(line, ledger_protocol.ClaimRows(1, 1))
        with pytest.raises((Invalid, OSError)):
            ledger_protocol.receive_reply(line)
    with raw_socket(filled) as line:
        ledger_protocol.send(line, exchange_request(ledger_protocol.ClaimRows(1, 1)))
        with pytest.raises(Invalid):
            ledger_protocol.receive_reply(line)
    assert filled.load_scheduler().ledger.counts()[RowState.UNSEEN] == 100


def test_unknown_request_closes_the_connection_and_releases_its_rows(filled: ServiceRig) -> None:
    line = filled.connect()
    line.claim(10)
    head = msgspec.msgpack.encode(["Explode"])
    line.sock.sendall(struct.pack("<II", len(head), 0) + head)
    assert line.wait_closed()
    assert filled.connect("child/other").claim(10, wait_ms=5000).seqs == list(range(10))


def test_second_hello_is_refused_and_the_connection_stays_open(filled: ServiceRig) -> None:
    line = filled.connect()
    with pytest.raises(Invalid):
        line.request(ledger_protocol.Hello(filled.supervisor.config.token, "child/x"))
    assert line.claim(1).seqs == [0]


INVALID_REQUESTS: list[ledger_protocol.WireMessage] = [
    exchange_request(ledger_protocol.ClaimRows(5, -1)),
    exchange_request(ledger_protocol.ClaimRows(5, 0, 50, 10)),
    exchange_request(ledger_protocol.ClaimRows(5, 0, -5, 10)),
    exchange_request(ledger_protocol.ClaimRows(5, 0, 1 << 40, -1)),
    ledger_protocol.FetchOutcomes(-5, 10, False),
    ledger_protocol.FetchOutcomes(0, 1 << 40, True),
    ledger_protocol.FetchOutcomes(50, 10, True),
    ledger_protocol.PutBlock(),
]


def test_invalid_requests_are_refused_and_the_connection_stays_open(filled: ServiceRig) -> None:
    line = filled.connect()
    for request in INVALID_REQUESTS:
        with pytest.raises(Invalid):
            line.request(request)
    for grant in line.claim_all(100):
        line.report(grant, done=grant.ranges)
    assert verify_run(filled.store, filled.run_id)


# --- input --------------------------------------------------------------------------------------


def test_pipelined_reports_are_answered_in_order(filled: ServiceRig) -> None:
    line = filled.connect()
    grant = line.claim(20, begin=20)
    rows = len(grant.seqs)
    moves = [next_report(grant, done=[(seq, seq + 1)]) for seq in grant.seqs]
    for move, data in moves:
        line.send(exchange_request(None, move), data)
    line.send(ledger_protocol.GetRunStatus())
    left = [line.receive().report_replies[0].rows_left for _ in moves]
    assert left == list(range(rows - 1, -1, -1))
    assert line.receive().status == "open"


def test_report_is_durable_after_its_connection_closes(filled: ServiceRig) -> None:
    line = filled.connect()
    grant = line.claim(5, begin=5)
    move, data = next_report(grant, done=[(grant.seqs[0], grant.seqs[-1] + 1)])
    line.send(exchange_request(None, move), data)
    line.close()
    other = filled.connect("child/other")
    until(
        lambda: codec.unpack_as(
            runs.RunProgress, other.request(ledger_protocol.GetRunStatus()).progress
        ).ended[0],
        "the outcome of the report",
    )


def test_row_requests_before_the_seal_are_refused() -> None:
    with service_thread() as service:
        line = service.connect()
        for request in (
            exchange_request(ledger_protocol.ClaimRows(1, 1)),
            ledger_protocol.FetchOutcomes(0, 1, False),
            ledger_protocol.CancelRun(),
        ):
            with pytest.raises(Invalid) as refused:
                line.request(request)
            assert "no input" in refused.value.fields["why"]
        assert service.status().status == "ingesting"
        assert service.put_input(3) == 3
        assert [grant.seqs for grant in line.claim_all(3)] == [[0], [1], [2]]


def test_empty_input_finishes_immediately() -> None:
    with service_thread(0) as service:
        assert service.wait_over().status == "finished"
        assert service.connect().exchange(ledger_protocol.ClaimRows(5, 5)).state == "over"


def test_repeated_seal_changes_nothing() -> None:
    with service_thread(10) as service:
        grant = service.connect().claim(4, begin=4)
        assert service.supervisor.request(seal_request([(0, 10)])).size == 10
        service.connections[0].report(grant, done=[(0, 4)])
        assert service.load_scheduler().ledger.counts()[RowState.TERMINAL_SUCCESS] == 4
        assert verify_run(service.store, service.run_id)


def test_put_block_after_the_seal_is_refused(filled: ServiceRig) -> None:
    line = BlockUploaderFactory(filled.supervisor.address)()
    with pytest.raises(Invalid) as refused:
        line.put_block(encode_stream(input_table(0, 5)))
    assert refused.value.fields["what"] == "input"
    line.close()


def test_seal_deletes_blocks_that_it_does_not_name() -> None:
    with service_thread() as service:
        line = BlockUploaderFactory(service.supervisor.address)()
        numbers = [line.put_block(encode_stream(input_table(i * 5, i * 5 + 5))) for i in range(4)]
        line.close()
        assert (
            service.supervisor.request(seal_request([(numbers[1], 5), (numbers[3], 5)])).size == 10
        )
        kept = [n for n in numbers if service.store.read(runs.get_block, service.run_id, n)]
        assert kept == [numbers[1], numbers[3]]
        assert input_ids(service.connect().claim_all(10)) == [*range(5, 10), *range(15, 20)]


def test_restarted_service_numbers_blocks_after_the_stored_ones(
    tmp_path: Path,
) -> None:
    with running_service(tmp_path / "data") as service:
        line = BlockUploaderFactory(service.supervisor.address)()
        first = [line.put_block(encode_stream(input_table(i * 5, i * 5 + 5))) for i in range(3)]
        os.kill(service.supervisor.pid, signal.SIGKILL)
        service.wait_exit()
        assert service.status().status == "ingesting"
        last = line.put_block(encode_stream(input_table(15, 20)))
        line.close()
        assert len({*first, last}) == 4
        blocks = [(n, 5) for n in [*first, last]]
        assert service.supervisor.request(seal_request(blocks)).size == 20
        assert input_ids(service.connect().claim_all(20)) == list(range(20))


def test_restarted_service_merges_overlapping_blocks_in_key_order(
    tmp_path: Path,
) -> None:
    with running_service(tmp_path / "data") as service:
        staged = []
        for part in (0, 1, 2):
            # Upload blocks as a Spark task does. The keys of the three tasks interleave.
            body = IngestTask(
                BlockUploaderFactory(service.supervisor.address), ("id",), 10, 1 << 20
            )
            ids = list(range(part, 60, 3))[::-1]
            batch = pa.record_batch({"id": pa.array(ids, pa.int64()), HASH_COLUMN: pa.array(ids)})
            for stats in body([batch]):
                staged += [
                    (row["n"], row["rows"], row["size_bytes"], row["bounds"])
                    for row in stats.to_pylist()
                ]
        os.kill(service.supervisor.pid, signal.SIGKILL)
        service.wait_exit()
        message = msgspec.structs.replace(seal_request([]), merge=True, staged=staged)
        assert service.supervisor.request(message).size == 60
        assert service.supervisor.request(message).size == 60
        assert input_ids(service.connect().claim_all(60)) == list(range(60))
        kept = {n for n, _ in service.record().blocks}
        assert kept.isdisjoint(n for n, *_ in staged)
        assert not any(service.store.read(runs.get_block, service.run_id, n) for n, *_ in staged)


# --- claims and reports -------------------------------------------------------------------------


def test_claim_grants_each_row_once_with_its_input() -> None:
    with service_thread(1000, blocks=7) as service:
        service.connect("child/a")
        line = service.connect("child/b")
        seen: list[int] = []
        while True:
            answer = line.exchange(ledger_protocol.ClaimRows(130, 0))
            if answer.state != "granted":
                break
            grant = line.record_grant(answer)
            assert grant.rows.column("id").to_pylist() == grant.seqs
            seen += grant.seqs
        assert sorted(seen) == list(range(1000))
        assert answer.state == "wait"


def test_repeated_exchange_gets_the_same_reply(filled: ServiceRig) -> None:
    line = filled.connect()
    grant = line.claim(10, begin=5)
    move, data = next_report(grant, done=[(0, 3)], others=[failed(3), skipped(4)], begin=[(5, 10)])
    first = line.exchange(None, move, data=data)
    before = filled.load_scheduler().dump()
    for _ in range(3):
        assert line.exchange(None, move, data=data) == first
    assert filled.load_scheduler().dump() == before
    assert filled.outcomes().resultless_rows(0, 5).num_rows == 2


def test_other_report_under_the_same_number_halts_the_run(filled: ServiceRig) -> None:
    line = filled.connect()
    grant = line.claim(10, begin=10)
    line.report(grant, done=[(0, 3)])
    grant.report_no -= 1
    with pytest.raises(IllegalTransition):
        line.report(grant, done=[(0, 4)])
    assert filled.record().status is runs.RunLifecycle.HALTED


ILLEGAL = {
    "ended twice": ([(0, 5)], [(0, 2)]),
    "not begun": ([], [(7, 8)]),
    "not its own": ([], [(50, 51)]),
}


@pytest.mark.spec(
    "002",
    "Illegal Transition Policy",
    "3: the error of the service has seq, prior and attempted state, owner, wall clock and store time",
    module="holdfast.spark.service_requests",
)
@pytest.mark.parametrize(("before", "then"), ILLEGAL.values(), ids=ILLEGAL.keys())
def test_illegal_transition_halts_the_run_and_is_described_in_full(
    filled: ServiceRig, before: list[tuple[int, int]], then: list[tuple[int, int]]
) -> None:
    line = filled.connect("child/liar")
    grant = line.claim(10, begin=5)
    if before:
        line.report(grant, done=before)
    before_ns = SYSTEM.wall_ns(), filled.store.now_ns()
    with pytest.raises(IllegalTransition) as halted:
        line.report(grant, done=then)
    fields = halted.value.fields
    assert fields["seq"] == then[0][0]
    assert fields["attempted"] == "TERMINAL_SUCCESS"
    assert fields["prior"] in {state.name for state in RowState}
    assert "child/liar" in fields["owner"]
    after = SYSTEM.wall_ns(), filled.store.now_ns()
    for name, lo, hi in zip(("wall_ns", "store_ns"), before_ns, after, strict=True):
        assert lo - S <= fields[name] <= hi + S, name
    assert fields["wall_time"] == iso_time(fields["wall_ns"])
    assert fields["store_time"] == iso_time(fields["store_ns"])

    record = filled.record()
    assert record.status is runs.RunLifecycle.HALTED
    for part in (
        f"seq {fields['seq']}",
        fields["prior"],
        fields["attempted"],
        fields["owner"],
        fields["wall_time"],
        fields["store_time"],
    ):
        assert part in record.halted
    assert filled.status().halted == record.halted
    assert filled.load_scheduler().halted is not None

    with pytest.raises(IllegalTransition):
        filled.connect("child/other").report(grant, done=[(8, 9)])
    assert filled.connect("child/third").exchange(ledger_protocol.ClaimRows(5, 5)).state == "stop"
    assert verify_run(filled.store, filled.run_id)


def test_a_halted_run_stays_halted_after_a_restart(killable: ServiceRig) -> None:
    line = killable.connect()
    grant = line.claim(10, begin=5)
    with pytest.raises(IllegalTransition):
        line.report(grant, done=[(7, 8)])
    os.kill(killable.supervisor.pid, signal.SIGKILL)
    killable.wait_exit()
    stand = killable.status()
    assert (stand.status, bool(stand.halted)) == ("halted", True)


def test_reports_before_an_invalid_report_of_an_exchange_are_logged(filled: ServiceRig) -> None:
    line = filled.connect()
    one, two = line.claim(5, begin=5), line.claim(5, begin=5)
    first, data = next_report(one, done=[(0, 5)])
    second, more = next_report(two, done=[(5, 10)])
    late = msgspec.structs.replace(second, report_no=9)
    with pytest.raises(Invalid) as refused:
        line.exchange(None, first, late, data=data + more)
    assert refused.value.fields["what"] == "n"
    with pytest.raises(Invalid):
        line.exchange(ledger_protocol.ClaimRows(5, -1), second, data=more)
    board = filled.load_scheduler()
    assert board.ledger.counts()[RowState.TERMINAL_SUCCESS] == 10
    assert filled.progress().counts == board.ledger.counts()
    assert filled.outcomes().successes(0, 10).column("y").to_pylist() == list(range(0, 20, 2))
    assert verify_run(filled.store, filled.run_id)


def test_disconnect_releases_granted_rows_immediately() -> None:
    policy = RunPolicy(lease_ns=3600 * 10**9)
    with service_thread(20, policy=policy) as service:
        disconnected = service.connect("child/gone")
        disconnected.claim(10, begin=4)
        disconnected.close()
        service.wait_until(lambda _: service.progress().reclaims == 1)
        other = service.connect("child/heir")
        grant = other.claim(20, begin=20, wait_ms=5000)
        # The four begun rows may have killed their worker, so they come last and isolated.
        assert grant.seqs[:6] == list(range(4, 10)) or grant.isolated
        seen = dict.fromkeys(grant.seqs, 1)
        while len(seen) < 20:
            if not grant.isolated:
                other.report(grant, done=grant.ranges)
            else:
                other.report(grant, begin=grant.ranges)
                other.report(grant, done=grant.ranges)
                assert grant.attempts == [2]
            if len(seen) < 20:
                grant = other.claim(20, begin=20, wait_ms=5000)
            seen |= dict.fromkeys(grant.seqs, 1)
        assert service.progress().reclaims == 1


def test_fenced_report_is_dropped_and_the_later_report_counts() -> None:
    policy = RunPolicy(lease_ns=200_000_000, backoff_first_ns=0, backoff_max_ns=0)
    with service_thread(50, policy=policy) as service:
        zombie = service.connect("child/zombie")
        old = zombie.claim(5, begin=5)
        service.wait_until(lambda stand: service.progress().reclaims == 1)
        answer = zombie.report(old, done=old.ranges)
        assert [reply.lost for reply in answer.report_replies] == [True]
        assert zombie.request(ledger_protocol.ServiceHeartbeat([old.epoch])).lost == [old.epoch]
        assert service.progress().fenced == 2
        other = service.connect("child/heir")
        for seq in range(5):
            # These rows delay the commit, so they are granted first, one at a time.
            grant = other.claim(5, wait_ms=5000)
            assert (grant.isolated, grant.seqs) == (True, [seq])
            other.report(grant, begin=grant.ranges)
            other.report(grant, others=[skipped(seq, "by the heir")])
        assert service.outcomes().skipped(0, 5).column("_error").to_pylist() == ["by the heir"] * 5
        assert service.outcomes().successes(0, 5).num_rows == 0


def test_heartbeat_keeps_the_lease_of_a_grant() -> None:
    policy = RunPolicy(lease_ns=400_000_000)
    with service_thread(10, policy=policy) as service:
        silent, lively = service.connect("child/silent"), service.connect("child/lively")
        lost, kept = silent.claim(5, begin=5), lively.claim(5, begin=5)
        while not service.progress().reclaims:
            assert lively.request(ledger_protocol.ServiceHeartbeat([kept.epoch])).lost == []
        assert lively.report(kept, done=kept.ranges).report_replies[0].lost is False
        assert silent.report(lost, done=lost.ranges).report_replies[0].lost is True


def test_row_that_always_kills_its_worker_fails_with_lease_expired() -> None:
    policy = RunPolicy(attempts_max=3, lease_ns=3600 * 10**9)
    with service_thread(1, policy=policy) as service:
        for attempt in (1, 2, 3):
            line = service.connect(f"child/{attempt}")
            grant = line.claim(1, wait_ms=5000)
            assert grant.attempts == [attempt]
            line.report(grant, begin=[(0, 1)])
            line.close()
        stand = service.wait_over()
        assert stand.status == "finished"
        [row] = service.outcomes().failed(0, 1).to_pylist()
        assert (row["_attempts"], row["_error_class"]) == (3, "lease_expired")


def test_transient_failure_is_retried_up_to_attempts_max() -> None:
    policy = RunPolicy(attempts_max=3, backoff_first_ns=0, backoff_max_ns=0)
    with service_thread(2, policy=policy) as service:
        line = service.connect()
        good, bad = line.claim_all(2)
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


def test_outcomes_of_interleaved_reports_are_in_seq_order() -> None:
    with service_thread(12) as service:
        line = service.connect()
        grants = line.claim_all(12)
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
        meta = outcomes.all_rows(0, 12)
        assert meta.column("_seq").to_pylist() == list(range(12))
        answer = line.request(ledger_protocol.FetchOutcomes(0, 12, False))
        assert answer.ready
        assert outcomes.successes(3, 9).column("y").to_pylist() == [6, 8, 12, 14, 16]


def test_outcomes_of_running_rows_are_not_ready(filled: ServiceRig) -> None:
    line = filled.connect()
    grant = line.claim(10, begin=10)
    assert line.request(ledger_protocol.FetchOutcomes(0, 10, True)).ready is False
    line.report(grant, done=grant.ranges)
    assert line.request(ledger_protocol.FetchOutcomes(0, len(grant.seqs), True)).ready is True


# --- back-pressure, rate ------------------------------------------------------------------------


def test_claim_waits_when_rows_are_far_ahead_of_the_commit() -> None:
    policy = RunPolicy(ahead_rows_max=20)
    with service_thread(1000, policy=policy, file_rows=10) as service:
        line = service.connect()
        held = line.claim(10, begin=10)
        ahead: list[Any] = []
        while True:
            answer = line.exchange(ledger_protocol.ClaimRows(10, 10))
            if answer.state != "granted":
                break
            ahead.append(line.record_grant(answer))
        assert (answer.state, answer.why) == ("wait", "lag")
        assert max(seq for grant in ahead for seq in grant.seqs) < 50
        for grant in ahead:
            line.report(grant, done=grant.ranges)
        assert line.exchange(ledger_protocol.ClaimRows(10, 10)).why == "lag"
        line.report(held, done=held.ranges)
        assert line.claim(10, wait_ms=5000).seqs


def test_rate_limit_holds_across_clients() -> None:
    with service_thread(10, rate_per_s=50) as service:
        lines = [service.connect(f"child/{i}") for i in range(2)]
        began_ns = service.store.now_ns()
        given = 0
        while given < 40:
            for line in lines:
                given += line.request(ledger_protocol.AcquireTokens(100)).count
        passed_s = (service.store.now_ns() - began_ns) / 1e9
        assert given <= 50 * (passed_s + 0.2) + 2


def test_tokens_without_a_rate_limit_are_granted_in_full(filled: ServiceRig) -> None:
    assert filled.connect().request(
        ledger_protocol.AcquireTokens(5000)
    ) == ledger_protocol.TokensGranted(5000, 0)


# --- cancellation -------------------------------------------------------------------------------


def test_cancel_lets_begun_rows_end_and_begins_no_more() -> None:
    policy = RunPolicy(grace_ns=3600 * 10**9)
    with service_thread(100, policy=policy) as service:
        line = service.connect()
        grant = line.claim(10, begin=4)
        service.supervisor.request(ledger_protocol.CancelRun())
        assert service.status().status == "cancelling"
        answer = line.report(grant, done=[(0, 2)], begin=[(4, 6)])
        assert (answer.state, answer.why) == ("stop", "cancelling")
        assert line.exchange(ledger_protocol.ClaimRows(5, 5)).state == "stop"
        line.report(grant, done=[(2, 3)], others=[failed(3, ErrorClass.TRANSIENT)])
        assert service.wait_over().status == "cancelled"
        assert service.progress().ended == [3, 0, 1, 96]
        assert service.outcomes().successes(0, 100).column("y").to_pylist() == [0, 2, 4]


def test_rows_still_running_after_the_cancel_grace_are_cancelled() -> None:
    policy = RunPolicy(grace_ns=100_000_000)
    with service_thread(100, policy=policy) as service:
        line = service.connect()
        grant = line.claim(10, begin=10)
        service.supervisor.request(ledger_protocol.CancelRun())
        assert service.wait_over().status == "cancelled"
        assert service.progress().ended == [0, 0, 0, 100]
        assert line.report(grant, done=[(0, 2)]).report_replies[0].lost


def test_cancel_request_in_the_store_cancels_the_run(filled: ServiceRig) -> None:
    filled.connect().claim(10)
    filled.store.transact(runs.request_cancel, filled.run_id)
    assert filled.wait_over().status == "cancelled"
    assert filled.record().status is runs.RunLifecycle.CANCELLED


def test_run_ended_before_its_cancel_request_is_recorded_ends_as_cancelled(
    filled: ServiceRig,
) -> None:
    """The log has the cancellation of all rows. The committer stores the end of the run first."""

    def wait_ended(run_id: str) -> None:
        until(lambda: filled.record().status not in runs.UNFINISHED, "the end of the run")

    with failpoints.on("ledger.cancel_logged", calls=wait_ended) as point:
        filled.store.transact(runs.request_cancel, filled.run_id)
        assert filled.wait_over().status == "cancelled"
        until(lambda: point.hits == 1, "the recorded cancel request")
    assert filled.record().status is runs.RunLifecycle.CANCELLED


# --- exit, kill, restart ------------------------------------------------------------------------


def test_service_exits_cleanly_when_its_driver_is_gone(tmp_path: Path) -> None:
    with running_service(tmp_path / "data", 100) as service:
        line = service.connect()
        grant = line.claim(10, begin=10)
        line.report(grant, done=[grant.ranges[0]])
        process = service.supervisor._process
        assert process is not None
        process.stdin.close()
        assert service.wait_exit() == 0
        assert line.wait_closed()
        assert service.store.read(leases.current_status, runs.lease_resource("job")).worker == ""
        assert service.load_scheduler().ledger.counts()[RowState.TERMINAL_SUCCESS] == len(
            grant.seqs
        )
        assert service.record().status is runs.RunLifecycle.OPEN


def test_service_exits_on_a_shutdown_request(killable: ServiceRig) -> None:
    killable.connect().request(ledger_protocol.ShutdownService())
    assert killable.wait_exit() == 0
    assert killable.store.read(leases.current_status, runs.lease_resource("job")).worker == ""


def test_sigint_does_not_stop_the_service(killable: ServiceRig) -> None:
    os.kill(killable.supervisor.pid, signal.SIGINT)
    assert killable.connect().claim(5).seqs
    assert killable.supervisor.restarts == 0


def test_service_that_lost_its_lease_exits_fenced(killable: ServiceRig) -> None:
    line = killable.connect()
    line.claim(10, begin=10)
    killable.store.transact(leases.force_release, runs.lease_resource("job"), "a test")
    assert killable.wait_exit() == EXIT_FENCED
    assert line.wait_closed()


def test_service_without_its_lease_writes_no_report(killable: ServiceRig) -> None:
    line = killable.connect()
    grant = line.claim(10, begin=10)
    killable.store.transact(leases.force_release, runs.lease_resource("job"), "a test")
    with pytest.raises((HoldfastError, OSError)):
        line.report(grant, done=grant.ranges)
    assert killable.wait_exit() == EXIT_FENCED
    assert killable.load_scheduler().ledger.counts()[RowState.TERMINAL_SUCCESS] == 0


def test_killed_service_restarts_with_its_state_and_grants(killable: ServiceRig) -> None:
    line = killable.connect()
    grant = line.claim(10, begin=10)
    line.report(grant, done=[(0, 2)])
    before = killable.load_scheduler().dump()
    port = killable.supervisor.address.port
    os.kill(killable.supervisor.pid, signal.SIGKILL)
    killable.wait_exit()
    assert killable.status().status == "open"
    assert (killable.supervisor.restarts, killable.supervisor.address.port) == (1, port)
    assert killable.load_scheduler().dump() == before
    again = killable.connect()
    answer = again.report(grant, done=[(2, len(grant.seqs))])
    assert answer.report_replies == [ledger_protocol.GrantReportReply(False, 0, "")]
    assert killable.progress().reclaims == 0
    assert verify_run(killable.store, killable.run_id)


def test_restarted_service_repeats_the_reply_to_a_known_report(
    killable: ServiceRig,
) -> None:
    line = killable.connect()
    grant = line.claim(10, begin=10)
    move, data = next_report(grant, done=[(0, 2)])
    first = line.exchange(None, move, data=data)
    os.kill(killable.supervisor.pid, signal.SIGKILL)
    killable.wait_exit()
    killable.status()
    assert killable.connect().exchange(None, move, data=data) == first
    assert killable.load_scheduler().ledger.counts()[RowState.TERMINAL_SUCCESS] == 2


def test_restarted_service_resends_an_unacknowledged_grant(killable: ServiceRig) -> None:
    line = killable.connect("child/a")
    known, lost = line.claim(5, begin=2), line.claim(5, begin=3)
    os.kill(killable.supervisor.pid, signal.SIGKILL)
    killable.wait_exit()
    killable.status()
    line = killable.connect("child/a")
    line.known_epochs = [known.epoch]
    again = line.claim(5, begin=5)
    assert (again.epoch, again.seqs, again.begun) == (lost.epoch, lost.seqs, 3)
    assert again.rows == lost.rows
    assert line.report(again, done=[(5, 8)]).report_replies[0].lost is False
    # Another child does not get these grants. They end with the owner's last connection.
    other = killable.connect("child/b")
    assert min(other.claim(5).seqs) >= 10
    line.close()
    assert killable.wait_until(lambda _: killable.progress().reclaims == 2)


def test_client_waits_for_a_restarting_service(killable: ServiceRig) -> None:
    client = LedgerClient(killable.supervisor.address, "child")
    client.connect()
    os.kill(killable.supervisor.pid, signal.SIGKILL)
    killable.wait_exit()
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(
            client.request(exchange_request(ledger_protocol.ClaimRows(5, 0)))
        )
    )
    thread.start()
    killable.status()
    thread.join(20)
    assert answers[0][0].state == "granted"
    client.close()


def test_client_raises_service_lost_after_its_reconnect_timeout(killable: ServiceRig) -> None:
    client = LedgerClient(killable.supervisor.address, "child", reconnect_s=0.2)
    client.connect()
    os.kill(killable.supervisor.pid, signal.SIGKILL)
    killable.wait_exit()
    with pytest.raises(ServiceLost) as lost:
        client.request(ledger_protocol.GetRunStatus())
    assert str(killable.supervisor.address.port) in lost.value.fields["address"]


def test_rows_begun_before_a_takeover_are_granted_isolated() -> None:
    store = MemoryStore()
    with service_thread(20, store=store) as service:
        line = service.connect()
        grant = line.claim(10, begin=10)
        line.report(grant, done=[(0, 2)])
        record = service.record()
        begun = [seq for seq in grant.seqs if seq >= 2]
    made = service_config("memory:", record=record)
    with service_thread(store=store, config=made) as successor:
        assert successor.progress().reclaims == 1
        line = successor.connect()
        isolated = []
        while True:
            answer = line.exchange(ledger_protocol.ClaimRows(50, 0))
            if answer.state != "granted":
                break
            found = line.record_grant(answer)
            isolated += found.seqs if found.isolated else []
        assert isolated == begun
        assert verify_run(successor.store, successor.run_id)


def test_a_name_has_one_service_at_a_time(killable: ServiceRig, tmp_path: Path) -> None:
    with pytest.raises(runs.RunAtWork) as refused:
        ServiceSupervisor(killable.store, service_config(str(tmp_path / "data")))
    assert refused.value.fields["name"] == "job"
    assert "wait for it" in refused.value.hint
    assert killable.connect().claim(5).seqs
    with running_service(tmp_path / "data", 5, name="another") as other:
        assert other.connect().claim(5).seqs


def test_service_with_an_unusable_ledger_host_is_refused(tmp_path: Path) -> None:
    made = msgspec.structs.replace(service_config(str(tmp_path / "data")), host="203.0.113.1")
    with pytest.raises(Invalid) as refused, running_service(tmp_path / "data", config=made):
        pass
    assert refused.value.fields["what"] == "ledger_host"


def test_outdated_driver_gets_conflict_and_overwrites_no_run() -> None:
    url, store = "memory:", MemoryStore()
    with service_thread(5, store=store) as service:
        old = service.record()
    with service_thread(5, store=store) as service:
        new = service.record()
    # The first config continues the old run. The second and third create a run and missed the latest one.
    for late in (
        service_config(url, record=old),
        service_config(url),
        service_config(url, expected_latest=old.run_id),
    ):
        with pytest.raises(Conflict), service_thread(store=store, config=late):
            pass
    with service_thread(store=store, config=service_config(url, record=new)) as service:
        assert service.status().status == "open"


# --- the commit ---------------------------------------------------------------------------------


def parquet_spec(path: Path) -> dict[str, str | int | bool]:
    return {"kind": "parquet", "path": str(path)}


def process_all_rows(service: ServiceRig, rows: int = 7) -> None:
    line = service.connect()
    while True:
        answer = line.exchange(ledger_protocol.ClaimRows(rows, rows), wait_ms=1000)
        if answer.state == "over":
            return
        if answer.state == "granted":
            grant = line.record_grant(answer)
            if grant.begun < len(grant.seqs):
                line.report(grant, begin=grant.ranges if grant.isolated else [])
            good = [(s, s + 1) for s in grant.seqs if s % 10 != 3]
            line.report(grant, done=good, others=[skipped(s) for s in grant.seqs if s % 10 == 3])


def test_commit_writes_parts_of_file_rows_in_order(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with service_thread(95, sink=parquet_spec(out), file_rows=20) as service:
        process_all_rows(service)
        assert service.wait_over().status == "finished"
        assert service.progress().counts[RowState.COMMITTED] == 95
    assert output_ids(out) == [seq for seq in range(95) if seq % 10 != 3]
    manifest = read_parts(out)
    assert (manifest.version, manifest.complete) == (94, True)
    assert [part.hi - part.lo for part in manifest.parts] == [20, 20, 20, 20, 15]


def test_part_is_committed_only_after_all_its_rows_ended(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with service_thread(60, sink=parquet_spec(out), file_rows=20) as service:
        line = service.connect()
        grants = line.claim_all(60)
        late = grants[0]
        for grant in grants[1:]:
            line.report(grant, done=grant.ranges)
        assert service.progress().counts[RowState.COMMITTED] == 0
        line.report(late, done=late.ranges)
        service.wait_over()
    assert output_ids(out) == list(range(60))


class RaisingSink:
    """A sink that raises an unexpected exception."""

    def __init__(self, path: str) -> None:
        self.path = path

    def spec(self) -> dict[str, str | int | bool]:
        return {"kind": "tests.ledger_service.test_service:RaisingSink", "path": self.path}

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


def test_sink_exception_is_reported_in_the_run_status() -> None:
    sink: dict[str, str | int | bool] = {
        "kind": "tests.ledger_service.test_service:RaisingSink",
        "path": "x",
    }
    with service_thread(5, sink=sink) as service:
        line = service.connect()
        for grant in line.claim_all(5):
            line.report(grant, done=grant.ranges)
        stand = service.wait_until(lambda stand: stand.error is not None)
        assert stand.error is not None
        assert stand.error[0] == "output"
        assert "ZeroDivisionError" in stand.error[1]["why"]


class KillingSink:
    """A Parquet sink that kills its process once, at a chosen step."""

    def __init__(self, path: str, at: str, commits: int = 1) -> None:
        from holdfast.spark.sinks.parquet import ParquetSink

        self.inner = ParquetSink(path)
        self.path, self.at, self.commits = path, at, commits

    def spec(self) -> dict[str, str | int | bool]:
        kind = "tests.ledger_service.test_service:KillingSink"
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
def test_service_killed_around_a_commit_commits_each_row_once(tmp_path: Path, at: str) -> None:
    out = tmp_path / "out"
    kind = "tests.ledger_service.test_service:KillingSink"
    sink: dict[str, str | int | bool] = {"kind": kind, "path": str(out), "at": at}
    with running_service(tmp_path / "data", 60, sink=sink, file_rows=20) as service:
        line = service.connect()
        grants = line.claim_all(60)
        for grant in grants:
            try:
                line.report(grant, done=grant.ranges)
            except OSError:
                # The service died during the report. Send it again, as a client does.
                grant.report_no -= 1
                service.status()
                line = service.connect()
                line.report(grant, done=grant.ranges)
        assert service.wait_over().status == "finished"
        assert service.supervisor.restarts == 1
        assert service.progress().counts[RowState.COMMITTED] == 60
        assert verify_run(service.store, service.run_id)
    assert Path(f"{out}.died").exists()
    assert output_ids(out) == list(range(60))
    assert read_parts(out).complete


__all__ = ["KillingSink", "RaisingSink"]


def test_slower_driver_gets_conflict_when_the_run_name_is_taken(tmp_path: Path) -> None:
    """Two drivers read that there is no run. The slower one must not create a second run."""
    path = tmp_path / "data"
    with running_service(path, 5) as service:
        first = service.run_id
    with open_store(str(path)) as store, pytest.raises(Conflict, match="faster"):
        ServiceSupervisor(store, service_config(str(path)))
    with open_store(str(path)) as store:
        found = store.read(runs.get_latest, "job")
        assert found is not None
        assert found.run_id == first


def test_retry_that_died_during_ingest_is_deleted_and_the_finished_run_stays() -> None:
    store = MemoryStore()
    with service_thread(5, store=store) as service:
        process_all_rows(service)
        assert service.wait_over().status == "finished"
        finished = service.record()
    retry = msgspec.structs.replace(
        finished, run_id="retry", status=runs.RunLifecycle.INGESTING, retry_of=finished.run_id
    )
    made = msgspec.structs.replace(
        service_config("memory:", record=retry, expected_latest=finished.run_id), is_new_run=True
    )
    with service_thread(store=store, config=made):
        pass
    another = msgspec.structs.replace(
        service_config("memory:", expected_latest="retry"),
        record=codec.pack(msgspec.structs.replace(retry, run_id="again")),
    )
    with service_thread(store=store, config=another) as service:
        assert service.store.read(runs.get_record, "retry") is None, "what it took in makes room"
        assert service.store.read(runs.get_record, finished.run_id) is not None


def test_cancel_after_all_rows_ended_finishes_the_run() -> None:
    with service_thread(5) as service:
        process_all_rows(service)
        service.supervisor.request(ledger_protocol.CancelRun())
        assert service.wait_over().status == "finished"


def test_service_stopped_beyond_its_lease_is_replaced(killable: ServiceRig) -> None:
    pid = killable.supervisor.pid
    os.kill(pid, signal.SIGSTOP)
    resource = runs.lease_resource("job")
    until(lambda: _has_expired(killable, resource), "the end of the lease")
    os.kill(pid, signal.SIGCONT)
    killable.wait_until(lambda _: killable.supervisor.restarts)
    assert killable.supervisor.pid != pid


def _has_expired(service: ServiceRig, resource: str) -> bool:
    if service.store.transact(leases.mark_stale, resource):
        return True
    held = service.store.read(leases.current_status, resource)
    return held is not None and held.state is not leases.LeaseState.HELD
