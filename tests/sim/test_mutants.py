"""Planted bugs: every edit matches its function and is undone after the run. `test_killers` runs them."""

import pytest

from holdfast.errors import Fenced
from holdfast.sim.scheduler import SimThreadPool
from holdfast.store.api import LeaseGuard
from holdfast.store.txn import check_guard
from tests.simulation import command, killers
from tests.simulation.mutants import MUTANTS
from tests.simulation.seed_run import replay_tape, run_seed
from tests.simulation.source_edits import Edit, Mutant, resolve_function


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_edit_matches_its_function(name: str) -> None:
    assert MUTANTS[name].edited_code()


def test_planted_mutant_is_active_only_inside_its_context() -> None:
    class GuardRows:
        def get(self, key: bytes) -> bytes | None:
            return {b"fence": b"mine", b"expiry": (9).to_bytes(8, "big")}.get(key)

        def scan(self, *args: object) -> list[tuple[bytes, bytes]]:
            return []

    guard = LeaseGuard("r", b"fence", b"another's", b"expiry", 1)
    with pytest.raises(Fenced):
        check_guard(GuardRows(), guard, 5, 1)
    with MUTANTS["lease guard: skips the fence check"].planted():
        check_guard(GuardRows(), guard, 5, 1)
    with pytest.raises(Fenced):
        check_guard(GuardRows(), guard, 5, 1)


def test_planted_mutant_keeps_no_state_after_its_context() -> None:
    place = "world.timers:clear_slot"
    mutant = Mutant("remembers", (Edit(place, "txn.delete(key)", "clear_slot.seen = key"),))
    fn = resolve_function(place)
    with mutant.planted():
        fn.seen = b"key"
    assert not hasattr(fn, "seen")


def test_mutant_with_two_edits_of_one_function_applies_both() -> None:
    [code] = MUTANTS["lease guard: skips the fence and the expiry check"].edited_code().values()
    original = resolve_function("store.txn:check_guard").__code__
    assert b"expired" in bytes(str(original.co_consts), "utf-8")
    assert code.co_names != original.co_names  # the edited code does not call `int_of`


@pytest.mark.slow
def test_failing_tape_shrinks_and_still_fails() -> None:
    name = "delayed item: is promoted one second early"
    seed = killers.load()[name].seed
    assert seed is not None
    with SimThreadPool() as threads:
        result = run_seed(seed, mutant=name, threads=threads)
        shrunk = command.shrink(result, "T1", "memory", name, runs_max=40)
        assert len(shrunk) < len(result.tape)
        assert "T1" in replay_tape(shrunk, mutant=name, threads=threads).checkers
