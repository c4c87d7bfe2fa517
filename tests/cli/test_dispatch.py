"""`holdfast dispatch …`: the backlog, acknowledgements of agents, and the leader's pane."""

from pathlib import Path

import pytest

from holdfast.dispatch import leader_pane, notifications
from holdfast.dispatch import log as dispatch_log
from holdfast.dispatch.log import DispatchLog
from holdfast.dispatch.outcomes import DispatchOutcomeReason
from holdfast.dispatch.request import DispatchStatus, mark_of
from tests.cli.conftest import RunCommand
from tests.ops.account_rig import AccountRig

MODULES = ("holdfast.cli.dispatch",)

U = "bank"


@pytest.fixture
def log(rig: AccountRig) -> DispatchLog:
    """One notified request, one deferred until there is a leader, and one failed request."""
    dispatches = DispatchLog(rig.store, U)
    dispatches.request("r1", "work:0.1", {"world": "ada", "note": "a\x1b[2Jb"})
    dispatches.tried("r1")
    dispatches.concluded("r1", DispatchOutcomeReason.CONFIRMED, retries_left=0)
    dispatches.request("r2", "leader")
    dispatches.concluded("r2", DispatchOutcomeReason.LEADER_MISSING, retries_left=0)
    dispatches.request("r3", "gone")
    dispatches.concluded("r3", DispatchOutcomeReason.TARGET_MISSING, retries_left=2)
    return dispatches


def test_dispatch_list_prints_the_backlog_by_status(
    run: RunCommand, path: Path, log: DispatchLog
) -> None:
    result = run("dispatch", "list", "--store", path)
    header, counts = result.out.splitlines()
    assert dict(zip(header.split(), counts.split(), strict=True)) == {
        "pending": "1",
        "notified": "1",
        "delivered": "0",
        "failed": "1",
        "deferred": "1",
    }


def test_dispatch_list_with_status_prints_requests_and_reasons(
    run: RunCommand, path: Path, log: DispatchLog
) -> None:
    result = run("dispatch", "list", "--status", "failed", "--store", path)
    [row] = result.out.splitlines()[1:]
    assert row.split()[:2] == [mark_of("r3"), "gone"]
    assert "target_missing" in row
    result = run("dispatch", "list", "--status", "pending", "--store", path, "--json")
    [dispatch] = result.document["dispatches"]
    assert (dispatch["request_id"], dispatch["reason"], dispatch["deferred"]) == (
        "r2", "leader_missing", True,
    )  # fmt: skip


def test_dispatch_list_of_an_empty_status_prints_none(
    run: RunCommand, path: Path, log: DispatchLog
) -> None:
    assert run("dispatch", "list", "--status", "delivered", "--store", path).out == (
        "none delivered\n"
    )


@pytest.mark.parametrize("ref", ["r1", mark_of("r1"), f"[hf:{mark_of('r1')}]"])
def test_dispatch_show_accepts_a_request_id_or_a_mark(
    run: RunCommand, path: Path, log: DispatchLog, ref: str
) -> None:
    result = run("dispatch", "show", ref, "--store", path, "--json")
    assert result.document["request_id"] == "r1"
    assert result.document["status"] == "notified"
    assert result.document["notified_at"] >= result.document["created_at"]
    shown = run("dispatch", "show", ref, "--store", path).out
    assert "\x1b" not in shown
    assert "a�[2Jb" in shown


def test_dispatch_deliver_marks_the_request_delivered(
    run: RunCommand, path: Path, log: DispatchLog
) -> None:
    result = run("dispatch", "deliver", mark_of("r1"), "--store", path)
    assert result.code == 0
    record = log.find("r1")
    assert record is not None
    assert (record.status.value, record.reason) == ("delivered", "acknowledged")


def test_dispatch_fail_marks_the_request_failed_with_its_reason(
    run: RunCommand, path: Path, log: DispatchLog
) -> None:
    run("dispatch", "fail", "r1", "--reason", "not my job", "--store", path)
    record = log.find("r1")
    assert record is not None
    assert (record.status.value, record.reason) == ("failed", "not my job")


def test_dispatch_deliver_of_a_pending_request_is_an_invalid_transition(
    run: RunCommand, path: Path, log: DispatchLog
) -> None:
    result = run("dispatch", "deliver", "r2", "--store", path)
    assert result.code == 1
    assert result.error.startswith("invalid_transition: ")
    assert "prior='PENDING' attempted='DELIVERED'" in result.error


