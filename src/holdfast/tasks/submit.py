"""Submitting tasks: `TaskCreated`.

A batch is submitted whole or not at all, unless its tasks are of different callers: `submit_each` creates
or refuses each of those by itself. A task may have a key (a second one with the same key and arguments is
the first one, as long as that is kept), a limit (`rows.Limits`), a delay, and others that must complete
before it is begun.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from holdfast.codec import Record
from holdfast.config import (
    BLOB_THRESHOLD_BYTES,
    KEY_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    QUEUE_PRIORITY_MAX,
)
from holdfast.durable.bounds import check_limit, check_name, check_time, check_ttl
from holdfast.errors import Invalid, KeyConflict, KeyTooLarge, NotFound, ValueTooLarge, to_wire
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn, operation
from holdfast.store.schema import int_bytes
from holdfast.tasks import board, dependents
from holdfast.tasks.decision import Decision
from holdfast.tasks.records import Created, Dead, digest_of
from holdfast.tasks.rows import (
    FRESH,
    KINDS,
    Body,
    Keys,
    Spec,
    Status,
    keys_of,
    lane,
    missing,
    name_of,
    pack,
    pack_int,
    seq_of,
)
from holdfast.tasks.runs import run_row

AFTER_MAX = 1_000


class CyclicDependency(Invalid):
    code = "cyclic_dependency"
    hint = "a task cannot wait for itself, directly or through others"


class New(Record, frozen=True):
    """A task to be submitted. `after` names tasks by seq, or, below 0, others of the same batch:
    -1 is the first."""

    args: bytes
    delay_ns: int = 0
    key: str = ""
    limit: str = ""
    after: tuple[int, ...] = ()


@operation
def submit(txn: Txn, universe: str, spec: Spec, new: list[New]) -> list[int]:
    """Create tasks, all or none; their seqs. A key that is in use answers with its task."""
    return _create(txn, universe, [spec], [0] * len(new), new)


@operation
def submit_all(
    txn: Txn, universe: str, specs: list[Spec], spec_of_each: list[int], new: list[New]
) -> list[int]:
    """`submit` for tasks of different kinds."""
    _check_columns(specs, spec_of_each, new)
    return _create(txn, universe, specs, spec_of_each, new)


class Each(Record, frozen=True):
    """The answers to tasks of different callers: the seq of each, 0 for a refused one; and the refusals,
    each with the position of its task, its code and its fields."""

    seqs: list[int]
    refused: list[tuple[int, str, dict[str, Any]]]


@operation
def submit_each(
    txn: Txn, universe: str, specs: list[Spec], spec_of_each: list[int], new: list[New]
) -> Each:
    """`submit_all` for tasks of different callers: a refused task changes nothing for the others.

    They have neither keys nor dependencies: all refusals follow from the task itself, before anything is
    written.
    """
    _check_columns(specs, spec_of_each, new)
    keys = keys_of(universe)
    refused: dict[int, Invalid] = {}
    for index, (at, one) in enumerate(zip(spec_of_each, new, strict=True)):
        try:
            _form(keys, specs[at])
            if one.key or one.after:
                what = "key" if one.key else "after"
                raise Invalid(what=what, why="goes by itself, not with tasks of other callers")
            _check_one(keys, specs[at], one, index)
        except Invalid as error:
            refused[index] = error
    if not refused:
        return Each(_create(txn, universe, specs, spec_of_each, new), [])
    seqs = [0] * len(new)
    kept = [index for index in range(len(new)) if index not in refused]
    if kept:
        used = sorted({spec_of_each[index] for index in kept})
        place = {at: n for n, at in enumerate(used)}
        made = _create(
            txn,
            universe,
            [specs[at] for at in used],
            [place[spec_of_each[index]] for index in kept],
            [new[index] for index in kept],
        )
        for index, seq in zip(kept, made, strict=True):
            seqs[index] = seq
    return Each(seqs, [(index, *to_wire(error)) for index, error in refused.items()])


def _check_columns(specs: list[Spec], spec_of_each: list[int], new: list[New]) -> None:
    check_limit(len(new), "tasks")
    if len(spec_of_each) != len(new) or not set(spec_of_each) <= set(range(len(specs))):
        raise Invalid(what="tasks", why="each has one spec")


def _create(
    txn: Txn, universe: str, specs: list[Spec], spec_of_each: list[int], new: list[New]
) -> list[int]:
    check_limit(len(new), "tasks")
    decision = Decision(txn, universe)
    keys, now_ns, generation = decision.keys, decision.now_ns, txn.generation
    forms = [_form(keys, spec) for spec in specs]
    for index, (at, one) in enumerate(zip(spec_of_each, new, strict=True)):
        _check_one(keys, specs[at], one, index)
    put, bodies = txn.put, keys.bodies
    for form in forms:
        if txn.get(form.key) is None:
            put(form.key, form.row)
    names = [form.name for form in forms]
    # The usual task is ready at once: its queue, its priority, and nothing else to look at.
    lanes = [form.lane for form in forms]
    seq = txn.count(keys.seq)
    seqs: list[int] = []
    created: list[int] = []
    rows: list[bytes] = []
    stillborn: list[tuple[int, Spec]] = []
    plain = [0] * len(specs)
    # The run that is being made: its spec, its first and its last.
    run_at, first, end = 0, 0, -1
    for at, one in zip(spec_of_each, new, strict=True):
        args, blob = one.args, b""
        if len(args) > BLOB_THRESHOLD_BYTES:
            args, blob = b"", blobs.put(txn, args)
        if not (one.key or one.limit or one.after or one.delay_ns or blob):
            seq += 1
            packed_seq = pack_int(seq)
            row = pack(Body(names[at], args, now_ns, generation))
            put(bodies + packed_seq, row)
            if seq != end + 1 or at != run_at:
                if first:
                    put(lanes[run_at] + pack_int(first), run_row(first, end))
                run_at, first = at, seq
            end = seq
            plain[at] += 1
            created.append(seq)
            rows.append(row)
            seqs.append(seq)
            continue
        if first:
            # It may wait for one of them, which leaves the run then.
            put(lanes[run_at] + pack_int(first), run_row(first, end))
            first, end = 0, -1
        spec = specs[at]
        found = _keyed(decision, one, names[at], spec)
        if found:
            if blob:
                blobs.release.fn(txn, blob)
            seqs.append(found)
            continue
        seq += 1
        packed_seq = pack_int(seq)
        named = (after if after > 0 else seqs[-after - 1] for after in one.after)
        others = tuple(dict.fromkeys(named))
        _check_known(decision, seq, others)
        body = Body(
            names[at],
            args,
            now_ns,
            generation,
            now_ns + one.delay_ns if one.delay_ns else 0,
            one.key,
            one.limit,
            others,
            0,
            blob,
        )
        row = pack(body)
        put(bodies + packed_seq, row)
        if one.key:
            put(keys.keys + tuples.pack((spec.name, one.key)), packed_seq)
        waits = dependents.block(decision, packed_seq, others)
        status = FRESH if not waits else Status(waits=waits)
        if waits:
            decision.write(packed_seq, status)
        if waits is None:
            stillborn.append((seq, spec))
            decision.write(packed_seq, board.buried(FRESH, dependents.DEPENDENCY_FAILED, now_ns))
        else:
            decision.enter(packed_seq, body, spec, status)
        created.append(seq)
        rows.append(row)
        seqs.append(seq)
    if first:
        put(lanes[run_at] + pack_int(first), run_row(first, end))
    for spec, count in zip(specs, plain, strict=True):
        if count:
            decision.tally.add(spec.queue, "ready", count)
            decision.wake(spec.queue)
    if created:
        put(keys.seq, int_bytes(seq))
        decision.log.say(Created(created, digest_of(rows)))
    for dead, spec in stillborn:
        decision.log.say(Dead([dead], dependents.DEPENDENCY_FAILED))
        decision.ended(dead, spec, "dead", awaited=False)
    decision.close()
    return seqs


@lru_cache(1024)
def check_spec(spec: Spec) -> None:
    check_name("task", spec.name)
    check_name("queue", spec.queue)
    check_ttl(spec.lease_ns)
    check_ttl(spec.window_ns)
    check_time("retain_ns", spec.retain_ns)
    check_time("backoff_ns", spec.backoff_ns)
    check_time("backoff_ns_max", spec.backoff_ns_max)
    for what in ("attempts", "expiries_max"):
        if not 1 <= getattr(spec, what) <= 1_000_000:
            raise Invalid(what=what, found=getattr(spec, what), min=1, max=1_000_000)
    if spec.kind not in KINDS:
        raise Invalid(what="kind", found=spec.kind, expected=list(KINDS))
    if not -QUEUE_PRIORITY_MAX <= spec.priority <= QUEUE_PRIORITY_MAX:
        raise Invalid(what="priority", found=spec.priority, max=QUEUE_PRIORITY_MAX)


def _check_one(keys: Keys, spec: Spec, one: New, index: int) -> None:
    """Refuse a task that cannot be stored, without looking at any row.

    Tasks of a batch wait for earlier ones of it only, so there is no cycle.
    """
    if len(one.args) > MESSAGE_BYTES_MAX:
        raise ValueTooLarge(what="arguments", bytes=len(one.args), bytes_max=MESSAGE_BYTES_MAX)
    if one.after:
        if len(one.after) > AFTER_MAX:
            raise Invalid(what="after", why="too many", found=len(one.after), max=AFTER_MAX)
        for after in one.after:
            if after == 0:
                raise Invalid(what="after", why="seqs start at 1, those of the batch at -1")
            if after < 0 and -after - 1 >= index:
                raise CyclicDependency(task=index, waits_for=-after - 1)
    if one.delay_ns:
        check_time("delay_ns", one.delay_ns)
    if one.key:
        check_name("key", one.key)
    if one.limit:
        check_name("limit_key", one.limit)
    if one.limit or one.key:
        _check_keys(keys, spec, one.limit, one.key)


class _Form(NamedTuple):
    """What all tasks of a spec have in common: the spec's name and row, and where its tasks wait."""

    name: bytes
    key: bytes
    row: bytes
    lane: bytes


