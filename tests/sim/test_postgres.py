"""The simulator on PostgreSQL: the engine of production on a real server, in simulated time.

A seed is the same run on every store: the same events, with the same times and answers, and the same rows at
the end, but for those that an engine keeps for itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.sim import command
from holdfast.sim.run import run_seed
from holdfast.sim.scheduler import Threads
from tests.postgres import fresh_url

# Of every workload some; all faults, take-overs, reboots, restored backups and full disks are among them.
SEEDS = range(16)
DEEP = range(16, 200)


@pytest.fixture(scope="module")
def threads() -> Iterator[Threads]:
    with Threads() as made:
        yield made


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_ends_alike_on_memory_and_on_postgresql(seed: int, threads: Threads) -> None:
    ends_alike(seed, threads)


@pytest.mark.deep
@pytest.mark.parametrize("seed", DEEP)
def test_many_seeds_end_alike_on_memory_and_on_postgresql(seed: int, threads: Threads) -> None:
    ends_alike(seed, threads)


def test_the_seeds_are_of_every_workload_and_meet_what_they_are_for(threads: Threads) -> None:
    events = [event for seed in SEEDS for event in run_seed(seed, threads=threads).history.events]
    met = {event.op for event in events}
    assert {"takeover", "reboot", "restore", "boot", "fault", "group"} <= met
    doers = {event.actor.rstrip("0123456789") for event in events}
    assert {"runner", "world", "pool", "timer", "taskworker", "ledger", "leader"} <= doers


@pytest.mark.parametrize("seed", [1, 9])
def test_a_guard_that_is_not_evaluated_is_found_on_postgresql_too(
    seed: int, threads: Threads
) -> None:
    planted = "guard: not evaluated at apply"
    assert run_seed(seed, fresh_url(), planted, threads=threads).violations


def test_the_command_takes_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seed", "4", "--backend", fresh_url()]) == 0
    assert "state" in capsys.readouterr().out


def test_a_backend_that_is_none_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        command.main(["--seed", "4", "--backend", "sqlite"])
    assert raised.value.code == 2
    assert "postgresql" in capsys.readouterr().err


def ends_alike(seed: int, threads: Threads) -> None:
    memory = run_seed(seed, threads=threads)
    postgres = run_seed(seed, fresh_url(), threads=threads)
    assert postgres.violations == []
    assert memory.history_hash == postgres.history_hash
    assert memory.content_hash == postgres.content_hash
