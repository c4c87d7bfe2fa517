"""Admission: the claim transaction judges each candidate and admits, drops, defers or refuses it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast import codec
from holdfast.clock import S, SimClock
from holdfast.config import BLOB_THRESHOLD_BYTES, QUEUE_SWEEP_EXTRA
from holdfast.durable import item as items
from holdfast.durable import queue
from holdfast.durable.admission import Admission, AdmissionVerdict, Candidate
from holdfast.durable.item import keys_of
from holdfast.durable.queue import Claim, QueueCounts
from holdfast.errors import ClaimLost, Invalid
from holdfast.store import api, blobs, schema, tuples
from holdfast.store.api import Store, Txn, operation
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend

MODULES = ("holdfast.durable.admission", "holdfast.durable.queue")

TTL = 10 * S
DEFER_NS = 3 * S
LARGE = b"x" * (BLOB_THRESHOLD_BYTES + 1)
ADMISSION = Admission("testing.judge", b"args")
ON_DEAD_OPERATION = "queue.add_death_notice"
LARGE_RETRY_BUDGET = queue.RetryBudget(failures_max=1000, expiries_max=1000)

candidate_batches: list[list[Candidate]] = []


@operation("testing.judge")
def admit_by_payload(
    txn: Txn, queue: str, candidates: list[Candidate], args: bytes
) -> list[AdmissionVerdict]:
    """Return the verdict that is named by the first word of each payload."""
    candidate_batches.append(candidates)
    assert (queue, args) == ("q", b"args")
    verdicts = [
        _verdict_named(candidate.payload.split(b" ")[0].decode()) for candidate in candidates
    ]
    txn.put((0, "sim", "judged"), codec.pack([candidate.seq for candidate in candidates]))
    if any(candidate.payload == b"raise" for candidate in candidates):
        raise Invalid(what="candidate")
    return (
        verdicts[1:] if any(candidate.payload == b"short" for candidate in candidates) else verdicts
    )


def _verdict_named(word: str) -> AdmissionVerdict:
    if word == "later":
        return AdmissionVerdict("later", DEFER_NS, "full")
    if word == "refuse":
        return AdmissionVerdict("refuse", code="too_dear", error="why")
    return AdmissionVerdict(word if word in ("drop", "odd") else "take")


@pytest.fixture(autouse=True)
def register_admission_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the admission operation, because lookup by name finds only operations of the package."""
    monkeypatch.setitem(api._operations, ADMISSION.operation, admit_by_payload)
    candidate_batches.clear()


def put_items(store: Store, *payloads: bytes, **options: Any) -> list[int]:
    seqs: list[int] = store.transact(queue.put_many, "q", list(payloads), **options)
    return seqs


def claim_items(store: Store, limit: int = 10) -> list[Claim]:
    claims: list[Claim] = store.transact(
        queue.claim, "q", "a", limit, TTL, queue.RetryBudget(), ADMISSION
    )
    return claims


def read_counts(store: Store) -> QueueCounts:
    return store.read(queue.counts, "q")


def count_rows(store: Store, done: int) -> QueueCounts:
    """Count the rows of the queue by state."""
    keys = keys_of("q")
    ready, delayed, claimed, dead = (
        len(store.read(lambda txn, at=at: txn.scan(at, tuples.prefix_end(at))))
        for at in (keys.ready, keys.delayed, keys.by_expiry, keys.dead)
    )
    return QueueCounts(ready, delayed, claimed, dead, done)


def group_rows(store: Store) -> list[Any]:
    prefix = schema.key_prefix(schema.Space.QUEUE, "q", "g")
    return store.read(lambda txn: txn.scan(prefix, tuples.prefix_end(prefix)))


def test_admitted_item_is_claimed(store: Store) -> None:
    put_items(store, b"take")
    [claimed] = claim_items(store)
    assert (claimed.payload, claimed.number, claimed.owner) == (b"take", 1, "a")
    assert read_counts(store) == count_rows(store, 0) == QueueCounts(claimed=1)


def test_dropped_item_is_done_without_a_death_notice(store: Store) -> None:
    put_items(store, b"drop", on_dead=ON_DEAD_OPERATION)
    assert claim_items(store) == []
    assert read_counts(store) == count_rows(store, 1) == QueueCounts(done=1)
    assert store.read(queue.counts, "q/notices") == QueueCounts()


def test_deferred_item_is_delayed_and_judged_again(sim_store: Store, clock: SimClock) -> None:
    [seq] = put_items(sim_store, b"later")
    assert claim_items(sim_store) == []
    assert read_counts(sim_store) == count_rows(sim_store, 0) == QueueCounts(delayed=1)
    due_ns = sim_store.read(queue.next_due_ns, "q")
    assert due_ns is not None
    assert claim_items(sim_store) == []
    assert len(candidate_batches) == 1, "it is not asked again before its time"
    clock.advance(DEFER_NS + S)
    assert claim_items(sim_store) == []
    assert [candidate.seq for batch in candidate_batches for candidate in batch] == [seq, seq]