def test_dispatch_show_of_an_unknown_request_is_not_found(
    run: RunCommand, path: Path, log: DispatchLog
) -> None:
    result = run("dispatch", "show", "nobody", "--store", path)
    assert (result.code, result.error.split(":")[0]) == (1, "not_found")


def test_dispatch_fail_requires_a_reason(run: RunCommand, path: Path, log: DispatchLog) -> None:
    assert run("dispatch", "fail", "r1", "--store", path).code == 2


# -- the leader ------------------------------------------------------------------------------------


def test_dispatch_leader_sets_shows_and_forgets_the_pane(
    run: RunCommand, path: Path, rig: AccountRig, log: DispatchLog
) -> None:
    assert run("dispatch", "leader", "--store", path).out == "no leader's pane is set\n"
    named = run("dispatch", "leader", "lead:0.1", "--cli", "codex", "--json", store=path)
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
    assert rig.store.read(leader_pane.find_leader, U) is None


def test_dispatch_leader_here_takes_the_current_tmux_pane(
    run: RunCommand, path: Path, rig: AccountRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMUX_PANE", "%42")
    run("dispatch", "leader", "here", "--store", path)
    pane = rig.store.read(leader_pane.find_leader, U)
    assert pane is not None
    assert pane.target == "%42"


def test_dispatch_leader_here_outside_tmux_is_refused(
    run: RunCommand, path: Path, rig: AccountRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TMUX_PANE", raising=False)
    result = run("dispatch", "leader", "here", "--store", path)
    assert result.code == 1
    assert "run this command inside tmux" in result.error


@pytest.mark.parametrize("words", [("a:b:c",), ("%1", "--forget"), ("%1", "--socket", "a b")])
def test_dispatch_leader_with_invalid_arguments_is_refused(
    run: RunCommand, path: Path, rig: AccountRig, words: tuple[str, ...]
) -> None:
    result = run("dispatch", "leader", *words, "--store", path)
    assert (result.code, result.error.split(":")[0]) == (1, "invalid")
    assert rig.store.read(leader_pane.find_leader, U) is None


def test_dispatch_leader_shows_pending_events_and_the_deferral_reason(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    run("dispatch", "leader", "%1", "--store", path)
    DispatchLog(rig.store, U).request("r9", "work")
    rig.store.transact(notifications.defer_leader_notification, U, "leader_missing", "no pane")
    document = run("dispatch", "leader", "--store", path, "--json").document
    assert (document["pending"], document["deferred"]) == (1, "leader_missing: no pane")


def test_dispatch_rewind_moves_the_notification_cursor_to_a_height(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    run("dispatch", "leader", "%1", "--store", path)
    DispatchLog(rig.store, U).request("r9", "work")
    rig.store.transact(notifications.advance, U, 0, 1, ["r9/0"])
    result = run("dispatch", "rewind", "0", "--store", path, "--json")
    assert (result.document["cursor"], result.document["pending"]) == (0, 1)
    assert run("dispatch", "rewind", "9", "--store", path).code == 1


# -- verify ----------------------------------------------------------------------------------------


def test_verify_finds_a_wrong_dispatch_counter(
    run: RunCommand, path: Path, rig: AccountRig, log: DispatchLog
) -> None:
    assert run("verify", "--store", path).code == 0
    keys = dispatch_log.keys_of(U)
    rig.store.transact(lambda txn: txn.add(keys.counts[DispatchStatus.FAILED], 1))
    result = run("verify", "--store", path)
    assert result.code == 1
    assert any("dispatch" in line and "counters" in line for line in result.out.splitlines())


# -- readiness -------------------------------------------------------------------------------------


def test_ready_prints_the_dispatch_backlog_and_deferrals(
    run: RunCommand, path: Path, log: DispatchLog
) -> None:
    result = run("ready", "--store", path)
    lines = result.out.splitlines()
    assert "  dispatches: 1 pending, 1 notified, 1 failed, 1 deferred" in lines
    assert any(line.startswith("  notification_deferred leader_missing: 1") for line in lines)
    [universe] = run("ready", "--store", path, "--json").document["universes"]
    assert universe["backlog"]["failed"] == 1
