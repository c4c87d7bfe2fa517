"""Where parts end: the same seqs, whatever the order and the number of looks."""

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.spark import part_cuts
from holdfast.spark.part_cuts import PartCuts, Span
from holdfast.spark.row_sizes import row_sizes, row_width
from holdfast.spark.sinks import KeptPart

rows = st.lists(st.integers(0, 40), max_size=60)


def spans_of(
    sizes: list[int], file_rows: int, file_bytes: int, looks: list[int], **options: Any
) -> list[Span]:
    """All parts, found by looking when so many rows are final, and at the end."""
    found: list[Span] = []
    known = np.array(sizes, np.int64)
    cuts = PartCuts(
        len(sizes), file_rows, file_bytes, lambda lo, hi: known[lo:hi].copy(), **options
    )
    for final in [*sorted(looks), len(sizes)]:
        at = found[-1].hi if found else 0
        while (span := cuts.next(at, min(final, len(sizes)))) is not None:
            found.append(span)
            at = span.hi
        assert at >= len(sizes) or cuts.next_look(at) > min(final, len(sizes))
    return found


@given(
    sizes=rows,
    file_rows=st.integers(1, 20),
    file_bytes=st.integers(1, 100),
    looks=st.lists(st.integers(0, 60), max_size=8),
    scan=st.integers(1, 9),
    group=st.integers(1, 60),
)
def test_parts_and_row_groups_end_at_the_same_seqs_however_often_is_looked(
    sizes: list[int], file_rows: int, file_bytes: int, looks: list[int], scan: int, group: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_cuts, "GROUP_BYTES", group)
        patch.setattr(part_cuts, "ROW_GROUP_ROWS", 7)
        at_once = spans_of(sizes, file_rows, file_bytes, [])
        patch.setattr(part_cuts, "SCAN_ROWS", scan)
        patch.setattr(part_cuts, "LOOK_ROWS_MIN", 1)
        assert spans_of(sizes, file_rows, file_bytes, looks) == at_once
    ends = [0, *(span.hi for span in at_once)]
    assert ends[-1] == len(sizes)
    for (lo, hi), span in zip(pairwise(ends), at_once, strict=True):
        assert (span.lo, span.hi, span.groups[-1]) == (lo, hi, hi)
        assert lo // file_rows == (hi - 1) // file_rows
        assert sum(sizes[lo:hi]) <= file_bytes or hi == lo + 1
        # And no part ends early.
        assert hi == len(sizes) or hi % file_rows == 0 or sum(sizes[lo : hi + 1]) > file_bytes
        for a, b in pairwise([lo, *span.groups]):
            assert a < b <= a + 7
            assert sum(sizes[a:b]) <= group or b == a + 1


@given(sizes=rows, start=st.integers(0, 5), file_bytes=st.integers(1, 100))
def test_a_restart_at_the_end_of_a_part_finds_the_same_ends(
    sizes: list[int], start: int, file_bytes: int
) -> None:
    whole = spans_of(sizes, 10, file_bytes, [])
    known = np.array(sizes, np.int64)
    cuts = PartCuts(len(sizes), 10, file_bytes, lambda lo, hi: known[lo:hi])
    for span in whole[start:]:
        assert cuts.next(span.lo, len(sizes)) == span


def test_rows_of_a_fixed_width_are_cut_without_reading_them() -> None:
    def unread(lo: int, hi: int) -> Any:
        raise AssertionError

    cuts = PartCuts(100, 30, 80, unread, width=8)
    found = []
    at = 0
    while (span := cuts.next(at, 100)) is not None:
        found.append((span.lo, span.hi))
        at = span.hi
    assert found[:4] == [(0, 10), (10, 20), (20, 30), (30, 40)]
    assert cuts.next(0, 9) is None


def test_rows_that_are_kept_are_a_part_of_their_own() -> None:
    kept = [KeptPart(3, 8, "a"), KeptPart(8, 9, "b")]
    found = spans_of([1] * 20, 10, 100, [4, 9], kept=kept)
    told = [(span.lo, span.hi, span.kept and span.kept.file) for span in found]
    assert told == [(0, 3, None), (3, 8, "a"), (8, 9, "b"), (9, 10, None), (10, 20, None)]


VALUES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int64(), [1, None, 3, 4]),
    (pa.bool_(), [True, None, False, True]),
    (pa.string(), ["a", None, "", "four"]),
    (pa.large_binary(), [b"a", None, b"", b"four"]),
    (pa.decimal128(10, 2), [None, None, 1, 2]),
    (pa.list_(pa.string()), [["a", None], None, [], ["bb", "ccc"]]),
    (pa.list_(pa.list_(pa.int32())), [[[1], []], None, [], [[1, 2], None]]),
    (pa.struct([("x", pa.string()), ("y", pa.int8())]), [{"x": "a"}, None, {}, {"x": "bb"}]),
    (pa.map_(pa.string(), pa.int64()), [[("a", 1)], None, [], [("bb", 2), ("c", None)]]),
    (pa.null(), [None] * 4),
]


@pytest.mark.parametrize(("kind", "values"), VALUES, ids=[str(kind) for kind, _ in VALUES])
def test_the_size_of_a_row_depends_on_its_values_alone(
    kind: pa.DataType, values: list[Any]
) -> None:
    table = pa.table({"c": pa.array(values, kind)})
    whole = row_sizes(table)
    assert len(whole) == 4
    for lo in range(4):
        for hi in range(lo, 5):
            assert row_sizes(table.slice(lo, hi - lo)).tolist() == whole[lo:hi].tolist()
            one = pa.table({"c": pa.array(values[lo:hi], kind)})
            assert row_sizes(one).tolist() == whole[lo:hi].tolist()
    joined = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    assert row_sizes(joined).tolist() == whole.tolist()
    width = row_width(table.schema)
    assert width is None or set(whole.tolist()) == {width}


def test_text_takes_as_many_bytes_as_it_has() -> None:
    table = pa.table({"a": ["", "ü", "x" * 1000], "b": [1, 2, 3]})
    assert row_sizes(table).tolist() == [12, 14, 1012]
