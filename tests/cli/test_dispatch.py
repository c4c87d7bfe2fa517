"""`holdfast dispatch …`: what is on its way, what an agent says of it, and where the leader sits."""

from pathlib import Path

import pytest

from holdfast.authority import dispatch_log, panes, replay
from holdfast.authority.dispatch import DispatchStatus, mark_of
from holdfast.authority.dispatch_log import DispatchLog
from holdfast.authority.outcome import DispatchOutcomeReason
from tests.cli.conftest import Run
from tests.ops.rig import Rig

MODULES = ("holdfast.cli.dispatch",)

U = "bank"


@pytest.fixture
def log(rig: Rig) -> DispatchLog:
    """A request that was notified, one that waits for the leader, and one that failed."""
    made = DispatchLog(rig.store, U)
    made.request("r1", "work:0.1", {"world": "ada", "note": "a\x1b[2Jb"})
    made.tried("r1")
    made.concluded("r1", DispatchOutcomeReason.CONFIRMED, retries_left=0)
    made.request("r2", "leader")
    made.concluded("r2", DispatchOutcomeReason.LEADER_MISSING, retries_left=0)
    made.request("r3", "gone")
    made.concluded("r3", DispatchOutcomeReason.TARGET_MISSING, retries_left=2)
    return made


def test_the_backlog_is_told_by_state(run: Run, path: Path, log: DispatchLog) -> None:
    ran = run("dispatch", "list", "--store", path)
    header, counts = ran.out.splitlines()
    assert dict(zip(header.split(), counts.split(), strict=True)) == {
        "pending": "1",
        "notified": "1",
        "delivered": "0",
        "failed": "1",
        "deferred": "1",
    }


def test_requests_of_a_state_are_listed_with_their_reason(
    run: Run, path: Path, log: DispatchLog
) -> None:
    ran = run("dispatch", "list", "--status", "failed", "--store", path)
    [row] = ran.out.splitlines()[1:]
    assert row.split()[:2] == [mark_of("r3"), "gone"]
    assert "target_missing" in row
    ran = run("dispatch", "list", "--status", "pending", "--store", path, "--json")
    [found] = ran.document["dispatches"]
    assert (found["request_id"], found["reason"], found["deferred"]) == (
        "r2", "leader_missing", True,
    )  # fmt: skip


def test_a_state_that_nothing_is_in_is_said_so(run: Run, path: Path, log: DispatchLog) -> None:
    assert run("dispatch", "list", "--status", "delivered", "--store", path).out == (
        "none delivered\n"
    )


@pytest.mark.parametrize("ref", ["r1", mark_of("r1"), f"[hf:{mark_of('r1')}]"])
def test_a_request_is_shown_by_its_id_or_its_mark(
    run: Run, path: Path, log: DispatchLog, ref: str
) -> None:
    ran = run("dispatch", "show", ref, "--store", path, "--json")
    assert ran.document["request_id"] == "r1"
    assert ran.document["status"] == "notified"
    assert ran.document["notified_at"] >= ran.document["created_at"]
    shown = run("dispatch", "show", ref, "--store", path).out
    assert "\x1b" not in shown
    assert "a�[2Jb" in shown


def test_an_agent_says_that_it_has_it(run: Run, path: Path, log: DispatchLog) -> None:
    ran = run("dispatch", "deliver", mark_of("r1"), "--store", path)
    assert ran.code == 0
    found = log.find("r1")
    assert found is not None
    assert (found.status.value, found.reason) == ("delivered", "acknowledged")


def test_an_agent_says_that_it_will_not(run: Run, path: Path, log: DispatchLog) -> None:
    run("dispatch", "fail", "r1", "--reason", "not my job", "--store", path)
    found = log.find("r1")
    assert found is not None
    assert (found.status.value, found.reason) == ("failed", "not my job")


def test_what_was_not_handed_over_cannot_be_delivered(
    run: Run, path: Path, log: DispatchLog
) -> None:
    ran = run("dispatch", "deliver", "r2", "--store", path)
    assert ran.code == 1
    assert ran.error.startswith("invalid_transition: ")
    assert "prior='PENDING' attempted='DELIVERED'" in ran.error


