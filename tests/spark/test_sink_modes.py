"""An output whose input grew: files without a changed or gone row stay, others are written again."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from holdfast.spark.sinks import Base, KeptPart, Same
from holdfast.spark.sinks.api import kept_files


def same_of(old: list[tuple[int, int]], new: list[tuple[int, int]]) -> list[Same]:
    """The runs of rows, as (key, value) in key order, that are the same in both."""
    where = {row: at for at, row in enumerate(old)}
    found: list[Same] = []
    for at, row in enumerate(new):
        base = where.get(row)
        if base is None:
            continue
        if found and found[-1].hi == at and base == found[-1].base_lo + at - found[-1].lo:
            found[-1] = found[-1]._replace(hi=at + 1)
        else:
            found.append(Same(at, at + 1, base))
    return found


values = st.dictionaries(st.integers(0, 40), st.integers(0, 1), max_size=40)


@given(old=values, new=values, cut=st.integers(1, 7))
def test_a_file_is_kept_if_and_only_if_its_rows_follow_each_other_unchanged(
    old: dict[int, int], new: dict[int, int], cut: int
) -> None:
    before, after = sorted(old.items()), sorted(new.items())
    files = [(f"{lo}", lo, min(lo + cut, len(before))) for lo in range(0, len(before), cut)]
    kept = kept_files(Base("base", same_of(before, after)), files)
    expected = []
    for name, lo, hi in files:
        rows = before[lo:hi]
        at = after.index(rows[0]) if rows[0] in after else -1
        if at >= 0 and after[at : at + len(rows)] == rows:
            expected.append(KeptPart(at, at + len(rows), name))
    assert kept == expected
    assert all(one.hi <= two.lo for one, two in pairwise(kept))


def test_a_file_without_rows_is_not_kept() -> None:
    assert kept_files(Base("base", [Same(0, 10, 0)]), [("empty", 0, 0)]) == []
