"""Deduplication: the record of a key, and its expiry."""

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


def count_rows(store: Store) -> int:
    prefix = schema.key_prefix(schema.Space.DEDUPE, "s")
    floor = schema.key_prefix(schema.Space.DEDUPE, "s", "floor")
    scanned = store.read(lambda txn: txn.scan(prefix, tuples.prefix_end(prefix)))
    return len([key for key, _ in scanned if key != floor])


def test_check_of_an_unused_key_returns_none(store: Store) -> None:
    assert check(store, "k") is None


def test_check_of_a_repeated_key_returns_the_first_value(store: Store) -> None:
    remember(store, "k", value=b"first")
    assert check(store, "k") == b"first"


def test_check_returns_an_empty_value(store: Store) -> None:
    remember(store, "k", value=b"")
    assert check(store, "k") == b""


def test_check_with_another_body_raises_key_conflict(store: Store) -> None:
    remember(store, "k", b"one")
    with pytest.raises(KeyConflict) as error:
        check(store, "k", b"two")
    assert error.value.fields == {"scope": "s", "key": "k"}


def test_remember_of_a_used_key_keeps_the_first_value(store: Store) -> None:
    remember(store, "k", value=b"first")
    remember(store, "k", value=b"second")
    assert check(store, "k") == b"first"
    assert count_rows(store) == 2


def test_remember_with_another_body_raises_key_conflict(store: Store) -> None:
    remember(store, "k", b"one")
    with pytest.raises(KeyConflict):
        remember(store, "k", b"two")
    assert check(store, "k", b"one") == b"v"


def test_scopes_are_independent(store: Store) -> None:
    remember(store, "k")
    assert store.read(dedupe.check, "other", "k", b"another") is None


def test_lookup_returns_the_dedupe_record(store: Store) -> None:
    remember(store, "k", b"h", b"v", at=7)
    assert store.read(dedupe.lookup, "s", "k") == dedupe.DedupeRecord(b"h", b"v", 7)


def test_expire_removes_the_oldest_keys_up_to_its_limit(sim_store: Store, clock: SimClock) -> None:
    for key in ("c", "b", "a"):
        remember(sim_store, key)
        clock.advance(S)
    clock.advance(DAY)
    remember(sim_store, "young")
    assert sim_store.transact(dedupe.expire, "s", DAY, 2) == 2
    assert (check(sim_store, "c"), check(sim_store, "b"), check(sim_store, "a")) == (
        None,
        None,
        b"v",
    )
    assert sim_store.transact(dedupe.expire, "s", DAY, 2) == 1
    assert check(sim_store, "young") == b"v"
    assert count_rows(sim_store) == 2


def test_key_is_unused_again_after_expire(sim_store: Store, clock: SimClock) -> None:
    remember(sim_store, "k", b"one")
    clock.advance(2 * DAY)
    sim_store.transact(dedupe.expire, "s", DAY, 10)
    assert check(sim_store, "k", b"two") is None


def test_key_issued_below_the_floor_raises_key_expired(sim_store: Store, clock: SimClock) -> None:
    issued_ns = sim_store.now_ns()
    remember(sim_store, "k", at=issued_ns)
    clock.advance(2 * DAY)
    sim_store.transact(dedupe.expire, "s", DAY, 10)
    with pytest.raises(KeyExpired) as error:
        check(sim_store, "k", at=issued_ns)
    assert error.value.issued_ns == issued_ns < error.value.floor_ns


def test_remember_of_an_expired_key_raises_key_expired(sim_store: Store, clock: SimClock) -> None:
    issued_ns = sim_store.now_ns()
    clock.advance(2 * DAY)
    sim_store.transact(dedupe.expire, "s", DAY, 10)
    with pytest.raises(KeyExpired):
        remember(sim_store, "late", at=issued_ns)


def test_key_issued_above_the_floor_is_not_expired(sim_store: Store, clock: SimClock) -> None:
    clock.advance(2 * DAY)
    sim_store.transact(dedupe.expire, "s", DAY, 10)
    assert check(sim_store, "k", at=sim_store.now_ns()) is None


def test_late_repeat_gets_the_value_while_the_record_exists(
    sim_store: Store, clock: SimClock
) -> None:
    issued_ns = sim_store.now_ns()
    remember(sim_store, "k", at=issued_ns)
    clock.advance(2 * DAY)
    assert check(sim_store, "k", at=issued_ns) == b"v"


def test_expire_at_its_limit_raises_the_floor_only_to_removed_keys(
    sim_store: Store, clock: SimClock
) -> None:
    first_ns = sim_store.now_ns()
    remember(sim_store, "first", at=first_ns)
    remember(sim_store, "second", at=first_ns + S)
    clock.advance(2 * DAY)
    assert sim_store.transact(dedupe.expire, "s", DAY, 1) == 1
    assert check(sim_store, "second", at=first_ns + S) == b"v"
    assert check(sim_store, "new", at=first_ns + S) is None
    with pytest.raises(KeyExpired):
        check(sim_store, "first", at=first_ns)


def test_floor_never_decreases(sim_store: Store, clock: SimClock) -> None:
    clock.advance(2 * DAY)
    sim_store.transact(dedupe.expire, "s", DAY, 10)
    at_ns = sim_store.now_ns() - DAY - S
    sim_store.transact(dedupe.expire, "s", 2 * DAY, 10)
    with pytest.raises(KeyExpired):
        check(sim_store, "k", at=at_ns)


def test_expire_keeps_young_keys(store: Store) -> None:
    remember(store, "k")
    assert store.transact(dedupe.expire, "s", DAY, 10) == 0
    assert check(store, "k") == b"v"


@pytest.mark.parametrize(
    ("scope", "key", "at", "what"),
    [("", "k", None, "scope"), ("s", "", None, "key"), ("s", "k", -1, "issued_ns")],
)
def test_remember_with_bad_input_raises_invalid_with_the_field(
    store: Store, scope: str, key: str, at: int | None, what: str
) -> None:
    with pytest.raises(Invalid) as error:
        store.transact(dedupe.remember, scope, key, b"h", b"v", issued_ns=at)
    assert error.value.what == what


@pytest.mark.parametrize(("older_than_ns", "limit"), [(-1, 1), (1, -1)])
def test_expire_with_bad_arguments_raises_invalid(
    store: Store, older_than_ns: int, limit: int
) -> None:
    with pytest.raises(Invalid):
        store.transact(dedupe.expire, "s", older_than_ns, limit)