def test_a_request_that_is_not_there_is_not_found(run: Run, path: Path, log: DispatchLog) -> None:
    ran = run("dispatch", "show", "nobody", "--store", path)
    assert (ran.code, ran.error.split(":")[0]) == (1, "not_found")


def test_a_failure_needs_a_reason(run: Run, path: Path, log: DispatchLog) -> None:
    assert run("dispatch", "fail", "r1", "--store", path).code == 2


# -- the leader ------------------------------------------------------------------------------------


def test_the_leaders_pane_is_named_shown_and_forgotten(
    run: Run, path: Path, rig: Rig, log: DispatchLog
) -> None:
    assert run("dispatch", "leader", "--store", path).out == "no leader's pane was named\n"
    named = run("dispatch", "leader", "lead:0.1", "--cli", "codex", "--store", path, "--json")
    head = len(rig.store.read(dispatch_log.events, U))
    assert named.document == {
        "universe": U,
        "pane": "lead:0.1",
        "cli": "codex",
        "socket": None,
        "cursor": head,
        "pending": 0,
        "deferred": None,
    }
    assert "lead:0.1" in run("dispatch", "leader", "--store", path).out
    run("dispatch", "leader", "--forget", "--store", path)
    assert rig.store.read(panes.leader, U) is None


def test_here_is_the_pane_that_the_command_runs_in(
    run: Run, path: Path, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMUX_PANE", "%42")
    run("dispatch", "leader", "here", "--store", path)
    pane = rig.store.read(panes.leader, U)
    assert pane is not None
    assert pane.target == "%42"


def test_outside_of_tmux_there_is_no_here(
    run: Run, path: Path, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TMUX_PANE", raising=False)
    ran = run("dispatch", "leader", "here", "--store", path)
    assert ran.code == 1
    assert "run this inside tmux" in ran.error


@pytest.mark.parametrize("words", [("a:b:c",), ("%1", "--forget"), ("%1", "--socket", "a b")])
def test_a_bad_leader_is_refused(run: Run, path: Path, rig: Rig, words: tuple[str, ...]) -> None:
    ran = run("dispatch", "leader", *words, "--store", path)
    assert (ran.code, ran.error.split(":")[0]) == (1, "invalid")
    assert rig.store.read(panes.leader, U) is None


def test_the_leader_sees_what_waits_and_why(run: Run, path: Path, rig: Rig) -> None:
    run("dispatch", "leader", "%1", "--store", path)
    DispatchLog(rig.store, U).request("r9", "work")
    rig.store.transact(replay.defer_leader_notification, U, "leader_missing", "no pane")
    told = run("dispatch", "leader", "--store", path, "--json").document
    assert (told["pending"], told["deferred"]) == (1, "leader_missing: no pane")


def test_the_log_is_gone_over_again_from_a_height(run: Run, path: Path, rig: Rig) -> None:
    run("dispatch", "leader", "%1", "--store", path)
    DispatchLog(rig.store, U).request("r9", "work")
    rig.store.transact(replay.advance, U, 0, 1, ["r9/0"])
    ran = run("dispatch", "rewind", "0", "--store", path, "--json")
    assert (ran.document["cursor"], ran.document["pending"]) == (0, 1)
    assert run("dispatch", "rewind", "9", "--store", path).code == 1


# -- verify ----------------------------------------------------------------------------------------


def test_a_sound_log_verifies_and_a_wrong_counter_does_not(
    run: Run, path: Path, rig: Rig, log: DispatchLog
) -> None:
    assert run("verify", "--store", path).code == 0
    keys = dispatch_log.keys_of(U)
    rig.store.transact(lambda txn: txn.add(keys.counts[DispatchStatus.FAILED], 1))
    ran = run("verify", "--store", path)
    assert ran.code == 1
    assert any("dispatch" in line and "counters" in line for line in ran.out.splitlines())


# -- readiness -------------------------------------------------------------------------------------


def test_ready_tells_of_dispatches(run: Run, path: Path, log: DispatchLog) -> None:
    ran = run("ready", "--store", path)
    lines = ran.out.splitlines()
    assert "  dispatches: 1 pending, 1 notified, 1 failed, 1 deferred" in lines
    assert any(line.startswith("  notification_deferred leader_missing: 1") for line in lines)
    [universe] = run("ready", "--store", path, "--json").document["universes"]
    assert universe["backlog"]["failed"] == 1
