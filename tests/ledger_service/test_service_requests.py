"""The request handlers of the ledger service (`ServiceRequests`), in this process with a simulated clock."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from holdfast.clock import MS, S, SimClock, iso_time
from holdfast.durable import lease as leases
from holdfast.durable.lease import Lease
from holdfast.errors import IllegalTransition, Invalid
from holdfast.ledger import runs
from holdfast.ledger.log import RunLog, open_run
from holdfast.ledger.run_policy import RunPolicy
from holdfast.spark import input_blocks, ledger_protocol
from holdfast.spark.arrow_rows import encode_stream
from holdfast.spark.run_data import encode_schema
from holdfast.spark.service_log_writer import ServiceLogWriter
from holdfast.spark.service_requests import ServiceRequests
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend
from tests.ledger_service.service_rig import (
    RESULT_SCHEMA,
    ClaimedRows,
    exchange_request,
    input_table,
    next_report,
    seal_request,
)

HOUR = 3600 * S
ROWS = 20
WAIT_S = 60.0


class ServiceRequestsRig:
    """A run on a memory store, and the request handlers that serve it."""

    def __init__(self, *, sealed: bool = True) -> None:
        self.clock = SimClock()
        self.store = InProcessStore("memory:", MemoryBackend(), self.clock)
        record = runs.RunRecord(
            run_id="r-1",
            name="job",
            created_ns=1,
            key=["id"],
            result_schema=encode_schema(RESULT_SCHEMA),
            policy=RunPolicy(),
        )
        self.store.transact(runs.create, record)
        self.lease: Lease = self.store.transact(
            leases.acquire, runs.lease_resource("job"), "service", "1", 1000 * HOUR
        )
        self.log_writer = ServiceLogWriter(None, RunLog(self.store, "r-1", self.lease))
        self.requests = ServiceRequests(self.store, self.log_writer, record, 0.0, self.clock)
        if not sealed:
            return
        block = self.requests.blocks.put(memoryview(encode_stream(input_table(0, ROWS))))
        self.requests.seal(seal_request([(block.number, ROWS)]))

    def record(self) -> runs.RunRecord:
        return self.store.read(runs.get_existing, "r-1")

    def claim(self, owner: str) -> ClaimedRows:
        stepped, _ = self.requests.handle_exchange(
            owner, exchange_request(ledger_protocol.ClaimRows(10, 5)), memoryview(b"")
        )
        granted = stepped.grant
        assert granted is not None
        return ClaimedRows(
            granted.epoch, [], [], granted.begun, granted.isolated, input_table(0, 0)
        )

    def report_illegal(self, owner: str) -> IllegalTransition:
        """Report the end of a row that was never begun."""
        grant_report, data = next_report(self.claim(owner), done=[(7, 8)])
        with pytest.raises(IllegalTransition) as refused:
            self.requests.handle_exchange(
                owner, exchange_request(None, grant_report), memoryview(data)
            )
        return refused.value

    def restart(self) -> ServiceRequests:
        """Simulate a restart: new request handlers that start from the log and the run record."""
        self.log_writer.close()
        log, scheduler = open_run(self.store, "r-1", self.lease)
        self.log_writer = ServiceLogWriter(scheduler, log)
        self.requests = ServiceRequests(self.store, self.log_writer, self.record(), 0.0, self.clock)
        return self.requests


@pytest.fixture
def requests_rig() -> Iterator[ServiceRequestsRig]:
    made = ServiceRequestsRig()
    yield made
    made.log_writer.close()
    made.store.close()


@pytest.mark.spec(
    "002",
    "Illegal Transition Policy",
    "3: the error of the service has seq, prior and attempted state, owner, wall clock and store time",
    module="holdfast.spark.service_requests",
)
@pytest.mark.parametrize("hours", [-5, 9])
def test_illegal_transition_error_has_wall_clock_and_store_time(
    requests_rig: ServiceRequestsRig, hours: int
) -> None:
    # The wall clock steps while the store is open. Store time does not follow it.
    requests_rig.clock.step_wall(hours * HOUR)
    store_ns, wall_ns = requests_rig.store.now_ns(), requests_rig.clock.wall_ns()
    assert abs(wall_ns - store_ns - hours * HOUR) < S
    fields = requests_rig.report_illegal("child/liar").fields
    assert (fields["seq"], fields["prior"], fields["attempted"]) == (
        7,
        "DISPATCHED",
        "TERMINAL_SUCCESS",
    )
    assert "child/liar" in fields["owner"]
    assert abs(fields["wall_ns"] - wall_ns) < S
    assert abs(fields["store_ns"] - store_ns) < S
    assert (fields["wall_time"], fields["store_time"]) == (
        iso_time(fields["wall_ns"]),
        iso_time(fields["store_ns"]),
    )
    record = requests_rig.record()
    assert record.status is runs.RunLifecycle.HALTED
    assert f"at {fields['wall_time']} (store time {fields['store_time']})" in record.halted


@pytest.mark.spec(
    "002",
    "Illegal Transition Policy",
    "3: a restarted service records the time of the illegal transition, not of the restart",
    module="holdfast.spark.service_requests",
)
def test_restarted_service_records_the_time_of_the_illegal_transition(
    requests_rig: ServiceRequestsRig,
) -> None:
    requests_rig.clock.step_wall(9 * HOUR)
    # Half a millisecond away from the edge where times are truncated.
    requests_rig.clock.advance(MS // 2)
    wall_ns = requests_rig.clock.wall_ns()
    requests_rig.report_illegal("child/liar")
    halted = requests_rig.log_writer.scheduler.halted
    assert halted is not None
    # Restore the run record: the process died before it wrote the halt to it.
    as_before = replace(requests_rig.record(), halted="", status=runs.RunLifecycle.OPEN)
    requests_rig.store.transact(runs.put_record, as_before)
    requests_rig.clock.advance(3 * HOUR)
    requests_rig.restart().mark_halted(halted)
    record = requests_rig.record()
    assert record.status is runs.RunLifecycle.HALTED
    assert f"at {iso_time(wall_ns)} (store time {iso_time(halted.decided_ns)})" in record.halted


def test_put_block_stops_unordered_blocks_above_the_merge_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = memoryview(encode_stream(input_table(0, ROWS)))
    monkeypatch.setattr(input_blocks, "UNORDERED_BYTES_MAX", 3 * len(block))
    rig = ServiceRequestsRig(sealed=False)
    assert [rig.requests.blocks.put(block, in_order=False).number for _ in range(5)] == [
        0,
        1,
        2,
        -1,
        -1,
    ]
    assert rig.requests.status().input_bytes == 3 * len(block)
    rig.requests.drop_input()
    assert rig.requests.status().input_bytes == 0
    assert rig.store.read(runs.get_block, "r-1", 0) is None
    assert [rig.requests.blocks.put(block).number for _ in range(5)] == [3, 4, 5, 6, 7]
    rig.requests.seal(seal_request([(5, ROWS)]))
    assert rig.record().blocks == [(5, ROWS)]
    with pytest.raises(Invalid):
        rig.requests.drop_input()


def test_put_block_refuses_first_pass_blocks_after_the_sort_began() -> None:
    block = memoryview(encode_stream(input_table(0, ROWS)))
    rig = ServiceRequestsRig(sealed=False)
    assert rig.requests.blocks.put(block, sorted=False).number == 0
    rig.requests.drop_input()
    assert rig.requests.blocks.put(block, in_order=False, sorted=False).number == -1
    assert rig.requests.blocks.put(block, sorted=True).number == 1
    assert not rig.requests.status().needs_sort
    # A restarted service learns about the sort from the first sorted block.
    restarted = ServiceRequestsRig(sealed=False).requests
    assert restarted.blocks.put(block, sorted=True).number == 0
    assert restarted.blocks.put(block, sorted=False).number == -1


def test_waiting_claim_gets_rows_freed_by_a_disconnect(requests_rig: ServiceRequestsRig) -> None:
    """A closed connection frees rows. The same decision answers the claim that waits for rows."""
    known_epochs: list[int] = []
    while True:
        request = replace(
            exchange_request(ledger_protocol.ClaimRows(20, 20)), known_epochs=known_epochs
        )
        reply, _ = requests_rig.requests.handle_exchange("child/1", request, memoryview(b""))
        if reply.grant is None:
            break
        known_epochs.append(reply.grant.epoch)
    replies: list[ledger_protocol.ExchangeReply] = []

    def claim_in_thread() -> None:
        request = exchange_request(ledger_protocol.ClaimRows(5, 5), wait_ms=5000)
        replies.append(
            requests_rig.requests.handle_exchange("child/2", request, memoryview(b""))[0]
        )

    thread = threading.Thread(target=claim_in_thread, daemon=True)
    thread.start()
    while True:
        with requests_rig.log_writer.lock:
            if requests_rig.log_writer.service.waiting:
                requests_rig.requests.on_disconnect("child/1")
                break
    thread.join(WAIT_S)
    assert [reply.state for reply in replies] == ["granted"]
    assert replies[0].grant is not None
    assert replies[0].grant.epoch > known_epochs[-1]
