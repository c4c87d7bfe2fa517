"""`holdfast authority show|force-release|mark-stale --universe U`."""

from pathlib import Path

import pytest

from holdfast.authority import authority
from holdfast.authority.lease import Kind, State
from holdfast.clock import S
from tests.cli.conftest import Run
from tests.ops.rig import UNIVERSE, Rig
from tests.process.watch import until


def kinds(rig: Rig) -> list[Kind]:
    return [event.kind for event in rig.store.read(authority.events, UNIVERSE)]


def test_the_holder_is_shown_with_the_last_decisions(run: Run, path: Path, rig: Rig) -> None:
    lease = rig.store.transact(authority.acquire, UNIVERSE, "leader", "1", 60 * S)
    told = run("authority", "show", "--universe", UNIVERSE, "--store", path, "--json").document
    assert (told["state"], told["owner"], told["live"], told["epoch"]) == (
        "held",
        "leader",
        True,
        lease.epoch,
    )
    assert told["events"][-1]["kind"] == "acquired"
    ran = run("authority", "show", "--universe", UNIVERSE, "--store", path)
    assert ran.out.startswith(f"{UNIVERSE}: held by leader ")


def test_a_live_lease_is_taken_and_the_reason_is_logged(run: Run, path: Path, rig: Rig) -> None:
    rig.store.transact(authority.acquire, UNIVERSE, "leader", "1", 3_600 * S)
    command = ("authority", "force-release", "--universe", UNIVERSE, "--store", path)
    told = run(*command, "--reason", "its machine is gone", "--json").document
    assert (told["released"], told["state"]) == ("leader", "free")
    assert rig.store.read(authority.read, UNIVERSE).state is State.FREE
    last = rig.store.read(authority.events, UNIVERSE)[-1]
    assert (last.kind, last.owner, last.reason) == (
        Kind.FORCE_RELEASED,
        "leader",
        "its machine is gone",
    )
    # The next one need not wait for the hour.
    again = rig.store.transact(authority.acquire, UNIVERSE, "next", "1", 60 * S)
    assert again.epoch > told["epoch"]
    assert "released, it was next" in run(*command).out


def test_a_lease_that_ran_out_is_marked(run: Run, path: Path, rig: Rig) -> None:
    lease = rig.store.transact(authority.acquire, UNIVERSE, "leader", "1", S // 10)
    until(lambda: rig.store.now_ns() >= lease.expires_ns, "it runs out")
    command = ("authority", "mark-stale", "--universe", UNIVERSE, "--store", path)
    told = run(*command, "--json").document
    assert (told["marked"], told["state"], told["live"]) == (True, "stale", False)
    assert kinds(rig)[-1] is Kind.MARKED_STALE
    assert run(*command, "--json").document["marked"] is False
    assert kinds(rig).count(Kind.MARKED_STALE) == 1


@pytest.mark.parametrize("action", ["show", "force-release", "mark-stale"])
def test_a_universe_that_is_not_there_is_not_made(
    run: Run, path: Path, rig: Rig, action: str
) -> None:
    ran = run("authority", action, "--universe", "mistyped", "--store", path)
    assert ran.code == 1
    assert ran.error.startswith("not_found: what='universe'")
    assert rig.store.read(authority.events, "mistyped") == []


@pytest.mark.parametrize("argv", [["show"], ["seize", "--universe", UNIVERSE]])
def test_wrong_usage(run: Run, path: Path, argv: list[str]) -> None:
    assert run("authority", *argv, "--store", path).code == 2


def test_only_a_release_has_a_reason(run: Run, path: Path, rig: Rig) -> None:
    ran = run("authority", "show", "--universe", UNIVERSE, "--reason", "x", "--store", path)
    assert ran.error.startswith("invalid: what='reason'")
