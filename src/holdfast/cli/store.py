"""`holdfast store info`: shows the properties of a store and its queue counts, without a scan.

`holdfast store copy` is in `store_copy`, `holdfast store restored` in `store_restored`, `holdfast store
rebuild` in `store_rebuild`, `holdfast store usage` in `store_usage`.
"""

from __future__ import annotations

import argparse

from holdfast.cli import store_copy, store_rebuild, store_restored, store_usage
from holdfast.cli.output import bytes_text, emit, field_lines, table, time_text
from holdfast.cli.store_option import UNIVERSE_OF_STORE, add_options, open_existing
from holdfast.durable import queue
from holdfast.durable.queue import QueueCounts
from holdfast.ops.store_size import store_size
from holdfast.store import schema, tuples
from holdfast.store.api import Txn

QUEUES_MAX = 100


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    info = actions.add_parser("info", help="show URL, generation, commits, size and queues")
    add_options(info, universe=UNIVERSE_OF_STORE)
    store_usage.configure(actions.add_parser("usage", help=store_usage.HELP))
    store_copy.configure(actions.add_parser("copy", help="move or copy a whole store"))
    store_restored.configure(actions.add_parser("restored", help=store_restored.HELP))
    store_rebuild.configure(actions.add_parser("rebuild", help=store_rebuild.HELP))


def run(args: argparse.Namespace) -> int:
    if args.action == "usage":
        return store_usage.run(args)
    if args.action == "copy":
        return store_copy.run(args)
    if args.action == "restored":
        return store_restored.run(args)
    if args.action == "rebuild":
        return store_rebuild.run(args)
    with open_existing(args) as store:
        size = store_size(store)
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
        text = field_lines(
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
                (
                    name,
                    queue_state.ready,
                    queue_state.delayed,
                    queue_state.claimed,
                    queue_state.dead,
                    queue_state.done,
                )
                for name, queue_state in queues[:QUEUES_MAX]
            ]
            header = ("queue", "ready", "delayed", "claimed", "dead", "done")
            text += "\n\n" + table(header, rows)
            text += "\n…" if len(queues) > QUEUES_MAX else ""
        emit(args, document, text)
    return 0


def queue_counts(txn: Txn, limit: int) -> list[tuple[str, QueueCounts]]:
    """Return the queues by name, with one seek per queue: each seek starts after the last queue's rows."""
    counts_by_queue: list[tuple[str, QueueCounts]] = []
    at, end = (
        schema.key_prefix(schema.Space.QUEUE),
        tuples.prefix_end(schema.key_prefix(schema.Space.QUEUE)),
    )
    while len(counts_by_queue) < limit and (rows := txn.scan(at, end, 1)):
        name = str(tuples.unpack(rows[0][0])[1])
        counts_by_queue.append((name, queue.counts(txn, name)))
        at = tuples.prefix_end(schema.key_prefix(schema.Space.QUEUE, name))
    return counts_by_queue
