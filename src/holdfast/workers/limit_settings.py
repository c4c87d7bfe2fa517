"""Settings of load limits: the operation that changes them, the `[limits]` table of `holdfast.toml`, and figures.

    [limits]                        # every universe of this file
    inbox = 10_000
    tasks = 1_000_000
    queues = { mail = 50_000 }
    effect_kinds = { "http.request" = 5_000 }

    [limits.universes.billing]      # this universe, in place of the table above
    tasks = 10_000

`change_limits` counts what a limit needs in its own commit, once: the work that exists when the limit is set. Later
commits maintain the counters.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from holdfast import codec
from holdfast.config import CONFIG_FILE, CONFIG_VARIABLE
from holdfast.durable import item, load_limits
from holdfast.durable.load_limits import COUNTED, EFFECTS, NO_LIMITS, TASKS, LoadLimits
from holdfast.durable.validation import check_name
from holdfast.errors import Invalid
from holdfast.store import schema
from holdfast.store.api import Txn, operation
from holdfast.store.prefix_scan import iter_names
from holdfast.tasks.model import get_counts, keys_of
from holdfast.tasks.queries import list_queues
from holdfast.world import timers

LIMIT_MAX = 1 << 50
# The limits with one value, and the limits with a value for each name.
SINGLE = (
    "tasks", "effects", "timers", "inbox", "flow_inbox", "bytes_in_flight", "worlds_per_worker",
)  # fmt: skip
NAMED = {"queue": "queues", "effect_kind": "effect_kinds"}


class BadLimits(Invalid):
    code = "bad_limits"
    hint = "docs/limits.md has the names of the limits; a limit is a whole number, and 0 removes it"


class LimitFigure(NamedTuple):
    """A limit and its present figure. `used` is None for a limit of each world, flow or worker."""

    name: str
    limit: int
    used: int | None


@operation("limits.change")
def change_limits(
    txn: Txn, universe: str, changes: dict[str, int], declared: bytes = b""
) -> LoadLimits:
    """Change limits by name (`tasks`, `queue:mail`, …); 0 removes one. `declared` is the digest of a declaration, which
    replaces all limits."""
    before = load_limits.find(txn, universe)
    if declared and before is not None and before.declared == declared:
        return before
    base = before or NO_LIMITS
    after = _changed(NO_LIMITS if declared else base, changes)
    after = replace(after, declared=declared or base.declared)
    after = replace(after, bytes_since_ns=_bytes_since_ns(txn, base, after))
    for name in COUNTED:
        was, now = getattr(base, name), getattr(after, name)
        if now and not was:
            count = _count(txn, universe, name)
            txn.put(load_limits.counter_key(universe, name), schema.encode_int(count))
        elif was and not now:
            txn.delete(load_limits.counter_key(universe, name))
    if after == NO_LIMITS:
        txn.delete(load_limits.limits_key(universe))
    else:
        txn.put(load_limits.limits_key(universe), codec.pack(after))
    return after


def _changed(limits: LoadLimits, changes: Mapping[str, int]) -> LoadLimits:
    fields: dict[str, Any] = {}
    for name, value in changes.items():
        if type(value) is not int or not 0 <= value <= LIMIT_MAX:
            raise BadLimits(limit=name[:64], found=repr(value)[:64], min=0, max=LIMIT_MAX)
        group, colon, key = name.partition(":")
        if name in SINGLE:
            fields[name] = value
        elif colon and group in NAMED:
            check_name(group, key)
            field = NAMED[group]
            values = dict(fields.get(field, getattr(limits, field)))
            values[key] = value
            fields[field] = {key: one for key, one in values.items() if one}
        else:
            expected = [*SINGLE, *(f"{group}:NAME" for group in NAMED)]
            raise BadLimits(limit=name[:64], expected=expected)
    return replace(limits, **fields)


def _bytes_since_ns(txn: Txn, before: LoadLimits, after: LoadLimits) -> int:
    if not after.bytes_in_flight:
        return 0
    return before.bytes_since_ns if before.bytes_in_flight else max(txn.now_ns, 1)


def _count(txn: Txn, universe: str, name: str) -> int:
    """Count the existing work for a counter that a limit starts."""
    if name == TASKS:
        return sum(row.counts.waiting for row in list_queues(txn, universe))
    if name == EFFECTS:
        prefix = f"{universe}/effects/"
        queues = iter_names(txn, (int(schema.Space.QUEUE),))
        keys = [item.keys_of(queue) for queue in queues if queue.startswith(prefix)]
        return sum(item.counts_of(txn, one).open for one in keys)
    # Only bytes that are accepted from now on count.
    return 0


# -- figures ---------------------------------------------------------------------------------------


def list_figures(txn: Txn, universe: str) -> list[LimitFigure]:
    """Return the limits that are set, with their present figures."""
    limits = load_limits.find(txn, universe)
    found: list[LimitFigure] = []
    if limits is None:
        return found
    for name in SINGLE:
        limit = getattr(limits, name)
        used = None
        if name in COUNTED and limit:
            used = load_limits.counted(txn, universe, name)
        elif name == "timers":
            names = (timers.delay_queue(universe), timers.calendar_queue(universe))
            used = sum(item.counts_of(txn, item.keys_of(one)).open for one in names)
        if limit:
            found.append(LimitFigure(name, limit, used))
    for queue, limit in sorted(limits.queues.items()):
        waiting = get_counts(txn, keys_of(universe), queue).waiting
        found.append(LimitFigure(f"queue:{queue}", limit, waiting))
    for kind, limit in sorted(limits.effect_kinds.items()):
        counts = item.counts_of(txn, item.keys_of(f"{universe}/effects/{kind}"))
        found.append(LimitFigure(f"effect_kind:{kind}", limit, counts.open))
    return found


# -- the file --------------------------------------------------------------------------------------


class Declaration(NamedTuple):
    """The limits that a file declares for a universe, and their digest."""

    changes: dict[str, int]
    digest: bytes


def load_declared(universe: str) -> Declaration | None:
    """Read `[limits]` from the file of `HOLDFAST_CONFIG`, or `holdfast.toml`; None without the table."""
    named = os.environ.get(CONFIG_VARIABLE)
    path = Path(named or CONFIG_FILE)
    if not named and not path.is_file():
        return None
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadLimits(file=str(path), why=error.strerror or str(error)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadLimits(file=str(path), why=str(error)) from None
    table = document.get("limits")
    return None if table is None else parse_declared(table, universe, str(path))


def parse_declared(table: Any, universe: str, path: str) -> Declaration:
    """Parse the `[limits]` table for a universe."""
    universes = table.get("universes", {}) if isinstance(table, dict) else None
    if not isinstance(universes, dict):
        raise BadLimits(file=path, why="[limits] and [limits.universes] are tables")
    own = universes.get(universe)
    if own is None:
        own = {name: value for name, value in table.items() if name != "universes"}
    if not isinstance(own, dict):
        raise BadLimits(file=path, universe=universe, why="the limits of a universe are a table")
    changes: dict[str, int] = {}
    groups = {field: group for group, field in NAMED.items()}
    for name, value in own.items():
        if name in groups:
            if not isinstance(value, dict):
                raise BadLimits(file=path, limit=name, why="expected a table of names and numbers")
            changes |= {f"{groups[name]}:{key}": one for key, one in value.items()}
        else:
            changes[name] = value
    _changed(NO_LIMITS, changes)
    return Declaration(changes, codec.digest(codec.pack(sorted(changes.items()))))
