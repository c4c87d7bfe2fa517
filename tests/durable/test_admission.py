"""Admission: what is judged in the claim's own commit is taken, dropped, put off or refused there."""

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
from holdfast.durable.admission import Admission, Candidate, Verdict
from holdfast.durable.item import keys_of
from holdfast.durable.queue import Claim, Counts
from holdfast.errors import ClaimLost, Invalid
from holdfast.store import api, blobs, schema, tuples
from holdfast.store.api import Store, Txn, operation
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryBackend

MODULES = ("holdfast.durable.admission", "holdfast.durable.queue")

TTL = 10 * S
LATER = 3 * S
LARGE = b"x" * (BLOB_THRESHOLD_BYTES + 1)
JUDGE = Admission("holdfast.tests:judge", b"args")
WILL = "holdfast.durable.dead:post_notice"
FORGIVING = queue.Budget(failures_max=1000, expiries_max=1000)

seen: list[list[Candidate]] = []


@operation
def judge(txn: Txn, queue: str, candidates: list[Candidate], args: bytes) -> list[Verdict]:
    """Each payload says what becomes of it."""
    seen.append(candidates)
    assert (queue, args) == ("q", b"args")
    verdicts = [_verdict(one.payload.split(b" ")[0].decode()) for one in candidates]
    txn.put((0, "sim", "judged"), codec.pack([one.seq for one in candidates]))
    if any(one.payload == b"raise" for one in candidates):
        raise Invalid(what="candidate")
    return verdicts[1:] if any(one.payload == b"short" for one in candidates) else verdicts


