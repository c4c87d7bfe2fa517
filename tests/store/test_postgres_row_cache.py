"""The row cache: cached rows and ranges equal the stored rows after any sequence of updates."""

from __future__ import annotations

import random

import pytest

from holdfast.store.postgres import row_cache as caches
from holdfast.store.postgres.row_cache import TOO_LARGE, RowCache

KEYS = [bytes([a, b]) for a in range(1, 9) for b in range(1, 9)]


@pytest.mark.parametrize("seed", range(20))
def test_cached_rows_and_ranges_equal_the_stored_rows(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    if seed % 3 == 0:
        monkeypatch.setattr(caches, "RANGE_KEYS_MAX", 8)
    if seed % 4 == 0:
        monkeypatch.setattr(caches, "RANGES_MAX", 3)
    if seed % 5 == 0:
        monkeypatch.setattr(caches, "ROWS_MAX", 50)
    stored: dict[bytes, bytes] = {}
    cache = RowCache()
    hits = 0
    for step in range(3_000):
        lo, hi = sorted(rng.sample(KEYS, 2))
        match rng.randrange(6):
            case 0 | 1:
                written = {key: _value(rng, step) for key in rng.sample(KEYS, rng.randint(1, 5))}
                _apply(stored, written)
                cache.put(written.items())
            case 2:
                cache.put_range(lo, hi, _rows(stored, lo, hi))
            case 3 if rng.random() < 0.1:
                written = {key: _value(rng, step) for key in rng.sample(KEYS, 3)}
                _apply(stored, written)
                cache.invalidate(written)
            case 4:
                key = rng.choice(KEYS)
                if key in cache.rows:
                    assert cache.rows[key] == stored.get(key)
            case _:
                limit = rng.choice([None, 1, 3])
                reverse = rng.random() < 0.3
                scanned = cache.scan(lo, hi, limit, reverse)
                if scanned is not None:
                    hits += 1
                    assert scanned == _rows(stored, lo, hi)[:: -1 if reverse else 1][:limit]
    assert hits > 20


def test_value_too_large_to_cache_is_not_cached_as_absent() -> None:
    cache = RowCache()
    cache.put_range(b"a", b"z", [(b"k", b"1")])
    cache.put([(b"k", TOO_LARGE)])
    assert b"k" not in cache.rows
    assert cache.scan(b"a", b"z", None, False) is None
    assert cache.scan(b"a", b"k", None, False) == []


def test_row_cache_stays_within_bytes_max(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "BYTES_MAX", 1_000)
    cache = RowCache()
    for n in range(1_000):
        cache.put([(n.to_bytes(2, "big"), b"x" * 100)])
        assert sum(len(value or b"") for value in cache.rows.values()) <= 1_100
    assert cache.rows


def test_row_cache_counts_the_bytes_of_a_rewritten_row_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(caches, "BYTES_MAX", 1_000)
    cache = RowCache()
    cache.put_range(b"a", b"b", [])
    for _ in range(1_000):
        cache.put([(b"k", b"x" * 100)])
    assert cache.scan(b"a", b"b", None, False) == []


def _value(rng: random.Random, step: int) -> bytes | None:
    return None if rng.random() < 0.4 else b"%d" % step


def _apply(stored: dict[bytes, bytes], written: dict[bytes, bytes | None]) -> None:
    for key, value in written.items():
        if value is None:
            stored.pop(key, None)
        else:
            stored[key] = value


def _rows(stored: dict[bytes, bytes], lo: bytes, hi: bytes) -> list[tuple[bytes, bytes]]:
    return sorted((key, value) for key, value in stored.items() if lo <= key < hi)
