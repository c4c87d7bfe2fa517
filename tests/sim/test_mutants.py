"""Planted bugs: every edit has its place, leaves nothing behind, and is caught."""

import pytest

from holdfast.errors import Fenced
from holdfast.sim import command
from holdfast.sim.checkers import CHECKERS
from holdfast.sim.edits import function_at
from holdfast.sim.mutants import MUTANTS
from holdfast.sim.run import replay, run_seed
from holdfast.sim.scheduler import Threads
from holdfast.sim.swarm import first_kill
from holdfast.store.api import Guard
from holdfast.store.txn import check_guard

# Quick ones of every kind, in seeds that a test has time for. `holdfast sim --mutants` runs all.
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
# Bugs that few runs show are looked for from a seed shortly before one that does.
SAMPLE_STARTS = {
    "digest: not compared": 400,
    "carried timer: told under a lost lease": 400,
    "carried timer: told although it was fired meanwhile": 120,
    "carried timer: told again after a lost answer": 120,
    "purge: rows left behind": 210,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_edit_has_its_place(name: str) -> None:
    assert MUTANTS[name].codes()


def test_a_planted_bug_is_in_force_and_goes_away() -> None:
    class Rows:
        def get(self, key: bytes) -> bytes | None:
            return {b"fence": b"mine", b"expiry": (9).to_bytes(8, "big")}.get(key)

        def scan(self, *args: object) -> list[tuple[bytes, bytes]]:
            return []

    guard = Guard("r", b"fence", b"another's", b"expiry", 1)
    with pytest.raises(Fenced):
        check_guard(Rows(), guard, 5, 1)
    with MUTANTS["guard: no fence"].planted():
        check_guard(Rows(), guard, 5, 1)
    with pytest.raises(Fenced):
        check_guard(Rows(), guard, 5, 1)


def test_two_edits_of_one_function_are_both_in_force() -> None:
    [code] = MUTANTS["guard: neither fence nor expiry"].codes().values()
    genuine = function_at("store.txn:check_guard").__code__
    assert b"expired" in bytes(str(genuine.co_consts), "utf-8")
    assert code.co_names != genuine.co_names  # `int_of` is not called any more


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_planted_bug_is_caught(name: str) -> None:
    kill = first_kill((name, SAMPLE_SEEDS), SAMPLE_STARTS.get(name, 0))
    assert kill.seed is not None
    assert set(kill.checkers) <= CHECKERS.keys()


@pytest.mark.slow
def test_a_failing_tape_shrinks_and_still_fails() -> None:
    name = "timer: woken early"
    kill = first_kill((name, SAMPLE_SEEDS))
    assert kill.seed is not None
    with Threads() as threads:
        result = run_seed(kill.seed, mutant=name, threads=threads)
        shrunk = command.shrink(result, "T1", "memory", name)
        assert len(shrunk) < len(result.tape)
        assert "T1" in replay(shrunk, mutant=name, threads=threads).checkers
