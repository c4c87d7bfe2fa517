"""Redrive of dead letters: selection, rate limit, and interruption."""

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
from holdfast.cli.dead_letter_selection import (
    PAGE,
    LetterSelection,
    parse_time_ns,
    redrive_selected,
)
from holdfast.clock import S, SimClock
from holdfast.durable import queue
from holdfast.errors import Invalid
from holdfast.messages import Intent
from holdfast.store.api import Store
from holdfast.workers.world.worker import WorldWorker
from holdfast.world import catalog, intents
from tests.cli.conftest import TTL_NS, RunCommand, replace_rate_limit_sleep
from tests.workers.shop import Buyer, GoodsOrdered, app

PAY = intents.effect_queue("shop", "pay")
ERRORS = ["Connection refused", "Read timed out", "connection reset", "no such order"]


@pytest.fixture
def shop(path: Path) -> Iterator[Store]:
    """Four effects of ada and four of bob, all dead, with four errors and two codes in rotation."""
    with stores.open(path) as store:
        runtime = Runtime(app, store, roles=())
        worker = WorldWorker(
            store, universe="shop", programs=app.programs, vocabulary=app, worker="A",
            incarnation="1",
        )  # fmt: skip
        for name in ("ada", "bob"):
            world = runtime.world(Buyer, name)
            world.send(GoodsOrdered(times=4))
            store.transact(catalog.assign, "shop", world.record().world_id, "A")
            while worker.tick():
                pass
        claims = store.transact(queue.claim, PAY, "pool", 8, TTL_NS)
        for claim in sorted(claims, key=lambda claim: claim.seq):
            code = "interrupted" if claim.seq % 2 else "error_status"
            store.transact(queue.dead_letter, claim, code, ERRORS[(claim.seq - 1) % 4])
        yield store


def dry_run_seqs(run: RunCommand, path: Path, *options: object) -> list[int]:
    result = run("effects", "redrive", "pay", *options, "--dry-run", "--store", path, "--json")
    seqs: list[int] = result.document["would_redrive"]
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
        ([4, 2, "--limit", "1"], [4]),
    ],
    ids=str,
)
def test_redrive_dry_run_selects_letters_by_all_conditions(
    run: RunCommand, path: Path, shop: Store, options: list[object], seqs: list[int]
) -> None:
    assert dry_run_seqs(run, path, *options) == seqs
    assert shop.read(queue.counts, PAY).dead == 8, "a dry run changed the queue"


