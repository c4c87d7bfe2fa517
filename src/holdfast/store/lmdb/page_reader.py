"""A read-only page reader of LMDB files in Python. It reads one commit, selected by its meta page.

LMDB follows page numbers without checks, so a damaged file crashes its reader with SIGSEGV or SIGBUS. This reader
checks every page number and raises `StoreCorrupt`. It is much slower than LMDB. The store uses it to check:

- the rows of a base whose meta page is in the redo log, before recovery writes anything;
- the pages that a replay of the log touches;
- the structure of the whole file (`holdfast verify`, `holdfast restore`).

The format is that of LMDB 0.9 on a 64-bit machine: one main database and the list of free pages.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from holdfast import failpoints
from holdfast.errors import StoreCorrupt
from holdfast.store.api import Row

META_BYTES = 152
META_COUNT = 2
PAGE_HEADER_BYTES = 16
_META_MAGIC, _META_VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW, _META = 1, 2, 4, 8
_IN_OVERFLOW, _NODE_FLAGS_KNOWN = 1, 1
_NODE_BYTES = 8
_NO_PAGE = 0xFFFF_FFFF_FFFF_FFFF
_DEPTH_MAX = 32
_CACHED_MAX = 8192
_PAGE_SIZES = tuple(1 << n for n in range(9, 17))
# Page number, padding, flags, begin and end of the free space.
_HEAD = struct.Struct("<QHHHH")
_NODE = struct.Struct("<HHHH")
_PGNO = struct.Struct("<Q")
_OVERFLOW_PAGES = struct.Struct("<I")
_META_HEAD = struct.Struct("<QHHHHII")
# Page size or padding, flags, depth, branch, leaf and overflow pages, entries, root.
_TREE = struct.Struct("<IHHQQQQQ")
_FREE_AT, _MAIN_AT, _LAST_AT, _TXN_AT = 40, 88, 136, 144


class TreeHeader(NamedTuple):
    pad: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int
    root: int


class MetaPage(NamedTuple):
    """A meta page: one commit of the file."""

    page_bytes: int
    free: TreeHeader
    main: TreeHeader
    last_page: int
    txn: int


class LeafPage(NamedTuple):
    keys: list[bytes]
    # A value, or the first page and the length of a value in overflow pages.
    values: list[bytes | tuple[int, int]]


class BranchPage(NamedTuple):
    # The first key is unused: all keys below the second belong to the first child.
    keys: list[bytes]
    children: list[int]


class PageReader:
    """The rows of one commit. The caller owns the descriptor."""

    def __init__(self, fd: int, meta: bytes) -> None:
        self._fd = fd
        self.meta = decode_meta_page(meta)
        self._page_bytes = self.meta.page_bytes
        self._file_bytes = os.fstat(fd).st_size
        self._cached: dict[int, LeafPage | BranchPage] = {}

    @property
    def id(self) -> int:
        return self.meta.txn

    @property
    def is_whole(self) -> bool:
        """Whether the file contains its last page."""
        return self._file_bytes >= self.full_bytes

    @property
    def full_bytes(self) -> int:
        return (self.meta.last_page + 1) * self._page_bytes

    def get(self, key: bytes) -> bytes | None:
        leaf, at = self._seek(self.meta.main, key)
        if leaf is None or at == len(leaf.keys) or leaf.keys[at] != key:
            return None
        return self._value(leaf.values[at])

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        rows: list[Row] = []
        if lo >= hi:
            return rows
        for key, value in self._rows(self.meta.main, lo, hi, reverse):
            rows.append((key, self._value(value)))
            if len(rows) == limit:
                break
        return rows

    def close(self) -> None:
        self._cached.clear()

    # -- checks ----------------------------------------------------------------------------------

    def check_paths(self, keys: Iterator[bytes] | list[bytes]) -> None:
        """Check the path of each key from the root to its leaf, and the sibling pages: LMDB merges a page that loses
        its rows with a sibling."""
        for key in sorted(set(keys)):
            number, tree = self.meta.main.root, self.meta.main
            for depth in range(tree.depth):
                page = self._page(number, leaf=depth == tree.depth - 1)
                if isinstance(page, LeafPage):
                    at = bisect_left(page.keys, key)
                    if at < len(page.keys) and page.keys[at] == key:
                        self._overflow_page_count(page.values[at])
                    break
                at = bisect_right(page.keys, key, 1) - 1
                for sibling in page.children[max(at - 1, 0) : at + 2]:
                    self._page(sibling, leaf=depth == tree.depth - 2)
                number = page.children[at]
        for _ in self.free_pages():
            pass

    def check_all(self) -> set[int]:
        """Check the whole file: each page is used once, keys are sorted, counts match. Return the used pages."""
        if failpoints.armed:
            failpoints.hit("lmdb.check_pages", self)
        used: set[int] = set()
        self._check_tree(self.meta.main, used)
        self._check_tree(self.meta.free, used, ordered=False)
        free: set[int] = set()
        for number in self.free_pages():
            if number in used or number in free:
                raise self._corrupt(number, "used twice, or used and free")
            free.add(number)
        return used

    def free_pages(self) -> Iterator[int]:
        for key, stored in self._rows(self.meta.free, b"", None, False):
            value = self._value(stored)
            numbers = (
                [page_number for (page_number,) in _PGNO.iter_unpack(value)]
                if len(value) % 8 == 0
                else []
            )
            if len(key) != _PGNO.size or not numbers or numbers[0] > len(numbers) - 1:
                raise StoreCorrupt(what="data.mdb", why="damaged list of free pages")
            for number in numbers[1 : numbers[0] + 1]:
                if not META_COUNT <= number <= self.meta.last_page:
                    raise self._corrupt(number, "a free page outside the file")
                yield number

    def _check_tree(self, tree: TreeHeader, used: set[int], *, ordered: bool = True) -> None:
        counts = {"branches": 0, "leaves": 0, "overflows": 0, "entries": 0}
        if tree.root == _NO_PAGE:
            if tree.entries or tree.depth:
                raise StoreCorrupt(what="data.mdb", why="a tree without a root has rows")
            return
        last: bytes | None = None
        todo: list[tuple[int, int, bytes, bytes | None]] = [(tree.root, 0, b"", None)]
        while todo:
            number, depth, low, high = todo.pop()
            if number in used:
                raise self._corrupt(number, "in use twice")
            used.add(number)
            page = self._page(number, leaf=depth == tree.depth - 1, keep=False)
            if isinstance(page, BranchPage):
                counts["branches"] += 1
                keys = [low, *page.keys[1:]]
                ends = [*page.keys[1:], high]
                below = zip(page.children, keys, ends, strict=True)
                todo += reversed([(child, depth + 1, lo, hi) for child, lo, hi in below])
                if ordered and any(b <= a for a, b in pairwise(keys[1:])):
                    raise self._corrupt(number, "its keys are not in order")
                continue
            counts["leaves"] += 1
            counts["entries"] += len(page.keys)
            for key, value in zip(page.keys, page.values, strict=True):
                inside = key >= low and (high is None or key < high)
                if ordered and ((last is not None and key <= last) or not inside):
                    raise self._corrupt(number, "its keys are not in order")
                last = key
                if isinstance(value, tuple):
                    first, count = value[0], self._overflow_page_count(value)
                    counts["overflows"] += count
                    if not used.isdisjoint(range(first, first + count)):
                        raise self._corrupt(first, "in use twice")
                    used.update(range(first, first + count))
        wanted = (tree.branches, tree.leaves, tree.overflows, tree.entries)
        if tuple(counts.values()) != wanted:
            why = f"its tree has {tuple(counts.values())} pages and rows, and should have {wanted}"
            raise StoreCorrupt(what="data.mdb", why=why)

    # -- pages -----------------------------------------------------------------------------------

    def _seek(self, tree: TreeHeader, key: bytes) -> tuple[LeafPage | None, int]:
        number = tree.root
        if number == _NO_PAGE:
            return None, 0
        for depth in range(tree.depth):
            page = self._page(number, leaf=depth == tree.depth - 1)
            if isinstance(page, LeafPage):
                return page, bisect_left(page.keys, key)
            number = page.children[bisect_right(page.keys, key, 1) - 1]
        raise StoreCorrupt(what="data.mdb", why="a tree without leaves")

    def _rows(
        self, tree: TreeHeader, lo: bytes, hi: bytes | None, reverse: bool
    ) -> Iterator[tuple[bytes, bytes | tuple[int, int]]]:
        if tree.root == _NO_PAGE:
            return
        step = -1 if reverse else 1
        todo = [(tree.root, 0)]
        while todo:
            number, depth = todo.pop()
            page = self._page(number, leaf=depth == tree.depth - 1)
            if isinstance(page, BranchPage):
                first = bisect_right(page.keys, lo, 1) - 1
                last = len(page.keys) if hi is None else bisect_left(page.keys, hi, 1)
                below = page.children[first:last]
                todo += [(child, depth + 1) for child in below[::-step]]
                continue
            first = bisect_left(page.keys, lo) if tree is self.meta.main else 0
            last = len(page.keys) if hi is None else bisect_left(page.keys, hi)
            rows = list(zip(page.keys[first:last], page.values[first:last], strict=True))
            yield from rows[::step]

    def _page(self, number: int, *, leaf: bool, keep: bool = True) -> LeafPage | BranchPage:
        page = self._cached.get(number)
        if page is None:
            page = self._decode_page(number)
            if keep:
                if len(self._cached) >= _CACHED_MAX:
                    self._cached.clear()
                self._cached[number] = page
        if isinstance(page, LeafPage) != leaf:
            raise self._corrupt(number, "wrong depth in its tree")
        return page

    def _decode_page(self, number: int) -> LeafPage | BranchPage:
        data = self._read(number, 1)
        _, _, flags, lower, upper = _HEAD.unpack_from(data)
        if flags not in (_BRANCH, _LEAF):
            raise self._corrupt(number, "wrong page type")
        if not PAGE_HEADER_BYTES < lower <= upper <= self._page_bytes or lower % 2:
            raise self._corrupt(number, "invalid bounds")
        keys: list[bytes] = []
        children: list[int] = []
        values: list[bytes | tuple[int, int]] = []
        for (at,) in struct.iter_unpack("<H", data[PAGE_HEADER_BYTES:lower]):
            if at < upper or at % 2 or at + _NODE_BYTES > self._page_bytes:
                raise self._corrupt(number, "a row outside the page")
            low, high, bits, key_bytes = _NODE.unpack_from(data, at)
            start = at + _NODE_BYTES + key_bytes
            if start > self._page_bytes:
                raise self._corrupt(number, "a key outside the page")
            keys.append(data[at + _NODE_BYTES : start])
            if flags == _BRANCH:
                children.append(low | high << 16 | bits << 32)
                continue
            length = low | high << 16
            stop = start + (_PGNO.size if bits & _IN_OVERFLOW else length)
            if bits & ~_NODE_FLAGS_KNOWN or stop > self._page_bytes:
                raise self._corrupt(number, "a value outside the page")
            if bits & _IN_OVERFLOW:
                values.append((_PGNO.unpack_from(data, start)[0], length))
            else:
                values.append(data[start:stop])
        return BranchPage(keys, children) if flags == _BRANCH else LeafPage(keys, values)

    def _value(self, value: bytes | tuple[int, int]) -> bytes:
        if isinstance(value, bytes):
            return value
        first, length = value
        data = self._read(first, self._overflow_page_count(value))
        return data[PAGE_HEADER_BYTES : PAGE_HEADER_BYTES + length]

    def _overflow_page_count(self, value: bytes | tuple[int, int]) -> int:
        """Return the number of overflow pages of a value, after checking the first."""
        if isinstance(value, bytes):
            return 0
        first, length = value
        data = self._read(first, 1)
        flags = _HEAD.unpack_from(data)[2]
        (count,) = _OVERFLOW_PAGES.unpack_from(data, 12)
        # A value replaced by a shorter one in the same transaction keeps its pages.
        if flags != _OVERFLOW or count < -(-(PAGE_HEADER_BYTES + length) // self._page_bytes):
            raise self._corrupt(first, "not the overflow page of its value")
        end = first + count
        if end - 1 > self.meta.last_page or end * self._page_bytes > self._file_bytes:
            raise self._corrupt(first, "a value outside the file")
        return int(count)

    def _read(self, number: int, count: int) -> bytes:
        if not META_COUNT <= number <= self.meta.last_page:
            raise self._corrupt(number, "outside the file")
        data = os.pread(self._fd, count * self._page_bytes, number * self._page_bytes)
        if len(data) != count * self._page_bytes:
            raise self._corrupt(number, "the file is cut off")
        if _PGNO.unpack_from(data)[0] != number:
            raise self._corrupt(number, "wrong page number")
        return data

    def _corrupt(self, number: int, why: str) -> StoreCorrupt:
        return StoreCorrupt(what="data.mdb", page=number, why=why)


def decode_meta_page(data: bytes) -> MetaPage:
    """Decode and check a meta page."""
    if len(data) < META_BYTES:
        raise StoreCorrupt(what="data.mdb", why="it is cut off")
    _, _, flags, _, _, magic, version = _META_HEAD.unpack_from(data)
    if flags != _META or magic != _META_MAGIC or version != _META_VERSION:
        raise StoreCorrupt(what="data.mdb", why="it has no meta pages")
    free, main = (TreeHeader(*_TREE.unpack_from(data, at)) for at in (_FREE_AT, _MAIN_AT))
    (last,), (txn,) = (_PGNO.unpack_from(data, at) for at in (_LAST_AT, _TXN_AT))
    is_valid = (
        free.pad in _PAGE_SIZES
        and last >= META_COUNT - 1
        and all(tree.depth <= _DEPTH_MAX for tree in (free, main))
        and all((tree.depth == 0) == (tree.root == _NO_PAGE) for tree in (free, main))
    )
    if not is_valid:
        raise StoreCorrupt(what="data.mdb", why="a meta page is damaged")
    return MetaPage(free.pad, free, main, last, txn)


def read_meta_pages(fd: int) -> list[bytes]:
    """Read both meta pages of a file. LMDB uses the system's page size at creation."""
    first = os.pread(fd, META_BYTES, 0)
    size = decode_meta_page(first).page_bytes
    second = os.pread(fd, META_BYTES, size)
    decode_meta_page(second)
    return [first, second]


def newest_meta(fd: int) -> bytes:
    return max(read_meta_pages(fd), key=lambda meta: decode_meta_page(meta).txn)
