"""The census of a store (storage accounting): rows and bytes by universe, kind and type, by a slow background walk.

    "census" "progress"    the walk under way: its owner, its cursor and the figures so far
    "census" "result"      the last complete census

- A step reads the keys and lengths of `STEP_ROWS` rows in one short snapshot (`store.row_sizes`). No step blocks a
  commit, and commits of other work pay nothing for the census.
- The figures of a walk are not a snapshot: a row is counted as it is when the walk reaches it.
- One process of a store walks. The progress row names it. It saves its cursor every minute, and another process
  continues a walk that was not saved for `ABANDONED_NS`.
- The number of figures is bounded: a kind has at most `TYPES_MAX` types in a result, the largest, and the rest is one
  figure with the type `OTHER`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from holdfast import codec
from holdfast.clock import SYSTEM, Clock, S
from holdfast.codec import Record
from holdfast.errors import Conflict
from holdfast.store import row_sizes, schema
from holdfast.store.api import Store, Txn
from holdfast.store.schema import Space
from holdfast.workers.service import TickService
from holdfast.workers.space_kinds import Classified, Reference, RowKind, Types, classify_next

# Rows of one step, and the pause after it.
STEP_ROWS = 200
STEP_PAUSE_S = 0.5
# A walk begins this long after the start of its process, and `INTERVAL_NS` after the end of the last one. A walk that
# took longer is followed by a pause as long. Between walks the service looks every `IDLE_S` for a due one.
START_DELAY_S = 60.0
IDLE_S = 60.0
INTERVAL_NS = 600 * S
SAVE_EVERY_NS = 60 * S
ABANDONED_NS = 300 * S
# Types of a kind in a result, and figures that a walk counts apart.
TYPES_MAX = 50
FIGURES_MAX = 20_000
OTHER = "(other)"
PROGRESS_KEY = schema.key_prefix(Space.APP_STATE, "census", "progress")
RESULT_KEY = schema.key_prefix(Space.APP_STATE, "census", "result")


class SpaceFigure(Record, frozen=True):
    """Rows of one universe, kind and type, and the bytes of their keys and values."""

    universe: str
    kind: str
    type: str
    rows: int
    bytes: int


class SpaceCensus(Record, frozen=True):
    """A complete census."""

    started_ns: int
    ended_ns: int
    figures: tuple[SpaceFigure, ...]


class CensusProgress(Record, frozen=True):
    owner: str
    started_ns: int
    saved_ns: int
    # The first key that is not counted.
    cursor: bytes
    figures: tuple[SpaceFigure, ...]


def last_census(txn: Txn) -> SpaceCensus | None:
    row = txn.get(RESULT_KEY)
    return None if row is None else codec.unpack_as(SpaceCensus, row)


def progress(txn: Txn) -> CensusProgress | None:
    row = txn.get(PROGRESS_KEY)
    return None if row is None else codec.unpack_as(CensusProgress, row)


class CensusWalk:
    """One walk over the rows of a store."""

    def __init__(self, store: Store, begun: CensusProgress) -> None:
        self.owner = begun.owner
        self.started_ns = begun.started_ns
        self.saved_ns = begun.saved_ns
        self._cursor = begun.cursor
        self._store = store
        self._types = Types(store)
        self._totals: dict[tuple[str, str, str], list[int]] = {
            (one.universe, one.kind, one.type): [one.rows, one.bytes] for one in begun.figures
        }

    def run_step(self) -> bool:
        """Count the next rows. Returns whether more remain."""
        rows_max = STEP_ROWS
        rows = row_sizes.row_sizes(self._store, self._cursor, rows_max)
        counted: dict[RowKind, list[int]] = defaultdict(lambda: [0, 0])
        last, sums = Classified(RowKind("", ""), b""), [0, 0]
        for key, value_bytes in rows:
            if not last.prefix or not key.startswith(last.prefix):
                last = classify_next(key, last)
                sums = counted[last.kind]
            sums[0] += 1
            sums[1] += len(key) + value_bytes
        self._add(counted)
        if rows:
            self._cursor = rows[-1][0] + b"\x00"
        return len(rows) == rows_max

    def saved(self, now_ns: int) -> CensusProgress:
        self.saved_ns = now_ns
        return CensusProgress(self.owner, self.started_ns, now_ns, self._cursor, self._figures())

    def result(self, now_ns: int) -> SpaceCensus:
        return SpaceCensus(self.started_ns, now_ns, largest(self._figures()))

    def _add(self, counted: dict[RowKind, list[int]]) -> None:
        types = self._types.find(kind.type for kind in counted if isinstance(kind.type, Reference))
        for kind, (rows, size) in counted.items():
            type = types[kind.type] if isinstance(kind.type, Reference) else kind.type
            sums = self._sums(kind.universe, kind.kind, type)
            sums[0] += rows
            sums[1] += size

    def _sums(self, universe: str, kind: str, type: str) -> list[int]:
        totals = self._totals
        place = (universe, kind, type)
        if place not in totals and len(totals) >= FIGURES_MAX:
            place = (universe, kind, OTHER)
            if place not in totals and len(totals) >= 2 * FIGURES_MAX:
                place = (OTHER, kind, OTHER)
        return totals.setdefault(place, [0, 0])

    def _figures(self) -> tuple[SpaceFigure, ...]:
        return tuple(SpaceFigure(*place, *sums) for place, sums in sorted(self._totals.items()))


def largest(figures: Iterable[SpaceFigure]) -> tuple[SpaceFigure, ...]:
    """Keep the `TYPES_MAX` largest types of each kind, and add the rest to `OTHER`. Sorted by size."""
    groups: dict[tuple[str, str], list[SpaceFigure]] = defaultdict(list)
    for figure in figures:
        groups[figure.universe, figure.kind].append(figure)
    kept: list[SpaceFigure] = []
    for (universe, kind), group in groups.items():
        group.sort(key=lambda one: (one.type == OTHER, -one.bytes, one.type))
        named = [one for one in group[:TYPES_MAX] if one.type != OTHER]
        rest = group[len(named) :]
        kept += named
        if rest:
            rows, size = sum(one.rows for one in rest), sum(one.bytes for one in rest)
            kept.append(SpaceFigure(universe, kind, OTHER, rows, size))
    return tuple(sorted(kept, key=lambda one: (-one.bytes, one.universe, one.kind, one.type)))


def take_census(store: Store, owner: str) -> SpaceCensus:
    """Walk the store at full speed, also while another process walks, and store the result."""
    now_ns = store.now_ns()
    walk = CensusWalk(store, CensusProgress(owner, now_ns, now_ns, b"", ()))
    while walk.run_step():
        pass
    result = walk.result(store.now_ns())
    store.transact(lambda txn: txn.put(RESULT_KEY, codec.pack(result)))
    return result


# -- the service ---------------------------------------------------------------------------------


class CensusTaker(TickService):
    """Takes a census of the store at a low pace, in one process of the store at a time."""

    name = "census"

    def __init__(self, store: Store, owner: str, clock: Clock = SYSTEM) -> None:
        super().__init__(store, clock)
        self._owner = owner
        self._walk: CensusWalk | None = None
        # The first tick only waits: a short-lived process takes no census.
        self._waited = False

    @property
    def topics(self) -> Sequence[str]:
        return ()

    def sleep_s(self) -> float:
        if not self._waited:
            self._waited = True
            return START_DELAY_S
        return IDLE_S if self._walk is None else STEP_PAUSE_S

    def tick(self) -> bool:
        if not self._waited:
            return False
        if self._walk is None:
            begun = self.store.transact(_begin, self._owner)
            self._walk = None if begun is None else CensusWalk(self.store, begun)
            return False
        walk, now_ns = self._walk, self.store.now_ns()
        try:
            if not walk.run_step():
                self._walk = None
                self.store.transact(_finish, self._owner, walk.result(now_ns))
            elif now_ns >= walk.saved_ns + SAVE_EVERY_NS:
                self.store.transact(_save, self._owner, walk.saved(now_ns))
        except Conflict:
            # Another process continues the walk.
            self._walk = None
        return False

    def shut_down(self) -> None:
        if self._walk is not None:
            # Another process may continue at once.
            left = self._walk.saved(0)
            self._walk = None
            self.store.transact(_save, self._owner, left)


def _begin(txn: Txn, owner: str) -> CensusProgress | None:
    """Begin a walk, or continue an abandoned one. Return None if none is due."""
    under_way, last, now_ns = progress(txn), last_census(txn), txn.now_ns
    if under_way is not None:
        if now_ns < under_way.saved_ns + ABANDONED_NS and under_way.owner != owner:
            return None
        begun = CensusProgress(
            owner, under_way.started_ns, now_ns, under_way.cursor, under_way.figures
        )
    else:
        if last is not None:
            took_ns = last.ended_ns - last.started_ns
            if now_ns < last.ended_ns + max(INTERVAL_NS, took_ns):
                return None
        begun = CensusProgress(owner, now_ns, now_ns, b"", ())
    txn.put(PROGRESS_KEY, codec.pack(begun))
    return begun


def _save(txn: Txn, owner: str, saved: CensusProgress) -> None:
    _require_own(txn, owner)
    txn.put(PROGRESS_KEY, codec.pack(saved))


def _finish(txn: Txn, owner: str, result: SpaceCensus) -> None:
    _require_own(txn, owner)
    txn.delete(PROGRESS_KEY)
    txn.put(RESULT_KEY, codec.pack(result))


def _require_own(txn: Txn, owner: str) -> None:
    under_way = progress(txn)
    if under_way is None or under_way.owner != owner:
        raise Conflict(what="census", why="another process continues this walk")