@pytest.mark.parametrize(
    "options",
    [[], ["--rate", "5"], [1, "--code", "x"], [1, "--all"], [1, "--world", "Buyer/ada"]],
    ids=str,
)
def test_redrive_without_exactly_one_selection_exits_with_2(
    run: RunCommand, path: Path, shop: Store, options: list[object]
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
def test_redrive_with_invalid_options_is_refused(
    run: RunCommand, path: Path, shop: Store, options: list[object], code: str
) -> None:
    result = run("effects", "redrive", "pay", *options, "--store", path)
    assert result.error.startswith(f"{code}: ")
    assert shop.read(queue.counts, PAY).dead == 8


def test_redrive_leaves_unselected_letters_dead(run: RunCommand, path: Path, shop: Store) -> None:
    result = run("effects", "redrive", "pay", "--error", "reset", "--json", store=path)
    assert [redriven["dead"] for redriven in result.document["redriven"]] == [3, 7]
    assert result.document["stopped"] is False
    assert [letter.seq for letter in shop.read(queue.list_dead, PAY)] == [1, 2, 4, 5, 6, 8]
    assert shop.read(queue.counts, PAY).ready == 2


def test_redrive_skips_letters_of_a_deleted_world(run: RunCommand, path: Path, shop: Store) -> None:
    Runtime(app, shop, roles=()).world(Buyer, "ada").delete()
    document = run("effects", "redrive", "pay", "--all", "--store", path, "--json").document
    assert [redriven["dead"] for redriven in document["redriven"]] == [5, 6, 7, 8]
    assert [refused["dead"] for refused in document["refused"]] == [1, 2, 3, 4]
    assert shop.read(queue.counts, PAY).dead == 4


def test_redrive_of_named_letters_is_all_or_nothing(
    run: RunCommand, path: Path, shop: Store
) -> None:
    assert run("effects", "redrive", "pay", 1, 99, "--store", path).code == 1
    assert shop.read(queue.counts, PAY).dead == 8


def test_dead_list_filters_by_error_and_code(run: RunCommand, path: Path, shop: Store) -> None:
    document = run("dead", "list", PAY, "--error", "timed out", "--json", store=path).document
    assert [letter["seq"] for letter in document["letters"]] == [2, 6]
    after = run(
        "dead", "list", PAY, "--code", "interrupted", *["--after", 3, "--limit", 1], store=path
    ).out
    assert after.splitlines()[1].split()[0] == "5"
    assert "more with --after 5" in after


def test_dead_list_without_a_queue_lists_queues_with_dead_letters(
    run: RunCommand, path: Path, shop: Store
) -> None:
    shop.transact(queue.add_dead_letter, "mail", b"x", "bad", "bad")
    queues = run("dead", "list", "--store", path, "--json").document["queues"]
    assert queues == [{"queue": "mail", "dead": 1}, {"queue": PAY, "dead": 8}]
    assert run("dead", "list", "--store", path).out.splitlines()[2].split() == [PAY, "8"]


# -- rate limit and interruption -----------------------------------------------------------------


@pytest.fixture
def letters() -> Iterator[Store]:
    """Forty dead letters in the queue `mail`."""
    with stores.open("memory:", clock=SimClock()) as store:
        for n in range(40):
            store.transact(queue.add_dead_letter, "mail", b"%d" % n, "bad", "bad")
        yield store


class RecordingSimClock(SimClock):
    """Records the duration of every sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        super().sleep(seconds)


def arguments(**overrides: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"seqs": [], "limit": None, "rate": 100.0, **overrides})


def redrive_in(store: Store) -> Any:
    return lambda seqs: store.transact(queue.redrive, "mail", seqs)


@pytest.mark.parametrize("rate", [0.5, 1.0, 7.0, 10.0, 35.0, 100.0])
def test_redrive_rate_limits_every_one_second_window(letters: Store, rate: float) -> None:
    clock, times = RecordingSimClock(), []

    def redrive_and_record(seqs: list[int]) -> list[int]:
        times.extend([clock.mono_ns()] * len(seqs))
        new_seqs: list[int] = redrive_in(letters)(seqs)
        return new_seqs

    result = redrive_selected(
        letters,
        "mail",
        arguments(rate=rate),
        redrive_and_record,
        selection=LetterSelection(),
        clock=clock,
    )
    assert len(result.made) == 40
    busiest_second = max(sum(at <= other < at + S for other in times) for at in times)
    # One batch may fall at the start of the window and another at its end.
    assert busiest_second <= max(1, rate) + max(1, rate // 10)
    assert (times[-1] - times[0]) / S == pytest.approx(39 / rate, rel=0.3)


def test_redrive_rate_counts_the_time_of_the_commit(letters: Store) -> None:
    clock = RecordingSimClock()

    def redrive_slowly(seqs: list[int]) -> list[int]:
        clock.advance(10 * S)
        new_seqs: list[int] = redrive_in(letters)(seqs)
        return new_seqs

    redrive_selected(
        letters,
        "mail",
        arguments(rate=1.0),
        redrive_slowly,
        selection=LetterSelection(),
        clock=clock,
    )
    assert clock.slept == []


def test_sigint_while_redrive_waits_leaves_the_rest_dead(letters: Store) -> None:
    class InterruptingClock(RecordingSimClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if len(self.slept) == 3:
                signal.raise_signal(signal.SIGINT)

    first = redrive_selected(
        letters, "mail", arguments(rate=1.0), redrive_in(letters), selection=LetterSelection(),
        clock=InterruptingClock(),
    )  # fmt: skip
    assert first.stopped
    assert [old for old, _ in first.made] == [1, 2, 3]
    assert letters.read(queue.counts, "mail").dead == 37
    rest = redrive_selected(
        letters,
        "mail",
        arguments(),
        redrive_in(letters),
        selection=LetterSelection(),
        clock=RecordingSimClock(),
    )
    assert [old for old, _ in rest.made] == list(range(4, 41))
    assert not rest.stopped


def test_sigint_during_a_redrive_commit_stops_after_the_commit(letters: Store) -> None:
    handler = signal.getsignal(signal.SIGINT)

    def redrive_with_sigint(seqs: list[int]) -> list[int]:
        signal.raise_signal(signal.SIGINT)
        new_seqs: list[int] = redrive_in(letters)(seqs)
        return new_seqs

    result = redrive_selected(
        letters,
        "mail",
        arguments(rate=20.0),
        redrive_with_sigint,
        selection=LetterSelection(),
        clock=RecordingSimClock(),
    )
    assert result.stopped
    assert [old for old, _ in result.made] == [1, 2]
    assert letters.read(queue.counts, "mail") == queue.QueueCounts(ready=2, dead=38)
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.fixture
def pages_of_letters() -> Iterator[Store]:
    """Dead letters on three pages. One letter of each page has the code `rare`."""
    with stores.open("memory:", clock=SimClock()) as store:
        for n in range(1, 2 * PAGE + 50):
            code = "rare" if n % PAGE == 7 else "bad"
            store.transact(queue.add_dead_letter, "mail", b"%d" % n, code, code)
        yield store


def test_redrive_processes_rare_letters_page_by_page(pages_of_letters: Store) -> None:
    batches: list[list[int]] = []

    def redrive_and_record(seqs: list[int]) -> list[int]:
        batches.append(seqs)
        new_seqs: list[int] = redrive_in(pages_of_letters)(seqs)
        return new_seqs

    def redrive(limit: int | None) -> None:
        redrive_selected(
            pages_of_letters,
            "mail",
            arguments(limit=limit),
            redrive_and_record,
            selection=LetterSelection(code="rare"),
            clock=RecordingSimClock(),
        )

    redrive(limit=1)
    assert batches == [[7]]
    redrive(limit=None)
    assert batches == [[7], [PAGE + 7], [2 * PAGE + 7]]


def test_sigint_during_a_page_without_matches_stops_after_the_page(
    pages_of_letters: Store,
) -> None:
    read: list[int] = []

    class InterruptingSelection(LetterSelection):
        def matches(self, letter: queue.DeadLetter) -> bool:
            read.append(letter.seq)
            if letter.seq == 5:
                signal.raise_signal(signal.SIGINT)
            return False

    result = redrive_selected(
        pages_of_letters,
        "mail",
        arguments(),
        redrive_in(pages_of_letters),
        selection=InterruptingSelection(),
        clock=RecordingSimClock(),
    )
    assert result.stopped
    assert result.made == []
    assert read == list(range(1, PAGE + 1))


def test_redrive_does_not_repeat_letters_that_die_again(letters: Store) -> None:
    def redrive_and_bury(seqs: list[int]) -> list[int]:
        new_seqs: list[int] = redrive_in(letters)(seqs)
        for claim in letters.transact(queue.claim, "mail", "worker", len(seqs), TTL_NS):
            letters.transact(queue.dead_letter, claim, "bad", "again")
        return new_seqs

    result = redrive_selected(
        letters,
        "mail",
        arguments(),
        redrive_and_bury,
        selection=LetterSelection(),
        clock=RecordingSimClock(),
    )
    assert [old for old, _ in result.made] == list(range(1, 41))
    assert letters.read(queue.counts, "mail").dead == 40


def test_redrive_skips_letters_redriven_concurrently(letters: Store) -> None:
    def redrive_after_another(seqs: list[int]) -> list[int]:
        if 5 in seqs and letters.read(queue.list_dead, "mail", 4, 1)[0].seq == 5:
            letters.transact(queue.redrive, "mail", [5])
        new_seqs: list[int] = redrive_in(letters)(seqs)
        return new_seqs

    result = redrive_selected(
        letters,
        "mail",
        arguments(),
        redrive_after_another,
        selection=LetterSelection(),
        clock=RecordingSimClock(),
    )
    assert [old for old, _ in result.made] == [n for n in range(1, 41) if n != 5]
    assert result.refused == []


def test_redrive_command_stopped_by_sigint_exits_with_130(
    run: RunCommand, path: Path, shop: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_rate_limit_sleep(monkeypatch, lambda _: signal.raise_signal(signal.SIGINT))
    result = run("effects", "redrive", "pay", "--all", "--rate", "1", store=path)
    assert result.code == 130
    assert result.out.splitlines()[-1].startswith("stopped: ")
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
def test_parse_time_accepts_an_age_or_a_date(text: str, ns: int) -> None:
    assert parse_time_ns("--since", text, 1_000_000 * S) == ns


@pytest.mark.parametrize("text", ["", "soon", "2", "h2", "-2h", "2026-02-30", "2 h"])
def test_parse_time_rejects_invalid_text(text: str) -> None:
    with pytest.raises(Invalid):
        parse_time_ns("--since", text, S)


def test_dead_drop_of_an_effect_removes_its_pending_row(
    run: RunCommand, path: Path, shop: Store
) -> None:
    [letter] = shop.read(queue.list_dead, PAY, 4, 1)
    intent = codec.unpack_as(Intent, shop.read(queue.payload_of, letter))
    assert shop.read(intents.find_pending, "shop", intent.intent_hash).dead
    assert run("dead", "drop", PAY, letter.seq, "--store", path).code == 0
    assert shop.read(intents.find_pending, "shop", intent.intent_hash) is None
    assert letter.seq not in [dead_letter.seq for dead_letter in shop.read(queue.list_dead, PAY)]
