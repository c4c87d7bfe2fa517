"""Deduplication: what a key was used for, and how it is forgotten."""

import pytest

from holdfast.clock import S, SimClock
from holdfast.durable import dedupe
from holdfast.errors import Invalid, KeyConflict, KeyExpired
from holdfast.store import schema, tuples
from holdfast.store.api import Store

MODULES = ("holdfast.durable.dedupe",)
DAY = 24 * 3600 * S


def remember(
    store: Store, key: str, body: bytes = b"h", value: bytes = b"v", at: int | None = None
) -> None:
    store.transact(dedupe.remember, "s", key, body, value, issued_ns=at)


def check(store: Store, key: str, body: bytes = b"h", at: int | None = None) -> bytes | None:
    return store.read(dedupe.check, "s", key, body, issued_ns=at)


def rows(store: Store) -> int:
    prefix = schema.prefix(schema.Space.DEDUPE, "s")
    floor = schema.prefix(schema.Space.DEDUPE, "s", "floor")
    found = store.read(lambda txn: txn.scan(prefix, tuples.after(prefix)))
    return len([key for key, _ in found if key != floor])


def test_a_key_that_was_never_used_is_new(store: Store) -> None:
    assert check(store, "k") is None


def test_a_repeat_gets_the_value_of_the_first_use(store: Store) -> None:
    remember(store, "k", value=b"first")
    assert check(store, "k") == b"first"


def test_an_empty_value_is_a_value(store: Store) -> None:
    remember(store, "k", value=b"")
    assert check(store, "k") == b""


def test_the_same_key_with_another_body_is_a_conflict(store: Store) -> None:
    remember(store, "k", b"one")
    with pytest.raises(KeyConflict) as error:
        check(store, "k", b"two")
    assert error.value.fields == {"scope": "s", "key": "k"}


def test_the_first_use_is_not_replaced(store: Store) -> None:
    remember(store, "k", value=b"first")
    remember(store, "k", value=b"second")
    assert check(store, "k") == b"first"
    assert rows(store) == 2


def test_remembering_another_body_is_a_conflict_and_changes_nothing(store: Store) -> None:
    remember(store, "k", b"one")
    with pytest.raises(KeyConflict):
        remember(store, "k", b"two")
    assert check(store, "k", b"one") == b"v"


def test_scopes_do_not_disturb_each_other(store: Store) -> None:
    remember(store, "k")
    assert store.read(dedupe.check, "other", "k", b"another") is None


def test_recalling_tells_what_is_kept(store: Store) -> None:
    remember(store, "k", b"h", b"v", at=7)
    assert store.read(dedupe.recall, "s", "k") == dedupe.Remembered(b"h", b"v", 7)


def test_keys_are_forgotten_by_age_oldest_first_a_bounded_number_a_call(
    sim_store: Store, clock: SimClock
) -> None:
    for key in ("c", "b", "a"):
        remember(sim_store, key)
        clock.advance(S)
    clock.advance(DAY)
    remember(sim_store, "young")
    assert sim_store.transact(dedupe.collect, "s", DAY, 2) == 2
    assert (check(sim_store, "c"), check(sim_store, "b"), check(sim_store, "a")) == (
        None,
        None,
        b"v",
    )
    assert sim_store.transact(dedupe.collect, "s", DAY, 2) == 1
    assert check(sim_store, "young") == b"v"
    assert rows(sim_store) == 2


def test_a_users_key_is_new_again_once_forgotten(sim_store: Store, clock: SimClock) -> None:
    remember(sim_store, "k", b"one")
    clock.advance(2 * DAY)
    sim_store.transact(dedupe.collect, "s", DAY, 10)
    assert check(sim_store, "k", b"two") is None


def test_a_key_issued_before_what_was_forgotten_is_expired(
    sim_store: Store, clock: SimClock
) -> None:
    issued_ns = sim_store.now_ns()
    remember(sim_store, "k", at=issued_ns)
    clock.advance(2 * DAY)
    sim_store.transact(dedupe.collect, "s", DAY, 10)
    with pytest.raises(KeyExpired) as error:
        check(sim_store, "k", at=issued_ns)
    assert error.value.issued_ns == issued_ns < error.value.floor_ns


def test_an_expired_key_cannot_be_remembered(sim_store: Store, clock: SimClock) -> None:
    issued_ns = sim_store.now_ns()
    clock.advance(2 * DAY)
    sim_store.transact(dedupe.collect, "s", DAY, 10)
    with pytest.raises(KeyExpired):
        remember(sim_store, "late", at=issued_ns)


def test_a_key_issued_since_is_not_expired(sim_store: Store, clock: SimClock) -> None:
    clock.advance(2 * DAY)
    sim_store.transact(dedupe.collect, "s", DAY, 10)
    assert check(sim_store, "k", at=sim_store.now_ns()) is None


def test_a_late_repeat_is_still_answered_while_it_is_remembered(
    sim_store: Store, clock: SimClock
) -> None:
    issued_ns = sim_store.now_ns()
    remember(sim_store, "k", at=issued_ns)
    clock.advance(2 * DAY)
    assert check(sim_store, "k", at=issued_ns) == b"v"


def test_a_collection_cut_short_expires_only_what_it_removed(
    sim_store: Store, clock: SimClock
) -> None:
    first_ns = sim_store.now_ns()
    remember(sim_store, "first", at=first_ns)
    remember(sim_store, "second", at=first_ns + S)
    clock.advance(2 * DAY)
    assert sim_store.transact(dedupe.collect, "s", DAY, 1) == 1
    assert check(sim_store, "second", at=first_ns + S) == b"v"
    assert check(sim_store, "new", at=first_ns + S) is None
    with pytest.raises(KeyExpired):
        check(sim_store, "first", at=first_ns)


def test_the_floor_never_falls(sim_store: Store, clock: SimClock) -> None:
    clock.advance(2 * DAY)
    sim_store.transact(dedupe.collect, "s", DAY, 10)
    at_ns = sim_store.now_ns() - DAY - S
    sim_store.transact(dedupe.collect, "s", 2 * DAY, 10)
    with pytest.raises(KeyExpired):
        check(sim_store, "k", at=at_ns)


def test_nothing_is_forgotten_early(store: Store) -> None:
    remember(store, "k")
    assert store.transact(dedupe.collect, "s", DAY, 10) == 0
    assert check(store, "k") == b"v"


@pytest.mark.parametrize(
    ("scope", "key", "at", "what"),
    [("", "k", None, "scope"), ("s", "", None, "key"), ("s", "k", -1, "issued_ns")],
)
def test_bad_input_is_named(store: Store, scope: str, key: str, at: int | None, what: str) -> None:
    with pytest.raises(Invalid) as error:
        store.transact(dedupe.remember, scope, key, b"h", b"v", issued_ns=at)
    assert error.value.what == what


@pytest.mark.parametrize(("older_than_ns", "limit"), [(-1, 1), (1, -1)])
def test_a_bad_collection_is_invalid(store: Store, older_than_ns: int, limit: int) -> None:
    with pytest.raises(Invalid):
        store.transact(dedupe.collect, "s", older_than_ns, limit)
