"""Which dead letters are redriven, how fast, and what is left when somebody stops it."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import codec
from holdfast import store as stores
from holdfast.app.runtime import Runtime
from holdfast.cli.redrive import Selection, drive, moment_ns
from holdfast.clock import S, SimClock
from holdfast.durable import queue
from holdfast.errors import Invalid
from holdfast.messages import Intent
from holdfast.roles.world_worker import WorldWorker
from holdfast.store.api import Store
from holdfast.world import catalog, publish
from tests.cli.conftest import TTL_NS, Run, pause_by
from tests.roles.shop import Buyer, Ordered, app

PAY = publish.effects("shop", "pay")
ERRORS = ["Connection refused", "Read timed out", "connection reset", "no such order"]


@pytest.fixture
def shop(path: Path) -> Iterator[Store]:
    """Four orders of ada and four of bob, all dead, in turn of four errors and two codes."""
    with stores.open(path) as store:
        runtime = Runtime(app, store, roles=())
        worker = WorldWorker(
            store, universe="shop", programs=app.programs, vocabulary=app, worker="A",
            incarnation="1",
        )  # fmt: skip
        for name in ("ada", "bob"):
            world = runtime.world(Buyer, name)
            world.send(Ordered(times=4))
            store.transact(catalog.assign, "shop", world.record().world_id, "A")
            while worker.tick():
                pass
        claims = store.transact(queue.claim, PAY, "pool", 8, TTL_NS)
        for claim in sorted(claims, key=lambda claim: claim.seq):
            code = "interrupted" if claim.seq % 2 else "error_status"
            store.transact(queue.bury, claim, code, ERRORS[(claim.seq - 1) % 4])
        yield store


def would(run: Run, path: Path, *options: object) -> list[int]:
    ran = run("effects", "redrive", "pay", *options, "--dry-run", "--store", path, "--json")
    seqs: list[int] = ran.document["would_redrive"]
    return seqs


@pytest.mark.parametrize(
    ("options", "seqs"),
    [
        (["--all"], [1, 2, 3, 4, 5, 6, 7, 8]),
        (["--code", "interrupted"], [1, 3, 5, 7]),
        (["--error", "connection"], [1, 3, 5, 7]),
        (["--error", "REFUSED"], [1, 5]),
        (["--error", "timed out", "--code", "interrupted"], []),
        (["--error", "timed out", "--code", "error_status"], [2, 6]),
        (["--world", "Buyer/ada"], [1, 2, 3, 4]),
        (["--world", "Buyer/bob", "--error", "reset"], [7]),
        (["--since", "1h"], [1, 2, 3, 4, 5, 6, 7, 8]),
        (["--until", "1h"], []),
        (["--since", "2999-01-01"], []),
        (["--until", "2999-01-01T00:00:00+02:00"], [1, 2, 3, 4, 5, 6, 7, 8]),
        (["--all", "--limit", "3"], [1, 2, 3]),
        (["--code", "interrupted", "--limit", "2"], [1, 3]),
        ([4, 2], [4, 2]),
    ],
    ids=str,
)
def test_letters_are_chosen_by_every_condition_that_is_given(
    run: Run, path: Path, shop: Store, options: list[object], seqs: list[int]
) -> None:
    assert would(run, path, *options) == seqs
    assert shop.read(queue.counts, PAY).dead == 8, "it was only asked"


@pytest.mark.parametrize(
    "options",
    [[], ["--rate", "5"], [1, "--code", "x"], [1, "--all"], [1, "--world", "Buyer/ada"]],
    ids=str,
)
def test_it_must_be_said_once_which(
    run: Run, path: Path, shop: Store, options: list[object]
) -> None:
    assert run("effects", "redrive", "pay", *options, "--store", path).code == 2
    assert run("dead", "redrive", PAY, *options, "--store", path).code == 2


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--all", "--rate", "0"], "invalid"),
        (["--all", "--rate", "nan"], "invalid"),
        (["--all", "--limit", "0"], "invalid"),
        (["--since", "yesterday"], "invalid"),
        (["--until", "2026-13-01"], "invalid"),
        (["--world", "Buyer/nobody"], "not_found"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(
    run: Run, path: Path, shop: Store, options: list[object], code: str
) -> None:
    ran = run("effects", "redrive", "pay", *options, "--store", path)
    assert ran.error.startswith(f"{code}: ")
    assert shop.read(queue.counts, PAY).dead == 8


def test_only_what_was_chosen_is_redriven(run: Run, path: Path, shop: Store) -> None:
    ran = run("effects", "redrive", "pay", "--error", "reset", "--store", path, "--json")
    assert [made["dead"] for made in ran.document["redriven"]] == [3, 7]
    assert ran.document["stopped"] is False
    assert [letter.seq for letter in shop.read(queue.dead, PAY)] == [1, 2, 4, 5, 6, 8]
    assert shop.read(queue.counts, PAY).ready == 2


def test_a_letter_of_a_deleted_world_stays_dead_and_stops_no_other(
    run: Run, path: Path, shop: Store
) -> None:
    Runtime(app, shop, roles=()).world(Buyer, "ada").delete()
    ran = run("effects", "redrive", "pay", "--all", "--store", path, "--json").document
    assert [made["dead"] for made in ran["redriven"]] == [5, 6, 7, 8]
    assert [one["dead"] for one in ran["refused"]] == [1, 2, 3, 4]
    assert shop.read(queue.counts, PAY).dead == 4


def test_letters_that_are_named_are_redriven_all_or_none(run: Run, path: Path, shop: Store) -> None:
    assert run("effects", "redrive", "pay", 1, 99, "--store", path).code == 1
    assert shop.read(queue.counts, PAY).dead == 8


def test_dead_lists_by_the_same_conditions(run: Run, path: Path, shop: Store) -> None:
    told = run("dead", "list", PAY, "--error", "timed out", "--store", path, "--json").document
    assert [letter["seq"] for letter in told["letters"]] == [2, 6]
    after = run(
        "dead", "list", PAY, "--code", "interrupted", "--after", 3, "--limit", 1, "--store", path
    ).out
    assert after.splitlines()[1].split()[0] == "5"
    assert "more with --after 5" in after


def test_dead_without_a_queue_says_which_have_letters(run: Run, path: Path, shop: Store) -> None:
    shop.transact(queue.post_dead, "mail", b"x", "bad", "bad")
    told = run("dead", "list", "--store", path, "--json").document["queues"]
    assert told == [{"queue": "mail", "dead": 1}, {"queue": PAY, "dead": 8}]
    assert run("dead", "list", "--store", path).out.splitlines()[2].split() == [PAY, "8"]


# -- pace and end --------------------------------------------------------------------------------


@pytest.fixture
def letters() -> Iterator[Store]:
    """Forty letters in the queue `mail`."""
    with stores.open("memory:", clock=SimClock()) as store:
        for n in range(40):
            store.transact(queue.post_dead, "mail", b"%d" % n, "bad", "bad")
        yield store


class Paced(SimClock):
    """Notes when it was asked to sleep, and for how long."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        super().sleep(seconds)