def _verdict(word: str) -> Verdict:
    if word == "later":
        return Verdict("later", LATER, "full")
    if word == "refuse":
        return Verdict("refuse", code="too_dear", error="why")
    return Verdict(word if word in ("drop", "odd") else "take")


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only operations of the package are found by name; so the name of this one is known."""
    monkeypatch.setitem(api._resolved, JUDGE.operation, judge)
    seen.clear()


def put(store: Store, *payloads: bytes, **options: Any) -> list[int]:
    seqs: list[int] = store.transact(queue.put_many, "q", list(payloads), **options)
    return seqs


def claim(store: Store, limit: int = 10) -> list[Claim]:
    claims: list[Claim] = store.transact(queue.claim, "q", "a", limit, TTL, queue.Budget(), JUDGE)
    return claims


def counts(store: Store) -> Counts:
    return store.read(queue.counts, "q")


def recount(store: Store, done: int) -> Counts:
    """The counts by the rows that are there."""
    keys = keys_of("q")
    ready, delayed, claimed, dead = (
        len(store.read(lambda txn, at=at: txn.scan(at, tuples.after(at))))
        for at in (keys.ready, keys.delayed, keys.claims, keys.dead)
    )
    return Counts(ready, delayed, claimed, dead, done)


def groups(store: Store) -> list[Any]:
    prefix = schema.prefix(schema.Space.QUEUE, "q", "g")
    return store.read(lambda txn: txn.scan(prefix, tuples.after(prefix)))


def test_what_is_taken_is_claimed_as_ever(store: Store) -> None:
    put(store, b"take")
    [claimed] = claim(store)
    assert (claimed.payload, claimed.number, claimed.owner) == (b"take", 1, "a")
    assert counts(store) == recount(store, 0) == Counts(claimed=1)


def test_what_is_dropped_is_done_without_a_word(store: Store) -> None:
    put(store, b"drop", will=WILL)
    assert claim(store) == []
    assert counts(store) == recount(store, 1) == Counts(done=1)
    assert store.read(queue.counts, "q/notices") == Counts()


def test_what_is_put_off_waits_and_is_judged_again(sim_store: Store, clock: SimClock) -> None:
    [seq] = put(sim_store, b"later")
    assert claim(sim_store) == []
    assert counts(sim_store) == recount(sim_store, 0) == Counts(delayed=1)
    due_ns = sim_store.read(queue.next_due_ns, "q")
    assert due_ns is not None
    assert claim(sim_store) == []
    assert len(seen) == 1, "it is not asked again before its time"
    clock.advance(LATER + S)
    assert claim(sim_store) == []
    assert [one.seq for batch in seen for one in batch] == [seq, seq]


def test_what_was_put_off_can_be_withdrawn(store: Store) -> None:
    [seq] = put(store, b"later", group="g")
    claim(store)
    assert store.transact(queue.withdraw, "q", seq)
    assert counts(store) == recount(store, 1) == Counts(done=1)


def test_what_is_put_off_is_no_attempt(sim_store: Store, clock: SimClock) -> None:
    put(sim_store, b"later")
    claim(sim_store)
    clock.advance(LATER + S)
    [claimed] = sim_store.transact(queue.claim, "q", "a", 1, TTL)
    assert (claimed.number, claimed.failures, claimed.expiries, claimed.tried) == (1, 0, 0, ())


def test_what_is_refused_is_a_dead_letter_and_its_will_is_done(store: Store) -> None:
    [seq] = put(store, b"refuse", will=WILL)
    assert claim(store) == []
    assert counts(store) == recount(store, 0) == Counts(dead=1)
    [letter] = store.read(queue.dead, "q")
    assert (letter.seq, letter.code, letter.error, letter.claims) == (seq, "too_dear", "why", 0)
    assert [payload for _, payload in store.read(queue.peek, "q/notices", 10)] == [b"too_dear"]


def test_what_was_refused_can_be_redriven_and_is_judged_again(store: Store) -> None:
    [seq] = put(store, b"refuse")
    claim(store)
    [again] = store.transact(queue.redrive, "q", [seq])
    assert counts(store) == recount(store, 0) == Counts(ready=1)
    claim(store)
    assert [letter.seq for letter in store.read(queue.dead, "q")] == [again]


def test_each_of_a_batch_gets_its_own_verdict(store: Store) -> None:
    put(store, b"take 1", b"drop 2", b"later 3", b"refuse 4", b"take 5")
    assert [one.payload for one in claim(store)] == [b"take 1", b"take 5"]
    assert counts(store) == recount(store, 1) == Counts(0, 1, 2, 1, 1)


def test_a_judge_sees_who_it_is_and_how_it_fared(sim_store: Store, clock: SimClock) -> None:
    put(sim_store, b"take", LARGE, group="g")
    for claimed in claim(sim_store, 1):
        sim_store.transact(queue.fail, claimed, "boom", "text")
    claim(sim_store, 1)
    clock.advance(TTL + S)
    claim(sim_store)
    assert set(seen[-1]) == {
        Candidate(1, "g", b"take", 1, 1, 3, 0, 3),
        Candidate(2, "g", LARGE, 0, 0, 1, 0, 2),
    }


def test_what_a_judge_writes_is_committed_with_the_claims(store: Store) -> None:
    seqs = put(store, b"take", b"drop")
    claim(store)
    row = store.read(lambda txn: txn.get((0, "sim", "judged")))
    assert row is not None
    assert codec.unpack(row) == seqs


@pytest.mark.parametrize("bad", [b"raise", b"short", b"odd"])
def test_a_judge_that_raises_or_answers_nonsense_leaves_everything_as_it_was(
    store: Store, bad: bytes
) -> None:
    put(store, b"take", b"drop", b"later", b"refuse", bad, group="g", will=WILL)
    before = store.read(lambda txn: txn.scan(b"\x00", schema.OUTCOME))
    with pytest.raises((Invalid, ValueError)):
        claim(store)
    assert store.read(lambda txn: txn.scan(b"\x00", schema.OUTCOME)) == before


def test_an_admission_that_nobody_knows_is_refused(store: Store) -> None:
    put(store, b"take")
    unknown = Admission("holdfast.durable.queue:no_such")
    with pytest.raises(Invalid):
        store.transact(queue.claim, "q", "a", 1, TTL, queue.Budget(), unknown)
    assert counts(store) == Counts(ready=1)


def test_nobody_is_asked_when_nothing_is_ready(store: Store) -> None:
    assert claim(store) == []
    assert seen == []


@pytest.mark.parametrize("end", [b"drop", b"later", b"refuse"])
def test_what_is_turned_away_makes_room_for_those_behind_it(store: Store, end: bytes) -> None:
    put(store, *[end] * 5, b"take 1", b"take 2", b"take 3")
    assert [one.payload for one in claim(store, 2)] == [b"take 1", b"take 2"]
    assert all(len(batch) <= 2 for batch in seen)
    assert counts(store).ready == 1


def test_a_claim_looks_at_a_bounded_number_however_many_are_turned_away(store: Store) -> None:
    put(store, *[b"drop"] * 1000)
    assert claim(store, 3) == []
    assert counts(store).done == 3 + QUEUE_SWEEP_EXTRA


def test_how_many_were_turned_away_is_told(store: Store) -> None:
    put(store, b"take", b"drop", b"later", b"refuse")
    claims, away = store.transact(queue.claim_judged, "q", "a", 9, TTL, queue.Budget(), JUDGE)
    assert (len(claims), away) == (1, 3)


def test_a_suspect_is_not_taken_into_the_place_of_one_that_was_turned_away(
    sim_store: Store, clock: SimClock
) -> None:
    alone = queue.Budget(expiries_max=10, alone_from=1)
    put(sim_store, b"take suspect")
    sim_store.transact(queue.claim, "q", "dead", 1, TTL)
    clock.advance(TTL + S)
    sim_store.transact(queue.reap, "q", 1, alone)
    put(sim_store, b"take 1", b"drop 2", priority=1)
    claims = sim_store.transact(queue.claim, "q", "a", 2, TTL, alone, JUDGE)
    assert [one.payload for one in claims] == [b"take 1"]
    claims = sim_store.transact(queue.claim, "q", "a", 2, TTL, alone, JUDGE)
    assert [one.payload for one in claims] == [b"take suspect"]


# -- turns and blobs -------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [b"take", b"drop", b"later", b"refuse"])
def test_a_group_whose_last_item_was_judged_leaves_no_row_behind(store: Store, end: bytes) -> None:
    put(store, end, end, group="g")
    claim(store)
    assert groups(store) == []


@pytest.mark.parametrize("end", [b"drop", b"refuse"])
def test_a_group_that_is_turned_away_costs_the_others_no_turn(store: Store, end: bytes) -> None:
    put(store, *[end] * 20, group="busy")
    put(store, b"take quiet", group="quiet")
    assert [one.payload for one in claim(store, 2)] == [b"take quiet"]


def test_what_comes_after_a_wait_has_the_turn_of_now_and_its_old_seq(
    sim_store: Store, clock: SimClock
) -> None:
    put(sim_store, b"later 1", group="early")
    claim(sim_store)
    put(sim_store, *[b"take"] * 3, group="busy")
    clock.advance(LATER + S)
    order = [one.payload for one in sim_store.transact(queue.claim, "q", "a", 10, TTL)]
    assert order[0] == b"later 1"


def backlog(store: Store, n: int, how: str) -> None:
    """Items of one group that were looked at and come back: at once, or when they are due."""
    put(store, *[b"later" if how == "put off" else b"take"] * n, group="busy")
    held: list[Claim] = []
    while counts(store).ready:
        held += claim(store, 100)
    for at in range(0, len(held), 100):
        tokens = [one.token for one in held[at : at + 100]]
        if how == "given back":
            store.transact(queue.release, tokens)
        elif how == "failed":
            fails = [queue.Failure(token, "boom", "", delay_ns=LATER) for token in tokens]
            store.transact(queue.settle, [], fails)


@pytest.mark.parametrize("how", ["put off", "failed", "given back", "expired"])
@pytest.mark.parametrize("before", [True, False], ids=["quiet before", "quiet after"])
def test_however_many_of_a_group_come_back_they_do_not_keep_another_waiting(
    sim_store: Store, clock: SimClock, how: str, before: bool
) -> None:
    backlog(sim_store, 600, how)
    if before:
        put(sim_store, b"take quiet", group="quiet")
    clock.advance(TTL + S)
    claim(sim_store, 1)
    if not before:
        put(sim_store, b"take quiet", group="quiet")
    claim(sim_store, 1)
    claim(sim_store, 1)
    held = {one.payload for one in sim_store.read(queue.claims_of, "q", "a", 1000)}
    assert b"take quiet" in held


def test_what_comes_back_goes_ahead_of_the_backlog_of_its_group(store: Store) -> None:
    put(store, *[b"take"] * 50, group="g")
    [first] = claim(store, 1)
    store.transact(queue.fail, first, "boom", "text")
    order = [one.seq for one in claim(store, 50)]
    assert order.index(first.seq) <= 1


def test_what_has_come_back_can_be_withdrawn(sim_store: Store, clock: SimClock) -> None:
    seqs = put(sim_store, *[b"later"] * 3, group="g")
    claim(sim_store)
    clock.advance(LATER + S)
    claim(sim_store, 0)
    assert counts(sim_store).ready == 3
    for seq in seqs:
        assert sim_store.transact(queue.withdraw, "q", seq)
    assert counts(sim_store) == recount(sim_store, 3) == Counts(done=3)
    assert groups(sim_store) == []


def test_a_turn_that_is_still_to_come_is_kept_over_a_wait(
    sim_store: Store, clock: SimClock
) -> None:
    due_ns = sim_store.now_ns() + S
    put(sim_store, b"take early", b"take 2", b"take 3", group="g")
    put(sim_store, b"take last", group="g", not_before_ns=due_ns)
    clock.advance(2 * S)
    order = [one.seq for one in claim(sim_store)]
    assert order == [1, 2, 3, 4]
    assert groups(sim_store) == []


def blob_of(store: Store, seq: int) -> bytes:
    return store.read(lambda txn: items.load(txn, keys_of("q"), tuples.pack_int(seq)).blob)


def test_the_blob_of_what_is_dropped_is_released(store: Store) -> None:
    [seq] = put(store, b"drop " + LARGE)
    name = blob_of(store, seq)
    claim(store)
    store.transact(blobs.collect, 0, 10)
    assert not store.read(blobs.sound, name)


@pytest.mark.parametrize("end", [b"later ", b"refuse "])
def test_the_blob_of_what_is_put_off_or_refused_is_kept(store: Store, end: bytes) -> None:
    [seq] = put(store, end + LARGE)
    name = blob_of(store, seq)
    claim(store)
    store.transact(blobs.collect, 0, 10)
    assert store.read(blobs.get, name) == end + LARGE


class Judged(RuleBasedStateMachine):
    """Whatever is put, judged, ended and withdrawn, the counters are a recount and turns end."""

    def __init__(self) -> None:
        super().__init__()
        api._resolved[JUDGE.operation] = judge
        self.clock = SimClock()
        self.store = LocalStore("memory:", MemoryBackend(), self.clock)
        self.put_so_far = 0
        self.held: list[Claim] = []

    @rule(
        words=st.lists(st.sampled_from([b"take", b"drop", b"later", b"refuse"]), max_size=6),
        group=st.sampled_from(["", "a", "b"]),
        priority=st.integers(-1, 1),
    )
    def put(self, words: list[bytes], group: str, priority: int) -> None:
        put(self.store, *words, group=group, priority=priority)
        self.put_so_far += len(words)

    @rule(limit=st.integers(0, 5))
    def claim(self, limit: int) -> None:
        found = claim(self.store, limit)
        assert len(found) <= limit
        assert {one.payload for one in found} <= {b"take"}
        self.held += found

    @rule()
    def ack(self) -> None:
        self.store.transact(queue.settle, [one.token for one in self.held], [])
        self.held.clear()

    @rule(delay_s=st.integers(0, 2))
    def fail(self, delay_s: int) -> None:
        fails = [queue.Failure(one.token, "boom", "", delay_ns=delay_s * S) for one in self.held]
        self.store.transact(queue.settle, [], fails, FORGIVING)
        self.held.clear()

    @rule()
    def give_back(self) -> None:
        for one in self.held:
            # A claim may expire between the look and the commit, which is a little later.
            if self.store.read(queue.holds, one):
                with contextlib.suppress(ClaimLost):
                    self.store.transact(queue.release, [one.token])
        self.held.clear()

    @rule(seq=st.integers(1, 20), claimed=st.booleans())
    def withdraw(self, seq: int, claimed: bool) -> None:
        self.store.transact(queue.withdraw, "q", seq, claimed)

    @rule(seconds=st.integers(0, 12))
    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds * S)

    @invariant()
    def counters_are_a_recount(self) -> None:
        found = counts(self.store)
        left = found.ready + found.delayed + found.claimed + found.dead
        assert found == recount(self.store, self.put_so_far - left)

    @invariant()
    def a_group_without_items_has_no_row(self) -> None:
        if counts(self.store).ready == counts(self.store).delayed == 0:
            assert groups(self.store) == []


TestJudged = Judged.TestCase
TestJudged.settings = settings(max_examples=40, stateful_step_count=30)
