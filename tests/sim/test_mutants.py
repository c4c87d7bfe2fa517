"""Planted bugs: every edit matches its function, is undone after the test, and is caught by a checker."""

import pytest

from holdfast.errors import Fenced
from holdfast.sim.scheduler import SimThreadPool
from holdfast.store.api import LeaseGuard
from holdfast.store.txn import check_guard
from tests.simulation import command
from tests.simulation.checkers import CHECKERS
from tests.simulation.mutants import MUTANTS
from tests.simulation.seed_run import replay_tape, run_seed
from tests.simulation.source_edits import resolve_function
from tests.simulation.swarm import first_kill

# A sample of every kind that few seeds catch. `holdfast sim --mutants` runs all.
SAMPLE = (
    "guard: no fence",
    "guard: no expiry",
    "acquire: epoch not raised",
    "acquire: expiry not written",
    "release: epochs start anew",
    "claim: number and owner not checked",
    "claim: expiry not checked",
    "budget: failures without end",
    "dead letter: item kept, too",
    "counters: not maintained",
    "timer: woken early",
    "inbox: key not looked up",
    "key: other body taken",
    "journal: truncated beyond the checkpoint",
    "validation: reads",
    "validation: ranges",
    "resend: outcome not looked up",
    "host: lease not checked",
    "host: intents not published",
    "kernel: entropy not journaled",
    "replay: not compared",
    "digest: not compared",
    "digest: not written",
    "hint: settled without looking",
    "tenure: assignment not checked",
    "tenure: losses not told apart",
    "fork: inbox inherited",
    "authority: expiry not logged",
    "publish: key not remembered",
    "publish: no will",
    "receipt: pending for ever",
    "receipt: apart from the ack",
    "will: nobody told",
    "call: another key at each attempt",
    "rate: blocks overlap",
    "cancel: not from a worker",
    "timer: slot holds two, and both fire",
    "timer: an hour early by the calendar",
    "timer: the calendar is not looked at",
    "every: once",
    "carried timer: told, and not taken off",
    "carried timer: taken off by a cycle that was refused",
    "carried timer: told although it was fired meanwhile",
    "carried timer: told again after a lost answer",
    "carried timer: told under a lost lease",
    "carried timer: those of other worlds starve",
    "mail: nobody told",
    "fork: answered, and nobody told",
    "unknown: journaled as ignored",
    "unknown: given up too early",
    "unknown: given up by any host",
    "unknown: a key that waits answered as handled",
    "unknown: stopped, and listed nowhere",
    "history: cut above the baseline",
    "history: cut above its bound",
    "history: cut before its time",
    "history: rows swept above the floor",
    "history: a cut in parts forgotten",
    "history: cut without the leader's lease",
    "purge: not fenced",
    "purge: a held world, without force",
    "purge: rows left behind",
    "erase: before its time",
    "erase: without the leader's lease",
)
SAMPLE_SEEDS = 150
# First seeds for bugs that few seeds catch, shortly before a catching seed.
SAMPLE_STARTS = {
    "digest: not compared": 400,
    "carried timer: told under a lost lease": 400,
    "carried timer: told although it was fired meanwhile": 120,
    "carried timer: told again after a lost answer": 120,
    "purge: rows left behind": 210,
}


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
    with MUTANTS["guard: no fence"].planted():
        check_guard(GuardRows(), guard, 5, 1)
    with pytest.raises(Fenced):
        check_guard(GuardRows(), guard, 5, 1)


def test_mutant_with_two_edits_of_one_function_applies_both() -> None:
    [code] = MUTANTS["guard: neither fence nor expiry"].edited_code().values()
    original = resolve_function("store.txn:check_guard").__code__
    assert b"expired" in bytes(str(original.co_consts), "utf-8")
    assert code.co_names != original.co_names  # the edited code does not call `int_of`


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_planted_bug_is_caught(name: str) -> None:
    kill = first_kill((name, SAMPLE_SEEDS), SAMPLE_STARTS.get(name, 0))
    assert kill.seed is not None
    assert set(kill.checkers) <= CHECKERS.keys()


@pytest.mark.slow
def test_failing_tape_shrinks_and_still_fails() -> None:
    name = "timer: woken early"
    kill = first_kill((name, SAMPLE_SEEDS))
    assert kill.seed is not None
    with SimThreadPool() as threads:
        result = run_seed(kill.seed, mutant=name, threads=threads)
        shrunk = command.shrink(result, "T1", "memory", name)
        assert len(shrunk) < len(result.tape)
        assert "T1" in replay_tape(shrunk, mutant=name, threads=threads).checkers
