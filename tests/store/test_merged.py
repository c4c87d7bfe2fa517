"""Scans that see what their own transaction has written: compared with rows in which it is written."""

from __future__ import annotations

import random
from functools import partial

import pytest

from holdfast.store.api import Row
from holdfast.store.txn import merged


def scan(
    rows: dict[bytes, bytes], lo: bytes, hi: bytes, limit: int | None, back: bool
) -> list[Row]:
    found = sorted((row for row in rows.items() if lo <= row[0] < hi), reverse=back)
    return found if limit is None else found[:limit]


@pytest.mark.parametrize("seed", range(40))
def test_a_scan_is_that_of_the_rows_as_they_will_be(seed: int) -> None:
    chance = random.Random(seed)

    def key() -> bytes:
        return bytes([chance.randrange(30)])

    for _ in range(200):
        rows = {key(): b"old" for _ in range(chance.randrange(25))}
        writes = {key(): chance.choice([None, b"new"]) for _ in range(chance.randrange(25))}
        after = {k: v for k, v in {**rows, **writes}.items() if v is not None}
        lo, hi = sorted([key(), key()])
        limit, back = chance.choice([None, 1, 2, 5]), chance.random() < 0.5
        found = merged(partial(scan, rows), sorted(writes), writes, lo, hi, limit, back)
        assert found == scan(after, lo, hi, limit, back)


def test_a_scan_for_one_looks_at_little_of_what_was_written() -> None:
    class Counted(dict[bytes, bytes | None]):
        looked = 0

        def __getitem__(self, key: bytes) -> bytes | None:
            self.looked += 1
            return super().__getitem__(key)

    writes = Counted({n.to_bytes(4, "big"): b"new" for n in range(100_000)})
    found = merged(lambda *_: [], sorted(writes), writes, b"\x00", b"\xff", 1, True)
    assert found == [((99_999).to_bytes(4, "big"), b"new")]
    assert writes.looked == 1
