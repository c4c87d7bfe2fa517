"""Error groups: tasks, flows and dead letters that failed with the same normalised error, with their number.

    "eg" <kind> <group>                     the text of a group and the number of its subjects
    "em" <kind> <group> <at_ns> <subject>   the subjects of a group, by the time of their end
    "en" <kind>                             the number of groups
    "since"                                 ends before this time are not in groups: an older version wrote them

- A subject is in a group from its failure until it is redriven or removed. The same commit changes both.
- A subject is a number, or for a dead letter its queue without the universe, and its seq.
- A kind has at most `GROUPS_MAX` groups. Subjects with further errors are in the group `OTHER`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from holdfast import codec
from holdfast.codec import Record
from holdfast.durable.error_text import normalise
from holdfast.store import schema, tuples
from holdfast.store.api import Txn

TASK, FLOW, DEAD = KINDS = ("task", "flow", "dead")
GROUPS_MAX = 1_000
OTHER_TEXT = "(other errors)"


class ErrorGroupRow(Record, frozen=True):
    text: str
    count: int = 0


class GroupKeys:
    """The key spaces of the error groups of a universe."""

    def __init__(self, universe: str) -> None:
        def space(*path: tuples.Element) -> bytes:
            return schema.key_prefix(schema.Space.STATISTIC, universe, *path)

        self.groups = {kind: space("eg", kind) for kind in KINDS}
        self.members = {kind: space("em", kind) for kind in KINDS}
        self.numbers = {kind: space("en", kind) for kind in KINDS}
        self.since = space("since")


keys_of = lru_cache(maxsize=1024)(GroupKeys)
decode_group = codec.decoder(ErrorGroupRow).decode


class Member(NamedTuple):
    """A subject and the position of its row in the group."""

    position: bytes
    at_ns: int
    subject: tuple[tuples.Element, ...]


class GroupSummary(NamedTuple):
    kind: str
    group: str
    text: str
    size: int
    oldest: Member
    newest: Member


def group_text(code: str, error: str) -> str:
    """Return the normalised error of a subject: its first line, or its code."""
    return normalise(error.strip().partition("\n")[0] or code)


def group_id(text: str) -> bytes:
    return codec.digest(text.encode(errors="surrogatepass"))[:16]


OTHER = group_id(OTHER_TEXT)


def add(
    txn: Txn, universe: str, kind: str, text: str, at_ns: int, subject: tuple[tuples.Element, ...]
) -> None:
    """Put a subject into the group of its normalised error."""
    keys = keys_of(universe)
    if txn.get(keys.since) is None:
        txn.put(keys.since, schema.encode_int(at_ns))
    group = group_id(text)
    row = txn.get(_group_key(keys, kind, group))
    if row is None and txn.count(keys.numbers[kind]) >= GROUPS_MAX:
        text, group = OTHER_TEXT, OTHER
        row = txn.get(_group_key(keys, kind, group))
    stored = ErrorGroupRow(text) if row is None else decode_group(row)
    if row is None:
        txn.add(keys.numbers[kind], 1)
    txn.put(member_key(keys, kind, group, at_ns, subject), b"")
    txn.put(_group_key(keys, kind, group), codec.pack(ErrorGroupRow(text, stored.count + 1)))


def remove(
    txn: Txn, universe: str, kind: str, text: str, at_ns: int, subject: tuple[tuples.Element, ...]
) -> None:
    """Remove a subject from its group. A subject of an older version is in none."""
    keys = keys_of(universe)
    for group in (group_id(text), OTHER):
        key = member_key(keys, kind, group, at_ns, subject)
        if txn.get(key) is not None:
            txn.delete(key)
            _decrement(txn, keys, kind, group)
            return


def _decrement(txn: Txn, keys: GroupKeys, kind: str, group: bytes) -> None:
    key = _group_key(keys, kind, group)
    row = txn.get(key)
    if row is None:
        return
    stored = decode_group(row)
    if stored.count > 1:
        txn.put(key, codec.pack(ErrorGroupRow(stored.text, stored.count - 1)))
    else:
        txn.delete(key)
        txn.add(keys.numbers[kind], -1)


def since_ns(txn: Txn, universe: str) -> int | None:
    """The time from which subjects are in groups; None if no subject has failed since."""
    row = txn.get(keys_of(universe).since)
    return None if row is None else schema.decode_int(row)


# -- reads -----------------------------------------------------------------------------------------


def list_groups(txn: Txn, universe: str, kinds: tuple[str, ...] = KINDS) -> list[GroupSummary]:
    """Return the groups, the largest first. Their number is bounded."""
    keys = keys_of(universe)
    found: list[tuple[int, str, bytes, str]] = []
    for kind in kinds:
        prefix = keys.groups[kind]
        for key, row in txn.scan(prefix, tuples.prefix_end(prefix), GROUPS_MAX + 1):
            stored = decode_group(row)
            found.append((-stored.count, kind, _group_of(key), stored.text))
    found.sort()
    summaries = (
        _summary(txn, keys, kind, group, text, -minus) for minus, kind, group, text in found
    )
    return [summary for summary in summaries if summary is not None]


def find_group(txn: Txn, universe: str, kind: str, group: bytes) -> GroupSummary | None:
    keys = keys_of(universe)
    row = txn.get(_group_key(keys, kind, group))
    if row is None:
        return None
    stored = decode_group(row)
    return _summary(txn, keys, kind, group, stored.text, stored.count)


def list_members(
    txn: Txn, universe: str, kind: str, group: bytes, after: bytes, limit: int
) -> list[Member]:
    """Return subjects of a group, the oldest first, after a position."""
    prefix = keys_of(universe).members[kind] + tuples.pack((group,))
    rows = txn.scan(prefix + after + b"\x00" if after else prefix, tuples.prefix_end(prefix), limit)
    return [_member(prefix, key) for key, _ in rows]


def _summary(
    txn: Txn, keys: GroupKeys, kind: str, group: bytes, text: str, count: int
) -> GroupSummary | None:
    prefix = keys.members[kind] + tuples.pack((group,))
    first = txn.scan(prefix, tuples.prefix_end(prefix), 1)
    last = txn.scan(prefix, tuples.prefix_end(prefix), 1, True)
    if not first or not last:
        return None
    oldest, newest = _member(prefix, first[0][0]), _member(prefix, last[0][0])
    return GroupSummary(kind, group.hex(), text, count, oldest, newest)


def _member(prefix: bytes, key: bytes) -> Member:
    position = key[len(prefix) :]
    at_ns, *subject = tuples.unpack(position)
    assert isinstance(at_ns, int)
    return Member(position, at_ns, tuple(subject))


def _group_of(key: bytes) -> bytes:
    group = tuples.unpack(key)[-1]
    assert isinstance(group, bytes)
    return group


def _group_key(keys: GroupKeys, kind: str, group: bytes) -> bytes:
    return keys.groups[kind] + tuples.pack((group,))


def member_key(
    keys: GroupKeys, kind: str, group: bytes, at_ns: int, subject: tuple[tuples.Element, ...]
) -> bytes:
    return keys.members[kind] + tuples.pack((group, at_ns, *subject))
