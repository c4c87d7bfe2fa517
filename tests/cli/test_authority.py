"""`holdfast authority show|force-release|mark-stale --universe U`."""

from pathlib import Path

import pytest

from holdfast.clock import S
from holdfast.leadership import leader_lease
from holdfast.leadership.leader_lease_state import LeaderEventKind, LeaderState
from tests.cli.conftest import RunCommand
from tests.ops.account_rig import UNIVERSE, AccountRig
from tests.process.watch import until


def logged_kinds(rig: AccountRig) -> list[LeaderEventKind]:
    return [event.kind for event in rig.store.read(leader_lease.events, UNIVERSE)]


def test_authority_show_prints_the_holder_and_the_last_events(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    lease = rig.store.transact(leader_lease.acquire, UNIVERSE, "leader", "1", 60 * S)
    document = run("authority", "show", "--universe", UNIVERSE, "--store", path, "--json").document
    assert (document["state"], document["owner"], document["live"], document["epoch"]) == (
        "held",
        "leader",
        True,
        lease.epoch,
    )
    assert document["events"][-1]["kind"] == "acquired"
    result = run("authority", "show", "--universe", UNIVERSE, "--store", path)
    assert result.out.startswith(f"{UNIVERSE}: held by leader ")


def test_authority_force_release_frees_a_live_lease_and_logs_the_reason(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    rig.store.transact(leader_lease.acquire, UNIVERSE, "leader", "1", 3_600 * S)
    command = ("authority", "force-release", "--universe", UNIVERSE, "--store", path)
    document = run(*command, "--reason", "its machine is gone", "--json").document
    assert (document["released"], document["state"]) == ("leader", "free")
    assert rig.store.read(leader_lease.read, UNIVERSE).state is LeaderState.FREE
    last_event = rig.store.read(leader_lease.events, UNIVERSE)[-1]
    assert (last_event.kind, last_event.owner, last_event.reason) == (
        LeaderEventKind.FORCE_RELEASED,
        "leader",
        "its machine is gone",
    )
    # The next owner does not wait for the expiry of the one-hour lease.
    again = rig.store.transact(leader_lease.acquire, UNIVERSE, "next", "1", 60 * S)
    assert again.epoch > document["epoch"]
    assert "released; the owner was next" in run(*command).out


def test_authority_mark_stale_marks_an_expired_lease_once(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    lease = rig.store.transact(leader_lease.acquire, UNIVERSE, "leader", "1", S // 10)
    until(lambda: rig.store.now_ns() >= lease.expires_ns, "it runs out")
    command = ("authority", "mark-stale", "--universe", UNIVERSE, "--store", path)
    document = run(*command, "--json").document
    assert (document["marked"], document["state"], document["live"]) == (True, "stale", False)
    assert logged_kinds(rig)[-1] is LeaderEventKind.MARKED_STALE
    assert run(*command, "--json").document["marked"] is False
    assert logged_kinds(rig).count(LeaderEventKind.MARKED_STALE) == 1


@pytest.mark.parametrize("action", ["show", "force-release", "mark-stale"])
def test_authority_commands_do_not_create_an_unknown_universe(
    run: RunCommand, path: Path, rig: AccountRig, action: str
) -> None:
    result = run("authority", action, "--universe", "mistyped", "--store", path)
    assert result.code == 1
    assert result.error.startswith("not_found: what='universe'")
    assert rig.store.read(leader_lease.events, "mistyped") == []


@pytest.mark.parametrize("argv", [["show"], ["seize", "--universe", UNIVERSE]])
def test_authority_wrong_usage_exits_with_2(run: RunCommand, path: Path, argv: list[str]) -> None:
    assert run("authority", *argv, "--store", path).code == 2


def test_authority_show_rejects_the_reason_option(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    result = run("authority", "show", "--universe", UNIVERSE, "--reason", "x", store=path)
    assert result.error.startswith("invalid: what='reason'")
