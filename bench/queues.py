"""Metrics of queue and journal, through the writer process, with the operations of the public API."""

from __future__ import annotations

from itertools import count

from bench.place import Place
from bench.record import Record, Sample, Target, against_raw, gather
from bench.workers import Worker, WorkerGroup

RATED = {
    "rate": "items/s",
    "raw": "fdatasync/s",
    "ratio": "× raw",
    "p99_ms": "ms",
    "client_us": "µs",
    "writer_us": "µs",
}
CONTENDERS = 8
CONTENDER_BATCH = 50
CHURN_BATCH = 100
JOURNAL_BATCH = 256


def contended_queue(place: Place) -> Record:
    """All processes empty one queue. An empty queue is filled again under a new name."""
    names = (f"contended-{n}" for n in count())

    def run() -> Sample:
        name = next(names)
        _fill(filler, name, place.sizes.claimer_items)
        answers = group.go(queue=name)
        taken = sum(answer["count"] for answer in answers)
        assert taken == place.sizes.claimer_items, f"{taken} items were acknowledged"
        seconds = max(a["ended"] for a in answers) - min(a["began"] for a in answers)
        shares = [answer["count"] for answer in answers]
        return {"rate": taken / seconds, "least_share": min(shares) * len(shares) / taken}

    with (
        place.store("contended") as path,
        WorkerGroup("loader", 1, path) as fillers,
        WorkerGroup("claimers", CONTENDERS, path, batch=CONTENDER_BATCH) as group,
    ):
        [filler] = fillers.members
        samples = against_raw(place, run)
    units = {name: RATED[name] for name in ("rate", "raw", "ratio")}
    return Record(
        "contended_queue",
        f"{CONTENDERS} processes claim and acknowledge batches of {CONTENDER_BATCH} from one queue",
        gather(samples, {**units, "least_share": "× fair share"}),
        (Target("rate", at_least=10_000),),
        {"processes": CONTENDERS, "items": place.sizes.claimer_items},
    )


def queue_churn(place: Place) -> Record:
    callers = place.sizes.churn_callers
    with (
        place.store("churn") as path,
        WorkerGroup("churn", 1, path, callers=callers, batch=CHURN_BATCH) as group,
    ):
        samples = against_raw(place, lambda: group.rated(queue="churn", seconds=place.slice_s))
    return Record(
        "queue_churn",
        f"put → claim → ack in batches of {CHURN_BATCH}, {callers} threads of one process",
        gather(samples, RATED),
        (Target("rate", at_least=25_000),),
        {"callers": callers},
    )


def journal_appends(place: Place) -> Record:
    callers = place.sizes.journal_callers
    with (
        place.store("journal") as path,
        WorkerGroup("appends", 1, path, callers=callers, batch=JOURNAL_BATCH) as group,
    ):
        samples = against_raw(place, lambda: group.rated(seconds=place.slice_s))
    return Record(
        "journal_appends",
        f"journal entries, {JOURNAL_BATCH} a transaction, {callers} threads of one process",
        gather(samples, {**RATED, "rate": "entries/s"}),
        (Target("rate", at_least=60_000),),
        {"callers": callers},
    )


def backlog(place: Place) -> Record:
    """Put, claim and acknowledge on a long and on a short queue of one store, in turn."""
    small, large = place.sizes.backlog_small, place.sizes.backlog_large
    samples = []
    with (
        place.store("backlog") as path,
        WorkerGroup("loader", 1, path) as fillers,
        WorkerGroup("churn", 1, path, callers=1, batch=CHURN_BATCH) as group,
    ):
        [filler] = fillers.members
        _fill(filler, "short", small)
        loaded_s = _fill(filler, "long", large)
        for _ in range(place.repeats):
            [short] = group.go(queue="short", seconds=place.slice_s)
            [long] = group.go(queue="long", seconds=place.slice_s)
            samples.append(
                {
                    "cost": short["rate"] / long["rate"],
                    "rate_long": long["rate"],
                    "rate_short": short["rate"],
                }
            )
    return Record(
        "backlog",
        f"cost of a queue item at a backlog of {large:,} against {small:,}",
        gather(samples, {"cost": "×", "rate_long": "items/s", "rate_short": "items/s"}),
        (Target("cost", below=1.3),),
        {"loaded_per_s": round(large / loaded_s)},
    )


def _fill(filler: Worker, name: str, items: int) -> float:
    filler.go(queue=name, items=items)
    seconds: float = filler.answer()["seconds"]
    return seconds
