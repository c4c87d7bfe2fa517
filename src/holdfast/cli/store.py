"""`holdfast store info`: what a store is and what its queues hold. Nothing is scanned for it.

`holdfast store copy` is in `store_copy`, `holdfast store restored` in `store_restored`, `holdfast store
rebuild` in `store_rebuild`.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from typing import NamedTuple

from holdfast import codec
from holdfast.cli import store_copy, store_rebuild, store_restored
from holdfast.cli.output import bytes_text, emit, fields, table, time_text
from holdfast.cli.target import add_options, directory_of, existing, is_embedded, url_of
from holdfast.config import OUTCOMES_KEPT
from holdfast.durable import queue
from holdfast.durable.queue import Counts
from holdfast.store import schema, tuples
from holdfast.store.api import Store, Txn

QUEUES_MAX = 100


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    info = actions.add_parser("info", help="url, generation, commits, size, queues")
    add_options(info, universe=True)
    store_copy.configure(actions.add_parser("copy", help="move a store to another place, whole"))
    store_restored.configure(actions.add_parser("restored", help=store_restored.HELP))
    store_rebuild.configure(actions.add_parser("rebuild", help=store_rebuild.HELP))


def run(args: argparse.Namespace) -> int:
    if args.action == "copy":
        return store_copy.run(args)
    if args.action == "restored":
        return store_restored.run(args)
    if args.action == "rebuild":
        return store_rebuild.run(args)
    with existing(args) as store:
        size = size_of(store, url_of(args))
        queues = store.read(queue_counts, QUEUES_MAX + 1)
        now_ns = store.now_ns()
        document = {
            "url": store.url,
            "generation": store.generation,
            "commit_no": size.commit_no,
            "now_ns": now_ns,
            "bytes": size.bytes,
            "disk_bytes": size.disk_bytes,
            "queues": [
                {"queue": name}
                | {state: getattr(counts, state) for state in counts.__struct_fields__}
                for name, counts in queues[:QUEUES_MAX]
            ],
            "more_queues": len(queues) > QUEUES_MAX,
        }
        text = fields(
            [
                ("url", store.url),
                ("generation", str(store.generation)),
                ("commits", size.commit_no),
                ("store time", f"{time_text(now_ns)} UTC"),
                ("size", f"{bytes_text(size.bytes)} ({bytes_text(size.disk_bytes)} on disk)"),
            ]
        )
        if queues:
            rows = [
                (name, it.ready, it.delayed, it.claimed, it.dead, it.done)
                for name, it in queues[:QUEUES_MAX]
            ]
            header = ("queue", "ready", "delayed", "claimed", "dead", "done")
            text += "\n\n" + table(header, rows)
            text += "\n…" if len(queues) > QUEUES_MAX else ""
        emit(args, document, text)
    return 0


class Size(NamedTuple):
    commit_no: int
    bytes: int
    disk_bytes: int


def size_of(store: Store, url: str) -> Size:
    if not is_embedded(url):
        from holdfast.store.postgres import PostgresStore

        assert isinstance(store, PostgresStore)
        commit_no, bytes = store.size()
        return Size(commit_no, bytes, bytes)
    file = (directory_of(url) / "data.mdb").stat()
    return Size(store.read(last_commit_no), file.st_size, file.st_blocks * 512)


def last_commit_no(txn: Txn) -> int:
    """The number of the last commit, from the ring of outcomes: slots that go on from slot 0."""

    def commit_in(slot: int) -> int:
        row = txn.get(schema.OUTCOME + tuples.pack_int(slot))
        return -1 if row is None else int(codec.unpack(row)[0])

    first = max(commit_in(0), 0)
    past = bisect_left(
        range(1, OUTCOMES_KEPT), True, key=lambda slot: commit_in(slot) != first + slot
    )
    return first + past


def queue_counts(txn: Txn, limit: int) -> list[tuple[str, Counts]]:
    """The queues by name. One seek a queue: the next one begins after all rows of the last."""
    found: list[tuple[str, Counts]] = []
    at, end = schema.prefix(schema.Space.QUEUE), tuples.after(schema.prefix(schema.Space.QUEUE))
    while len(found) < limit and (rows := txn.scan(at, end, 1)):
        name = str(tuples.unpack(rows[0][0])[1])
        found.append((name, queue.counts(txn, name)))
        at = tuples.after(schema.prefix(schema.Space.QUEUE, name))
    return found