def test_deferred_item_can_be_cancelled(store: Store) -> None:
    [seq] = put_items(store, b"later", group="g")
    claim_items(store)
    assert store.transact(queue.cancel, "q", seq)
    assert read_counts(store) == count_rows(store, 1) == QueueCounts(done=1)


def test_deferral_does_not_count_as_an_attempt(sim_store: Store, clock: SimClock) -> None:
    put_items(sim_store, b"later")
    claim_items(sim_store)
    clock.advance(DEFER_NS + S)
    [claimed] = sim_store.transact(queue.claim, "q", "a", 1, TTL)
    assert (claimed.number, claimed.failures, claimed.expiries, claimed.failed_attempts) == (
        1,
        0,
        0,
        (),
    )


def test_refused_item_becomes_a_dead_letter_and_runs_on_dead(store: Store) -> None:
    [seq] = put_items(store, b"refuse", on_dead=ON_DEAD_OPERATION)
    assert claim_items(store) == []
    assert read_counts(store) == count_rows(store, 0) == QueueCounts(dead=1)
    [letter] = store.read(queue.list_dead, "q")
    assert (letter.seq, letter.code, letter.error, letter.claims) == (seq, "too_dear", "why", 0)
    assert [payload for _, payload in store.read(queue.peek, "q/notices", 10)] == [b"too_dear"]


def test_refused_item_can_be_redriven_and_is_judged_again(store: Store) -> None:
    [seq] = put_items(store, b"refuse")
    claim_items(store)
    [redriven] = store.transact(queue.redrive, "q", [seq])
    assert read_counts(store) == count_rows(store, 0) == QueueCounts(ready=1)
    claim_items(store)
    assert [letter.seq for letter in store.read(queue.list_dead, "q")] == [redriven]


def test_each_item_of_a_claim_gets_its_own_verdict(store: Store) -> None:
    put_items(store, b"take 1", b"drop 2", b"later 3", b"refuse 4", b"take 5")
    assert [one.payload for one in claim_items(store)] == [b"take 1", b"take 5"]
    assert read_counts(store) == count_rows(store, 1) == QueueCounts(0, 1, 2, 1, 1)


def test_candidate_has_group_payload_and_attempt_counts(sim_store: Store, clock: SimClock) -> None:
    put_items(sim_store, b"take", LARGE, group="g")
    for claimed in claim_items(sim_store, 1):
        sim_store.transact(queue.fail, claimed, "boom", "text")
    claim_items(sim_store, 1)
    clock.advance(TTL + S)
    claim_items(sim_store)
    assert set(candidate_batches[-1]) == {
        Candidate(1, "g", b"take", failures=1, expiries=1, claim=3, priority=0, fair_rank=3),
        Candidate(2, "g", LARGE, failures=0, expiries=0, claim=1, priority=0, fair_rank=2),
    }


def test_writes_of_the_admission_are_committed_with_the_claims(store: Store) -> None:
    seqs = put_items(store, b"take", b"drop")
    claim_items(store)
    row = store.read(lambda txn: txn.get((0, "sim", "judged")))
    assert row is not None
    assert codec.unpack(row) == seqs


@pytest.mark.parametrize("bad", [b"raise", b"short", b"odd"])
def test_admission_that_raises_or_returns_bad_verdicts_rolls_back_the_claim(
    store: Store, bad: bytes
) -> None:
    put_items(
        store, b"take", b"drop", b"later", b"refuse", bad, group="g", on_dead=ON_DEAD_OPERATION
    )
    before = store.read(lambda txn: txn.scan(b"\x00", schema.OUTCOME))
    with pytest.raises((Invalid, ValueError)):
        claim_items(store)
    assert store.read(lambda txn: txn.scan(b"\x00", schema.OUTCOME)) == before


def test_claim_with_an_unknown_admission_operation_raises_invalid(store: Store) -> None:
    put_items(store, b"take")
    unknown = Admission("holdfast.durable.queue:no_such")
    with pytest.raises(Invalid):
        store.transact(queue.claim, "q", "a", 1, TTL, queue.RetryBudget(), unknown)
    assert read_counts(store) == QueueCounts(ready=1)


def test_admission_is_not_called_for_an_empty_queue(store: Store) -> None:
    assert claim_items(store) == []
    assert candidate_batches == []


