"""merged_scan: a scan over base rows and buffered writes equals a scan after the writes are applied."""

from __future__ import annotations

import random
from functools import partial

import pytest

from holdfast.store.api import Row
from holdfast.store.txn import merged_scan


def scan(
    rows: dict[bytes, bytes], lo: bytes, hi: bytes, limit: int | None, back: bool
) -> list[Row]:
    selected = sorted((row for row in rows.items() if lo <= row[0] < hi), reverse=back)
    return selected if limit is None else selected[:limit]


@pytest.mark.parametrize("seed", range(40))
def test_merged_scan_equals_a_scan_after_the_writes(seed: int) -> None:
    rng = random.Random(seed)

    def key() -> bytes:
        return bytes([rng.randrange(30)])

    for _ in range(200):
        rows = {key(): b"old" for _ in range(rng.randrange(25))}
        writes = {key(): rng.choice([None, b"new"]) for _ in range(rng.randrange(25))}
        after = {k: v for k, v in {**rows, **writes}.items() if v is not None}
        lo, hi = sorted([key(), key()])
        limit, back = rng.choice([None, 1, 2, 5]), rng.random() < 0.5
        found = merged_scan(partial(scan, rows), sorted(writes), writes, lo, hi, limit, back)
        assert found == scan(after, lo, hi, limit, back)


def test_merged_scan_with_limit_one_reads_one_buffered_write() -> None:
    class Counted(dict[bytes, bytes | None]):
        looked = 0

        def __getitem__(self, key: bytes) -> bytes | None:
            self.looked += 1
            return super().__getitem__(key)

    writes = Counted({n.to_bytes(4, "big"): b"new" for n in range(100_000)})
    found = merged_scan(lambda *_: [], sorted(writes), writes, b"\x00", b"\xff", 1, True)
    assert found == [((99_999).to_bytes(4, "big"), b"new")]
    assert writes.looked == 1
