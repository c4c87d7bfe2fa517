"""`python -m bench digest`: the cost of the state digest in the message benchmark.

    python -m bench digest [--rounds 15]

One client, one worker and one writer on an embedded store with fsync. Rounds alternate: with the digest, and with a
worker that neither encodes, decodes nor hashes the state of a cycle. A round is `send_many` to 100 worlds, then the same
number of messages to one world. The table has the medians and the ratio of the rates. Below 1 the digest costs time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from bench.peers.holdfast_turn import spawn
from bench.peers.workload import BATCH, KEYS, Amount
from bench.place import ROOT, Place, new_directory

ROUNDS = 15
WAYS = ("batch", "hot")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench digest", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N")
    parser.add_argument(
        "--dir", type=Path, default=ROOT, help="parent of the temporary directory (build)"
    )
    args = parser.parse_args(argv)
    with new_directory(args.dir) as directory:
        rates = measure(directory, args.rounds)
    print("messages/s  without   with      ratio (least … greatest of a pair)")
    for way in WAYS:
        without, with_it = rates[False, way], rates[True, way]
        pairs = sorted(a / b for a, b in zip(with_it, without, strict=True))
        medians = (statistics.median(without), statistics.median(with_it))
        print(
            f"{way:10}  {medians[0]:8,.0f}  {medians[1]:8,.0f}  "
            f"{statistics.median(pairs):.3f} ({pairs[0]:.3f} … {pairs[-1]:.3f})"
        )
    return 0


def measure(directory: Path, rounds: int) -> dict[tuple[bool, str], list[float]]:
    amount = Amount()
    rates_of: dict[tuple[bool, str], list[float]] = {
        (on, way): [] for on in (False, True) for way in WAYS
    }
    with (
        Place(directory).store("digest") as path,
        spawn("client", path=str(path)) as client,
        spawn("worker", path=str(path), name="worker-1", policy={}) as worker,
    ):
        names = client.ask("worlds", count=KEYS)["names"]
        for at in range(rounds + 1):
            # The order alternates, so that each variant comes first equally often.
            for on in (at % 2 == 0, at % 2 == 1):
                worker.ask("digest", on=on)
                rates = {
                    "batch": client.ask("batch", names=names, per_key=amount.per_key, size=BATCH),
                    "hot": client.ask("batch", names=names[:1], per_key=amount.hot, size=BATCH),
                }
                worker.ask("hosted")
                if at:  # the first round is a warm-up
                    for way in WAYS:
                        rates_of[on, way].append(rates[way]["rate"])
    return rates_of