@pytest.mark.parametrize("end", [b"drop", b"later", b"refuse"])
def test_claim_admits_later_items_in_place_of_not_admitted_items(store: Store, end: bytes) -> None:
    put_items(store, *[end] * 5, b"take 1", b"take 2", b"take 3")
    assert [one.payload for one in claim_items(store, 2)] == [b"take 1", b"take 2"]
    assert all(len(batch) <= 2 for batch in candidate_batches)
    assert read_counts(store).ready == 1


def test_claim_judges_a_bounded_number_of_not_admitted_items(store: Store) -> None:
    put_items(store, *[b"drop"] * 1000)
    assert claim_items(store, 3) == []
    assert read_counts(store).done == 3 + QUEUE_SWEEP_EXTRA


def test_claim_admitted_returns_the_number_of_not_admitted_items(store: Store) -> None:
    put_items(store, b"take", b"drop", b"later", b"refuse")
    claims, not_admitted = store.transact(
        queue.claim_admitted, "q", "a", 9, TTL, queue.RetryBudget(), ADMISSION
    )
    assert (len(claims), not_admitted) == (1, 3)


def test_isolated_item_does_not_replace_a_not_admitted_item(
    sim_store: Store, clock: SimClock
) -> None:
    isolating_budget = queue.RetryBudget(expiries_max=10, isolate_from_expiries=1)
    put_items(sim_store, b"take suspect")
    sim_store.transact(queue.claim, "q", "dead", 1, TTL)
    clock.advance(TTL + S)
    sim_store.transact(queue.expire_overdue, "q", 1, isolating_budget)
    put_items(sim_store, b"take 1", b"drop 2", priority=1)
    claims = sim_store.transact(queue.claim, "q", "a", 2, TTL, isolating_budget, ADMISSION)
    assert [one.payload for one in claims] == [b"take 1"]
    claims = sim_store.transact(queue.claim, "q", "a", 2, TTL, isolating_budget, ADMISSION)
    assert [one.payload for one in claims] == [b"take suspect"]


# -- fair ranks and blobs --------------------------------------------------------------------------


@pytest.mark.parametrize("end", [b"take", b"drop", b"later", b"refuse"])
def test_group_without_items_after_admission_has_no_row(store: Store, end: bytes) -> None:
    put_items(store, end, end, group="g")
    claim_items(store)
    assert group_rows(store) == []


@pytest.mark.parametrize("end", [b"drop", b"refuse"])
def test_not_admitted_group_does_not_delay_other_groups(store: Store, end: bytes) -> None:
    put_items(store, *[end] * 20, group="busy")
    put_items(store, b"take quiet", group="quiet")
    assert [one.payload for one in claim_items(store, 2)] == [b"take quiet"]


def test_deferred_item_gets_the_current_fair_rank_and_keeps_its_seq(
    sim_store: Store, clock: SimClock
) -> None:
    put_items(sim_store, b"later 1", group="early")
    claim_items(sim_store)
    put_items(sim_store, *[b"take"] * 3, group="busy")
    clock.advance(DEFER_NS + S)
    order = [one.payload for one in sim_store.transact(queue.claim, "q", "a", 10, TTL)]
    assert order[0] == b"later 1"


def put_requeued_items(store: Store, n: int, how: str) -> None:
    """Put items of one group that are claimed once and requeued, immediately or after a delay."""
    put_items(store, *[b"later" if how == "put off" else b"take"] * n, group="busy")
    claims: list[Claim] = []
    while read_counts(store).ready:
        claims += claim_items(store, 100)
    for at in range(0, len(claims), 100):
        tokens = [held_claim.token for held_claim in claims[at : at + 100]]
        if how == "given back":
            store.transact(queue.release, tokens)
        elif how == "failed":
            fails = [queue.ItemFailure(token, "boom", "", delay_ns=DEFER_NS) for token in tokens]
            store.transact(queue.finish_batch, [], fails)


@pytest.mark.parametrize("how", ["put off", "failed", "given back", "expired"])
@pytest.mark.parametrize("before", [True, False], ids=["quiet before", "quiet after"])
def test_requeued_items_of_a_group_do_not_delay_another_group(
    sim_store: Store, clock: SimClock, how: str, before: bool
) -> None:
    put_requeued_items(sim_store, 600, how)
    if before:
        put_items(sim_store, b"take quiet", group="quiet")
    clock.advance(TTL + S)
    claim_items(sim_store, 1)
    if not before:
        put_items(sim_store, b"take quiet", group="quiet")
    claim_items(sim_store, 1)
    claim_items(sim_store, 1)
    claimed_payloads = {one.payload for one in sim_store.read(queue.claims_of, "q", "a", 1000)}
    assert b"take quiet" in claimed_payloads


def test_requeued_item_goes_before_the_backlog_of_its_group(store: Store) -> None:
    put_items(store, *[b"take"] * 50, group="g")
    [first] = claim_items(store, 1)
    store.transact(queue.fail, first, "boom", "text")
    order = [one.seq for one in claim_items(store, 50)]
    assert order.index(first.seq) <= 1