def arguments(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"seqs": [], "limit": None, "rate": 100.0, **given})


def again(store: Store) -> Any:
    return lambda seqs: store.transact(queue.redrive, "mail", seqs)


@pytest.mark.parametrize("rate", [0.5, 1.0, 7.0, 10.0, 35.0, 100.0])
def test_no_second_sees_more_than_the_rate(letters: Store, rate: float) -> None:
    clock, times = Paced(), []

    def noted(seqs: list[int]) -> list[int]:
        times.extend([clock.mono_ns()] * len(seqs))
        made: list[int] = again(letters)(seqs)
        return made

    driven = drive(letters, "mail", arguments(rate=rate), noted, selection=Selection(), clock=clock)
    assert len(driven.made) == 40
    most = max(sum(at <= other < at + S for other in times) for at in times)
    # A commit's handful may begin a second, and another end it.
    assert most <= max(1, rate) + max(1, rate // 10)
    assert (times[-1] - times[0]) / S == pytest.approx(39 / rate, rel=0.3)


def test_what_the_commit_took_is_part_of_the_pace(letters: Store) -> None:
    clock = Paced()

    def slowly(seqs: list[int]) -> list[int]:
        clock.advance(10 * S)
        made: list[int] = again(letters)(seqs)
        return made

    drive(letters, "mail", arguments(rate=1.0), slowly, selection=Selection(), clock=clock)
    assert clock.slept == []


def test_an_interrupt_during_the_wait_ends_it_and_the_rest_is_still_dead(letters: Store) -> None:
    class Interrupted(Paced):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if len(self.slept) == 3:
                signal.raise_signal(signal.SIGINT)

    first = drive(
        letters, "mail", arguments(rate=1.0), again(letters), selection=Selection(),
        clock=Interrupted(),
    )  # fmt: skip
    assert first.stopped
    assert [old for old, _ in first.made] == [1, 2, 3]
    assert letters.read(queue.counts, "mail").dead == 37
    rest = drive(letters, "mail", arguments(), again(letters), selection=Selection(), clock=Paced())
    assert [old for old, _ in rest.made] == list(range(4, 41))
    assert not rest.stopped


def test_an_interrupt_during_a_commit_lets_it_end(letters: Store) -> None:
    def interrupted(seqs: list[int]) -> list[int]:
        signal.raise_signal(signal.SIGINT)
        made: list[int] = again(letters)(seqs)
        return made

    driven = drive(
        letters, "mail", arguments(rate=20.0), interrupted, selection=Selection(), clock=Paced()
    )
    assert driven.stopped
    assert [old for old, _ in driven.made] == [1, 2]
    assert letters.read(queue.counts, "mail") == queue.Counts(ready=2, dead=38)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_dies_again_meanwhile_is_left_alone(letters: Store) -> None:
    def dies_again(seqs: list[int]) -> list[int]:
        made: list[int] = again(letters)(seqs)
        for claim in letters.transact(queue.claim, "mail", "worker", len(seqs), TTL_NS):
            letters.transact(queue.bury, claim, "bad", "again")
        return made

    driven = drive(letters, "mail", arguments(), dies_again, selection=Selection(), clock=Paced())
    assert [old for old, _ in driven.made] == list(range(1, 41))
    assert letters.read(queue.counts, "mail").dead == 40


def test_what_somebody_else_redrives_meanwhile_is_passed_over(letters: Store) -> None:
    def beaten(seqs: list[int]) -> list[int]:
        if 5 in seqs and letters.read(queue.dead, "mail", 4, 1)[0].seq == 5:
            letters.transact(queue.redrive, "mail", [5])
        made: list[int] = again(letters)(seqs)
        return made

    driven = drive(letters, "mail", arguments(), beaten, selection=Selection(), clock=Paced())
    assert [old for old, _ in driven.made] == [n for n in range(1, 41) if n != 5]
    assert driven.refused == []


def test_the_command_says_that_it_was_stopped(
    run: Run, path: Path, shop: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause_by(monkeypatch, lambda _: signal.raise_signal(signal.SIGINT))
    ran = run("effects", "redrive", "pay", "--all", "--rate", "1", "--store", path)
    assert ran.code == 130
    assert ran.out.splitlines()[-1].startswith("stopped: ")
    assert shop.read(queue.counts, PAY).dead == 7


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("0s", 1_000_000 * S),
        ("90s", (1_000_000 - 90) * S),
        ("2h", (1_000_000 - 7200) * S),
        ("7d", (1_000_000 - 7 * 86400) * S),
        ("9999999d", 0),
        ("1970-01-02", 86400 * S),
        ("1970-01-02 01:00", 90000 * S),
        ("1970-01-02T01:00:00+01:00", 86400 * S),
    ],
)
def test_a_time_is_so_long_ago_or_a_date(text: str, ns: int) -> None:
    assert moment_ns("--since", text, 1_000_000 * S) == ns


@pytest.mark.parametrize("text", ["", "soon", "2", "h2", "-2h", "2026-02-30", "2 h"])
def test_what_is_no_time_is_invalid(text: str) -> None:
    with pytest.raises(Invalid):
        moment_ns("--since", text, S)


def test_a_dropped_effect_is_pending_no_more(run: Run, path: Path, shop: Store) -> None:
    [letter] = shop.read(queue.dead, PAY, 4, 1)
    intent = codec.unpack_as(Intent, shop.read(queue.payload_of, letter))
    assert shop.read(publish.pending, "shop", intent.intent_hash).dead
    assert run("dead", "drop", PAY, letter.seq, "--store", path).code == 0
    assert shop.read(publish.pending, "shop", intent.intent_hash) is None
    assert letter.seq not in [one.seq for one in shop.read(queue.dead, PAY)]
