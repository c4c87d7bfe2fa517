"""Part ends: `PartCuts` cuts at the same seqs for any order and number of scans."""

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.spark import part_cuts
from holdfast.spark.part_cuts import PartCuts, PartSpan
from holdfast.spark.row_sizes import row_sizes, row_width
from holdfast.spark.sinks import KeptPart

rows = st.lists(st.integers(0, 40), max_size=60)


def part_spans(
    sizes: list[int], file_rows: int, file_bytes: int, looks: list[int], **options: Any
) -> list[PartSpan]:
    """All parts, cut at each number of final rows in `looks` and at the end."""
    spans: list[PartSpan] = []
    known = np.array(sizes, np.int64)
    cuts = PartCuts(
        len(sizes), file_rows, file_bytes, lambda lo, hi: known[lo:hi].copy(), **options
    )
    for final in [*sorted(looks), len(sizes)]:
        at = spans[-1].hi if spans else 0
        while (span := cuts.next_part(at, min(final, len(sizes)))) is not None:
            spans.append(span)
            at = span.hi
        assert at >= len(sizes) or cuts.next_scan_at(at) > min(final, len(sizes))
    return spans


@given(
    sizes=rows,
    file_rows=st.integers(1, 20),
    file_bytes=st.integers(1, 100),
    looks=st.lists(st.integers(0, 60), max_size=8),
    scan=st.integers(1, 9),
    group=st.integers(1, 60),
)
def test_part_and_row_group_ends_do_not_depend_on_scan_times(
    sizes: list[int], file_rows: int, file_bytes: int, looks: list[int], scan: int, group: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_cuts, "GROUP_BYTES", group)
        patch.setattr(part_cuts, "ROW_GROUP_ROWS", 7)
        at_once = part_spans(sizes, file_rows, file_bytes, [])
        patch.setattr(part_cuts, "SCAN_ROWS", scan)
        patch.setattr(part_cuts, "SCAN_ROWS_MIN", 1)
        assert part_spans(sizes, file_rows, file_bytes, looks) == at_once
    ends = [0, *(span.hi for span in at_once)]
    assert ends[-1] == len(sizes)
    for (lo, hi), span in zip(pairwise(ends), at_once, strict=True):
        assert (span.lo, span.hi, span.groups[-1]) == (lo, hi, hi)
        assert lo // file_rows == (hi - 1) // file_rows
        assert sum(sizes[lo:hi]) <= file_bytes or hi == lo + 1
        # No part ends early.
        assert hi == len(sizes) or hi % file_rows == 0 or sum(sizes[lo : hi + 1]) > file_bytes
        for a, b in pairwise([lo, *span.groups]):
            assert a < b <= a + 7
            assert sum(sizes[a:b]) <= group or b == a + 1


@given(sizes=rows, start=st.integers(0, 5), file_bytes=st.integers(1, 100))
def test_restart_at_a_part_end_finds_the_same_part_ends(
    sizes: list[int], start: int, file_bytes: int
) -> None:
    whole = part_spans(sizes, 10, file_bytes, [])
    known = np.array(sizes, np.int64)
    cuts = PartCuts(len(sizes), 10, file_bytes, lambda lo, hi: known[lo:hi])
    for span in whole[start:]:
        assert cuts.next_part(span.lo, len(sizes)) == span


def test_fixed_width_rows_are_cut_without_reading_sizes() -> None:
    def unread(lo: int, hi: int) -> Any:
        raise AssertionError

    cuts = PartCuts(100, 30, 80, unread, width=8)
    found = []
    at = 0
    while (span := cuts.next_part(at, 100)) is not None:
        found.append((span.lo, span.hi))
        at = span.hi
    assert found[:4] == [(0, 10), (10, 20), (20, 30), (30, 40)]
    assert cuts.next_part(0, 9) is None


def test_kept_rows_form_separate_parts() -> None:
    kept = [KeptPart(3, 8, "a"), KeptPart(8, 9, "b")]
    found = part_spans([1] * 20, 10, 100, [4, 9], kept=kept)
    spans = [(span.lo, span.hi, span.kept and span.kept.file) for span in found]
    assert spans == [(0, 3, None), (3, 8, "a"), (8, 9, "b"), (9, 10, None), (10, 20, None)]


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
def test_row_size_depends_only_on_its_values(kind: pa.DataType, values: list[Any]) -> None:
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


def test_row_sizes_count_the_utf8_bytes_of_text() -> None:
    table = pa.table({"a": ["", "ü", "x" * 1000], "b": [1, 2, 3]})
    assert row_sizes(table).tolist() == [12, 14, 1012]
