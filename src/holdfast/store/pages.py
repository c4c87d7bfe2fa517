"""A reader of LMDB's file in Python: it reads one commit, named by its meta page, and writes nothing.

LMDB follows page numbers without checks, so a damaged file ends its reader with SIGSEGV or SIGBUS. This reader
checks every number that it follows and raises `StoreCorrupt`. It is slower than LMDB by far. The store uses it
for three things:

- the rows of a base whose meta page is in the redo log, before anything is written;
- the pages that a replay of the log is going to touch;
- the structure of the whole file (`holdfast verify`, `holdfast restore`).

The format is that of LMDB 0.9 on a machine with 64 bits: one main database and the list of free pages.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from holdfast.errors import StoreCorrupt
from holdfast.store.api import Row

META_BYTES = 152
META_COUNT = 2
PAGE_HEADER_BYTES = 16
_META_MAGIC, _META_VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW, _META = 1, 2, 4, 8
_BIG, _NODE_FLAGS_KNOWN = 1, 1
_NODE_BYTES = 8
_NO_PAGE = 0xFFFF_FFFF_FFFF_FFFF
_DEPTH_MAX = 32
_CACHED_MAX = 8192
_PAGE_SIZES = tuple(1 << n for n in range(9, 17))
# The page's number, its flags, where free space begins and ends.
_HEAD = struct.Struct("<QHHHH")
_NODE = struct.Struct("<HHHH")
_PGNO = struct.Struct("<Q")
_OVERFLOW_PAGES = struct.Struct("<I")
_META_HEAD = struct.Struct("<QHHHHII")
# Page size or padding, flags, depth, branch, leaf and overflow pages, entries, root.
_TREE = struct.Struct("<IHHQQQQQ")
_FREE_AT, _MAIN_AT, _LAST_AT, _TXN_AT = 40, 88, 136, 144


class Tree(NamedTuple):
    pad: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int
    root: int


class Meta(NamedTuple):
    """One meta page: a commit of the file."""

    page_bytes: int
    free: Tree
    main: Tree
    last: int
    txn: int


class Leaf(NamedTuple):
    keys: list[bytes]
    # A value that lies in pages of its own: the number of the first one, and its length.
    values: list[bytes | tuple[int, int]]


class Branch(NamedTuple):
    # The first key is not used: everything below the second goes to the first child.
    keys: list[bytes]
    children: list[int]


class Pages:
    """The rows of one commit. The caller owns the descriptor."""

    def __init__(self, fd: int, meta: bytes) -> None:
        self._fd = fd
        self.meta = read_meta(meta)
        self._size = self.meta.page_bytes
        self._file_bytes = os.fstat(fd).st_size
        self._cached: dict[int, Leaf | Branch] = {}

    @property
    def id(self) -> int:
        return self.meta.txn

    @property
    def is_whole(self) -> bool:
        """Whether the file is as long as its last page says."""
        return self._file_bytes >= self.full_bytes

    @property
    def full_bytes(self) -> int:
        return (self.meta.last + 1) * self._size

    def get(self, key: bytes) -> bytes | None:
        leaf, at = self._seek(self.meta.main, key)
        if leaf is None or at == len(leaf.keys) or leaf.keys[at] != key:
            return None
        return self._value(leaf.values[at])

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        found: list[Row] = []
        if lo >= hi:
            return found
        for key, value in self._rows(self.meta.main, lo, hi, reverse):
            found.append((key, self._value(value)))
            if len(found) == limit:
                break
        return found

    def close(self) -> None:
        self._cached.clear()

    # -- checks ----------------------------------------------------------------------------------

    def check_paths(self, keys: Iterator[bytes] | list[bytes]) -> None:
        """Follow each key from the root to its leaf, and check the pages beside the path: a page that loses
        its last rows is merged with one of them."""
        for key in sorted(set(keys)):
            number, tree = self.meta.main.root, self.meta.main
            for depth in range(tree.depth):
                page = self._page(number, leaf=depth == tree.depth - 1)
                if isinstance(page, Leaf):
                    at = bisect_left(page.keys, key)
                    if at < len(page.keys) and page.keys[at] == key:
                        self._value_head(page.values[at])
                    break
                at = bisect_right(page.keys, key, 1) - 1
                for beside in page.children[max(at - 1, 0) : at + 2]:
                    self._page(beside, leaf=depth == tree.depth - 2)
                number = page.children[at]
        for _ in self.free_pages():
            pass

    def check_all(self) -> set[int]:
        """Read the whole file: each page is used once, keys are in order, counts are right. The pages in use."""
        used: set[int] = set()
        self._check_tree(self.meta.main, used)
        self._check_tree(self.meta.free, used, ordered=False)
        free: set[int] = set()
        for number in self.free_pages():
            if number in used or number in free:
                raise self._corrupt(number, "in use twice, or in use and free")
            free.add(number)
        return used

    def free_pages(self) -> Iterator[int]:
        for key, kept in self._rows(self.meta.free, b"", None, False):
            value = self._value(kept)
            numbers = [one for (one,) in _PGNO.iter_unpack(value)] if len(value) % 8 == 0 else []
            if len(key) != _PGNO.size or not numbers or numbers[0] > len(numbers) - 1:
                raise StoreCorrupt(what="data.mdb", why="the list of free pages is damaged")
            for number in numbers[1 : numbers[0] + 1]:
                if not META_COUNT <= number <= self.meta.last:
                    raise self._corrupt(number, "free, but outside of the file")
                yield number

    def _check_tree(self, tree: Tree, used: set[int], *, ordered: bool = True) -> None:
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
            if isinstance(page, Branch):
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
                    first, count = value[0], self._value_head(value)
                    counts["overflows"] += count
                    if not used.isdisjoint(range(first, first + count)):
                        raise self._corrupt(first, "in use twice")
                    used.update(range(first, first + count))
        wanted = (tree.branches, tree.leaves, tree.overflows, tree.entries)
        if tuple(counts.values()) != wanted:
            why = f"its tree has {tuple(counts.values())} pages and rows, and should have {wanted}"
            raise StoreCorrupt(what="data.mdb", why=why)

    # -- pages -----------------------------------------------------------------------------------

    def _seek(self, tree: Tree, key: bytes) -> tuple[Leaf | None, int]:
        number = tree.root
        if number == _NO_PAGE:
            return None, 0
        for depth in range(tree.depth):
            page = self._page(number, leaf=depth == tree.depth - 1)
            if isinstance(page, Leaf):
                return page, bisect_left(page.keys, key)
            number = page.children[bisect_right(page.keys, key, 1) - 1]
        raise StoreCorrupt(what="data.mdb", why="a tree without leaves")

    def _rows(
        self, tree: Tree, lo: bytes, hi: bytes | None, reverse: bool
    ) -> Iterator[tuple[bytes, bytes | tuple[int, int]]]:
        if tree.root == _NO_PAGE:
            return
        turn = -1 if reverse else 1
        todo = [(tree.root, 0)]
        while todo:
            number, depth = todo.pop()
            page = self._page(number, leaf=depth == tree.depth - 1)
            if isinstance(page, Branch):
                first = bisect_right(page.keys, lo, 1) - 1
                last = len(page.keys) if hi is None else bisect_left(page.keys, hi, 1)
                below = page.children[first:last]
                todo += [(child, depth + 1) for child in below[::-turn]]
                continue
            first = bisect_left(page.keys, lo) if tree is self.meta.main else 0
            last = len(page.keys) if hi is None else bisect_left(page.keys, hi)
            found = list(zip(page.keys[first:last], page.values[first:last], strict=True))
            yield from found[::turn]

    def _page(self, number: int, *, leaf: bool, keep: bool = True) -> Leaf | Branch:
        page = self._cached.get(number)
        if page is None:
            page = self._parse(number)
            if keep:
                if len(self._cached) >= _CACHED_MAX:
                    self._cached.clear()
                self._cached[number] = page
        if isinstance(page, Leaf) != leaf:
            raise self._corrupt(number, "it is not at the depth of its tree")
        return page

    def _parse(self, number: int) -> Leaf | Branch:
        data = self._read(number, 1)
        _, _, flags, lower, upper = _HEAD.unpack_from(data)
        if flags not in (_BRANCH, _LEAF):
            raise self._corrupt(number, "it is of another kind")
        if not PAGE_HEADER_BYTES < lower <= upper <= self._size or lower % 2:
            raise self._corrupt(number, "its bounds are wrong")
        keys: list[bytes] = []
        children: list[int] = []
        values: list[bytes | tuple[int, int]] = []
        for (at,) in struct.iter_unpack("<H", data[PAGE_HEADER_BYTES:lower]):
            if at < upper or at % 2 or at + _NODE_BYTES > self._size:
                raise self._corrupt(number, "a row lies outside of it")
            low, high, bits, key_bytes = _NODE.unpack_from(data, at)
            start = at + _NODE_BYTES + key_bytes
            if start > self._size:
                raise self._corrupt(number, "a key lies outside of it")
            keys.append(data[at + _NODE_BYTES : start])
            if flags == _BRANCH:
                children.append(low | high << 16 | bits << 32)
                continue
            length = low | high << 16
            stop = start + (_PGNO.size if bits & _BIG else length)
            if bits & ~_NODE_FLAGS_KNOWN or stop > self._size:
                raise self._corrupt(number, "a value lies outside of it")
            if bits & _BIG:
                values.append((_PGNO.unpack_from(data, start)[0], length))
            else:
                values.append(data[start:stop])
        return Branch(keys, children) if flags == _BRANCH else Leaf(keys, values)

    def _value(self, value: bytes | tuple[int, int]) -> bytes:
        if isinstance(value, bytes):
            return value
        first, length = value
        data = self._read(first, self._value_head(value))
        return data[PAGE_HEADER_BYTES : PAGE_HEADER_BYTES + length]

    def _value_head(self, value: bytes | tuple[int, int]) -> int:
        """How many pages a value has to itself."""
        if isinstance(value, bytes):
            return 0
        first, length = value
        data = self._read(first, 1)
        flags = _HEAD.unpack_from(data)[2]
        (count,) = _OVERFLOW_PAGES.unpack_from(data, 12)
        # A value that was replaced by a shorter one in its transaction keeps the pages of the longer one.
        if flags != _OVERFLOW or count < -(-(PAGE_HEADER_BYTES + length) // self._size):
            raise self._corrupt(first, "it does not hold the value that it should")
        end = first + count
        if end - 1 > self.meta.last or end * self._size > self._file_bytes:
            raise self._corrupt(first, "its value lies outside of the file")
        return int(count)

    def _read(self, number: int, count: int) -> bytes:
        if not META_COUNT <= number <= self.meta.last:
            raise self._corrupt(number, "it lies outside of the file")
        data = os.pread(self._fd, count * self._size, number * self._size)
        if len(data) != count * self._size:
            raise self._corrupt(number, "the file is cut off")
        if _PGNO.unpack_from(data)[0] != number:
            raise self._corrupt(number, "it has the number of another")
        return data

    def _corrupt(self, number: int, why: str) -> StoreCorrupt:
        return StoreCorrupt(what="data.mdb", page=number, why=why)


def read_meta(data: bytes) -> Meta:
    """A meta page, checked."""
    if len(data) < META_BYTES:
        raise StoreCorrupt(what="data.mdb", why="it is cut off")
    _, _, flags, _, _, magic, version = _META_HEAD.unpack_from(data)
    if flags != _META or magic != _META_MAGIC or version != _META_VERSION:
        raise StoreCorrupt(what="data.mdb", why="it has no meta pages")
    free, main = (Tree(*_TREE.unpack_from(data, at)) for at in (_FREE_AT, _MAIN_AT))
    (last,), (txn,) = (_PGNO.unpack_from(data, at) for at in (_LAST_AT, _TXN_AT))
    sound = (
        free.pad in _PAGE_SIZES
        and last >= META_COUNT - 1
        and all(tree.depth <= _DEPTH_MAX for tree in (free, main))
        and all((tree.depth == 0) == (tree.root == _NO_PAGE) for tree in (free, main))
    )
    if not sound:
        raise StoreCorrupt(what="data.mdb", why="a meta page is damaged")
    return Meta(free.pad, free, main, last, txn)


def metas(fd: int) -> list[bytes]:
    """Both meta pages of a file, as they are. LMDB takes the system's page size when it makes a file."""
    first = os.pread(fd, META_BYTES, 0)
    size = read_meta(first).page_bytes
    second = os.pread(fd, META_BYTES, size)
    read_meta(second)
    return [first, second]


def newest(fd: int) -> bytes:
    return max(metas(fd), key=lambda meta: read_meta(meta).txn)
