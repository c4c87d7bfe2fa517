"""What a process knows of rows: never anything else than what is there, whatever was told in which order."""

from __future__ import annotations

import random

import pytest

from holdfast.store.pg import cache as caches
from holdfast.store.pg.cache import LARGE, Cache

KEYS = [bytes([a, b]) for a in range(1, 9) for b in range(1, 9)]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_known_is_what_is_there(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pick = random.Random(seed)
    if seed % 3 == 0:
        monkeypatch.setattr(caches, "SPAN_KEYS_MAX", 8)
    if seed % 4 == 0:
        monkeypatch.setattr(caches, "SPANS_MAX", 3)
    if seed % 5 == 0:
        monkeypatch.setattr(caches, "ROWS_MAX", 50)
    there: dict[bytes, bytes] = {}
    cache = Cache()
    hits = 0
    for step in range(3_000):
        lo, hi = sorted(pick.sample(KEYS, 2))
        match pick.randrange(6):
            case 0 | 1:
                written = {key: _value(pick, step) for key in pick.sample(KEYS, pick.randint(1, 5))}
                _apply(there, written)
                cache.keep(written.items())
            case 2:
                cache.learn(lo, hi, _rows(there, lo, hi))
            case 3 if pick.random() < 0.1:
                written = {key: _value(pick, step) for key in pick.sample(KEYS, 3)}
                _apply(there, written)
                cache.forget(written)
            case 4:
                key = pick.choice(KEYS)
                if key in cache.rows:
                    assert cache.rows[key] == there.get(key)
            case _:
                limit = pick.choice([None, 1, 3])
                reverse = pick.random() < 0.3
                found = cache.scan(lo, hi, limit, reverse)
                if found is not None:
                    hits += 1
                    assert found == _rows(there, lo, hi)[:: -1 if reverse else 1][:limit]
    assert hits > 20


def test_a_value_that_is_too_large_to_keep_is_not_taken_for_none() -> None:
    cache = Cache()
    cache.learn(b"a", b"z", [(b"k", b"1")])
    cache.keep([(b"k", LARGE)])
    assert b"k" not in cache.rows
    assert cache.scan(b"a", b"z", None, False) is None
    assert cache.scan(b"a", b"k", None, False) == []


def test_it_holds_no_more_bytes_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "BYTES_MAX", 1_000)
    cache = Cache()
    for n in range(1_000):
        cache.keep([(n.to_bytes(2, "big"), b"x" * 100)])
        assert sum(len(value or b"") for value in cache.rows.values()) <= 1_100
    assert cache.rows


def test_a_row_that_is_written_again_and_again_is_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(caches, "BYTES_MAX", 1_000)
    cache = Cache()
    cache.learn(b"a", b"b", [])
    for _ in range(1_000):
        cache.keep([(b"k", b"x" * 100)])
    assert cache.scan(b"a", b"b", None, False) == []


def _value(pick: random.Random, step: int) -> bytes | None:
    return None if pick.random() < 0.4 else b"%d" % step


def _apply(there: dict[bytes, bytes], written: dict[bytes, bytes | None]) -> None:
    for key, value in written.items():
        if value is None:
            there.pop(key, None)
        else:
            there[key] = value


def _rows(there: dict[bytes, bytes], lo: bytes, hi: bytes) -> list[tuple[bytes, bytes]]:
    return sorted((key, value) for key, value in there.items() if lo <= key < hi)