def test_requeued_item_can_be_cancelled(sim_store: Store, clock: SimClock) -> None:
    seqs = put_items(sim_store, *[b"later"] * 3, group="g")
    claim_items(sim_store)
    clock.advance(DEFER_NS + S)
    claim_items(sim_store, 0)
    assert read_counts(sim_store).ready == 3
    for seq in seqs:
        assert sim_store.transact(queue.cancel, "q", seq)
    assert read_counts(sim_store) == count_rows(sim_store, 3) == QueueCounts(done=3)
    assert group_rows(sim_store) == []


def test_delayed_item_keeps_a_fair_rank_that_is_not_reached(
    sim_store: Store, clock: SimClock
) -> None:
    due_ns = sim_store.now_ns() + S
    put_items(sim_store, b"take early", b"take 2", b"take 3", group="g")
    put_items(sim_store, b"take last", group="g", not_before_ns=due_ns)
    clock.advance(2 * S)
    order = [one.seq for one in claim_items(sim_store)]
    assert order == [1, 2, 3, 4]
    assert group_rows(sim_store) == []


def blob_hash_of(store: Store, seq: int) -> bytes:
    return store.read(lambda txn: items.load_item(txn, keys_of("q"), tuples.pack_int(seq)).blob)


def test_blob_of_a_dropped_item_is_released(store: Store) -> None:
    [seq] = put_items(store, b"drop " + LARGE)
    name = blob_hash_of(store, seq)
    claim_items(store)
    store.transact(blobs.collect, 0, 10)
    assert not store.read(blobs.is_intact, name)


@pytest.mark.parametrize("end", [b"later ", b"refuse "])
def test_blob_of_a_deferred_or_refused_item_is_kept(store: Store, end: bytes) -> None:
    [seq] = put_items(store, end + LARGE)
    name = blob_hash_of(store, seq)
    claim_items(store)
    store.transact(blobs.collect, 0, 10)
    assert store.read(blobs.get, name) == end + LARGE


class AdmissionMachine(RuleBasedStateMachine):
    """After any sequence of operations the counters equal a recount, and empty groups have no rows."""

    def __init__(self) -> None:
        super().__init__()
        api._operations[ADMISSION.operation] = admit_by_payload
        self.clock = SimClock()
        self.store = InProcessStore("memory:", MemoryBackend(), self.clock)
        self.put_count = 0
        self.claims: list[Claim] = []

    @rule(
        words=st.lists(st.sampled_from([b"take", b"drop", b"later", b"refuse"]), max_size=6),
        group=st.sampled_from(["", "a", "b"]),
        priority=st.integers(-1, 1),
    )
    def put(self, words: list[bytes], group: str, priority: int) -> None:
        put_items(self.store, *words, group=group, priority=priority)
        self.put_count += len(words)

    @rule(limit=st.integers(0, 5))
    def claim(self, limit: int) -> None:
        claims = claim_items(self.store, limit)
        assert len(claims) <= limit
        assert {one.payload for one in claims} <= {b"take"}
        self.claims += claims

    @rule()
    def ack(self) -> None:
        self.store.transact(queue.finish_batch, [one.token for one in self.claims], [])
        self.claims.clear()

    @rule(delay_s=st.integers(0, 2))
    def fail(self, delay_s: int) -> None:
        fails = [
            queue.ItemFailure(one.token, "boom", "", delay_ns=delay_s * S) for one in self.claims
        ]
        self.store.transact(queue.finish_batch, [], fails, LARGE_RETRY_BUDGET)
        self.claims.clear()

    @rule()
    def release(self) -> None:
        for claim in self.claims:
            # A claim may expire between the check and the commit.
            if self.store.read(queue.is_held, claim):
                with contextlib.suppress(ClaimLost):
                    self.store.transact(queue.release, [claim.token])
        self.claims.clear()

    @rule(seq=st.integers(1, 20), claimed=st.booleans())
    def cancel(self, seq: int, claimed: bool) -> None:
        self.store.transact(queue.cancel, "q", seq, claimed)

    @rule(seconds=st.integers(0, 12))
    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds * S)

    @invariant()
    def counters_equal_a_recount(self) -> None:
        counters = read_counts(self.store)
        remaining = counters.ready + counters.delayed + counters.claimed + counters.dead
        assert counters == count_rows(self.store, self.put_count - remaining)

    @invariant()
    def a_group_without_items_has_no_row(self) -> None:
        if read_counts(self.store).ready == read_counts(self.store).delayed == 0:
            assert group_rows(self.store) == []


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = settings(max_examples=40, stateful_step_count=30)