@lru_cache(1024)
def _form(keys: Keys, spec: Spec) -> _Form:
    check_spec(spec)
    _check_keys(keys, spec)
    name = name_of(spec)
    ready = keys.ready + lane(spec.queue, spec.kind, spec.priority)
    return _Form(name, keys.specs + tuples.pack((name,)), pack(spec), ready)


def _check_keys(keys: Keys, spec: Spec, limit: str = "", key: str = "") -> None:
    """Whether every row that the task may ever need has a key that can be stored: each name is within
    its bounds, but a key holds several of them."""
    longest = max(
        len(keys.parked) + len(tuples.pack((spec.queue, limit, spec.queue))),
        len(keys.strays) + len(tuples.pack((spec.queue, spec.name, spec.queue))),
        len(keys.keys) + len(tuples.pack((spec.name, key))),
    )
    if longest + _NUMBERS_BYTES > KEY_BYTES_MAX:
        raise KeyTooLarge(
            what="task", name=spec.name, bytes=longest + _NUMBERS_BYTES, bytes_max=KEY_BYTES_MAX
        )


# A kind, a priority and a seq, at their longest.
_NUMBERS_BYTES = 27


def _check_known(decision: Decision, seq: int, others: tuple[int, ...]) -> None:
    for other in others:
        if other == seq:
            raise CyclicDependency(task=seq, waits_for=other)
        if decision.body(pack_int(other)) is None:
            raise NotFound(what="task", why="after= names no task", task=other)


def _keyed(decision: Decision, one: New, name: bytes, spec: Spec) -> int:
    """The task that has this key, if one has; another body than its own is a conflict."""
    if not one.key:
        return 0
    found = decision.txn.get(decision.keys.keys + tuples.pack((spec.name, one.key)))
    if found is None:
        return 0
    body = decision.body(found)
    if body is None:
        raise missing(found)
    args = blobs.get(decision.txn, body.blob) if body.blob else body.args
    if args != one.args:
        raise KeyConflict(what="task", name=spec.name, key=one.key, task=seq_of(found))
    return seq_of(found)
