"""`holdfast worlds list | show | state | journal | fork | pause | resume | delete`."""

from pathlib import Path

import msgspec
import pytest

import holdfast as hf
from holdfast.durable import journal
from holdfast.messages import IntentReceipt, ReceiptStatus, event_ingress
from holdfast.ops import world_operations
from holdfast.world import catalog, unknown_events
from holdfast.world.catalog import subject_of
from holdfast.world.code_requirement import CODE, CodeRequirement
from holdfast.world.ingress import deliver_by_id
from tests.cli.conftest import RunCommand
from tests.ops.account_rig import UNIVERSE, WORKER, AccountRig
from tests.ops.app import QuotedAccount, QuotedDeposit, QuoteRequested, Refused

APP = "tests.ops.app:app"


def test_worlds_list_prints_status_height_and_inbox_depth(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    rig.account("bob").send(QuotedDeposit(1))
    rig.account("bob").pause()
    result = run("worlds", "list", "--store", path)
    header, *rows = result.out.splitlines()
    assert header.split() == ["type", "name", "status", "height", "depth", "worker"]
    assert [row.split() for row in rows] == [
        ["QuotedAccount", "ada", "active", "3", "0", WORKER],
        ["QuotedAccount", "bob", "paused", "0", "1", "-"],
    ]


def test_worlds_list_of_one_type_is_paged(run: RunCommand, path: Path, rig: AccountRig) -> None:
    for name in ("bob", "eve"):
        rig.account(name).create()
    result = run("worlds", "list", "QuotedAccount", "--limit", 2, "--store", path)
    assert result.out.splitlines()[-1] == "2 shown; more with: QuotedAccount --after bob"
    rest = run("worlds", "list", "QuotedAccount", "--after", "bob", "--json", store=path).document
    assert [world["name"] for world in rest["worlds"]] == ["eve"]
    assert rest["more"] is False
    assert run("worlds", "list", "--after", "bob", "--store", path).error.startswith("invalid: ")
    assert run("worlds", "list", "Other", "--store", path).out == "no worlds\n"


def test_worlds_list_prints_the_universe_when_there_are_several(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    elsewhere = hf.App("elsewhere", worlds=[QuotedAccount]).open(rig.store, roles=())
    elsewhere.world(QuotedAccount, "ada").create()
    assert run("worlds", "list", "--store", path).out.splitlines()[0].split()[0] == "universe"
    document = run("worlds", "list", "--universe", "elsewhere", "--store", path, "--json").document
    assert [world["universe"] for world in document["worlds"]] == ["elsewhere"]
    assert "several universes" in run("worlds", "show", "QuotedAccount/ada", "--store", path).error
    result = run("worlds", "show", "QuotedAccount/ada", "--universe", UNIVERSE, "--store", path)
    assert result.code == 0


def test_worlds_show_prints_blocker_and_lineage(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    child = rig.account().fork("child", at=2)
    blocker = catalog.WorldBlocker("replay_diverged", "height=2 what='reply'", 2)
    world_id = child.record().world_id
    rig.store.transact(catalog.change_status, UNIVERSE, world_id, catalog.WorldEvent.PARK, blocker)
    result = run("worlds", "show", "QuotedAccount/child", "--store", path)
    assert "parked" in result.out
    assert "replay_diverged since " in result.out
    assert "what='reply'" in result.out
    assert "QuotedAccount/ada after 2" in result.out
    document = run("worlds", "show", world_id, "--store", path, "--json").document
    assert document["blocker"]["height"] == 2
    [parent] = document["lineage"]
    assert (parent["parent"], parent["forked_at_height"]) == ("QuotedAccount/ada", 2)


def test_worlds_state_prints_current_and_past_states(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    ada = rig.account()
    command = ("worlds", "state", "QuotedAccount/ada", "--app", APP, "--store", path)
    for at in (None, 1, 2):
        options = () if at is None else ("--at", at)
        document = run(*command, *options, "--json").document
        assert document["state"] == msgspec.to_builtins(ada.state(at))
    assert run(*command, "--at", 1).out.splitlines()[0].split() == ["balance", "1"]


def test_worlds_state_requires_an_app_with_the_world_type(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    other = "examples.agent.agent:app"
    result = run("worlds", "state", "QuotedAccount/ada", "--app", other, "--store", path)
    assert (result.code, result.error.partition(":")[0]) == (1, "invalid")
    assert run("worlds", "state", "QuotedAccount/ada", "--store", path).code == 2


def test_worlds_show_lineage_reaches_the_first_ancestor(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    rig.account().fork("child", at=2).fork("grandchild")
    document = run("worlds", "show", "QuotedAccount/grandchild", "--store", path, "--json").document
    assert [ancestor["parent"] for ancestor in document["lineage"]] == [
        "QuotedAccount/child",
        "QuotedAccount/ada",
    ]


@pytest.mark.parametrize(
    "name", ["QuotedAccount/nobody", "Nope/ada", "ada", "/", "QuotedAccount/", "\0/x"]
)
def test_worlds_commands_reject_an_unknown_or_malformed_world(
    run: RunCommand, path: Path, rig: AccountRig, name: str
) -> None:
    for action in ("show", "journal", "pause", "delete"):
        result = run("worlds", action, name, "--store", path)
        assert result.code == 1
        assert result.error.startswith(("not_found: ", "invalid: "))


def test_worlds_journal_without_an_app_prints_stored_fields(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    result = run("worlds", "journal", "QuotedAccount/ada", "--store", path)
    header, *rows = result.out.splitlines()
    assert header.split() == ["height", "time", "kind", "event", "outcome", "emitted"]
    assert len(rows) == 3
    assert "QuotedDeposit {'amount': 2}" in rows[1]


def test_worlds_journal_with_an_app_prints_decoded_events(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    rig.account().send(Refused())
    rig.account().send(QuoteRequested("EUR"))
    rig.run_worker()
    rows = run(
        "worlds", "journal", "QuotedAccount/ada", "--app", APP, "--store", path
    ).out.splitlines()
    assert "QuotedDeposit(amount=3)" in rows[3]
    assert rows[4].split()[-2:] == ["failed", "0"]
    assert rows[5].split()[-2:] == ["ok", "1"]
    document = run("worlds", "journal", "QuotedAccount/ada", "--store", path, "--json").document
    assert document["head"] == 5
    assert document["entries"][0]["correlation_id"] == "c-1"
    assert "this account refuses" in document["entries"][3]["error"]


def test_worlds_journal_prints_a_receipt(run: RunCommand, path: Path, rig: AccountRig) -> None:
    rig.account().send(QuoteRequested("EUR"))
    rig.run_worker()
    receipt = IntentReceipt(
        rig.intent().intent_hash, "fx.quote", ReceiptStatus.ERROR, code="refused"
    )
    world_operations.receipt_inject(rig.store, UNIVERSE, rig.world_id(), receipt)
    rig.run_worker()
    rows = run(
        "worlds", "journal", "QuotedAccount/ada", "--from", 5, "--store", path
    ).out.splitlines()
    assert "fx.quote error refused" in rows[1]


def test_worlds_journal_is_paged(run: RunCommand, path: Path, rig: AccountRig) -> None:
    result = run("worlds", "journal", "QuotedAccount/ada", "--limit", 2, "--store", path)
    assert result.out.splitlines()[-1] == "… up to 3; more with --from 3"
    rest = run("worlds", "journal", "QuotedAccount/ada", "--from", 3, "--json", store=path).document
    assert [line["height"] for line in rest["entries"]] == [3]
    rig.account("new").create()
    assert run("worlds", "journal", "QuotedAccount/new", "--store", path).out == "no entries\n"


def test_worlds_fork_at_a_snapshot_needs_no_app(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    result = run("worlds", "fork", "QuotedAccount/ada", "child", "--store", path)
    assert result.out == "QuotedAccount/child starts from QuotedAccount/ada after entry 3\n"
    assert rig.account("child").state().balance == 6
    again = run("worlds", "fork", "QuotedAccount/ada", "child", "--store", path)
    assert again.code == 0


def test_worlds_fork_between_snapshots_requires_an_app(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    argv = ["worlds", "fork", "QuotedAccount/ada", "child", "--at", "2", "--store", path]
    assert "give the app" in run(*argv).error
    document = run(*argv, "--app", APP, "--json").document
    assert (document["name"], document["height"]) == ("child", 2)
    assert document["lineage"][0]["forked_at_height"] == 2
    assert rig.account("child").state().balance == 3


def test_worlds_pause_resume_and_delete(run: RunCommand, path: Path, rig: AccountRig) -> None:
    def change(action: str) -> str:
        result = run("worlds", action, "QuotedAccount/ada", "--store", path)
        assert result.code == 0, result.err
        return result.out

    assert change("pause") == "QuotedAccount/ada is paused\n"
    assert change("resume") == "QuotedAccount/ada is active\n"
    assert change("delete") == "QuotedAccount/ada is deleted\n"
    assert run("worlds", "show", "QuotedAccount/ada", "--store", path).code == 1
    assert run("worlds", "list", "--store", path).out == "no worlds\n"


def test_worlds_pin_and_unpin(run: RunCommand, path: Path, rig: AccountRig) -> None:
    result = run("worlds", "pin", "QuotedAccount/ada", "w-9", "--store", path)
    assert result.out == "QuotedAccount/ada is pinned to w-9\n"
    assignment = rig.store.read(catalog.find_assignment, UNIVERSE, rig.world_id())
    assert assignment is not None
    assert (assignment.desired_worker_id, assignment.pinned) == ("w-9", True)
    document = run("worlds", "unpin", "QuotedAccount/ada", "--json", store=path).document
    assert (document["worker"], document["pinned"]) == ("w-9", False)
    assert rig.store.read(catalog.find_assignment, UNIVERSE, rig.world_id()).pinned is False  # type: ignore[union-attr]
    result = run("worlds", "unpin", "QuotedAccount/ada", "--store", path)
    assert result.out == "QuotedAccount/ada was not pinned\n"


def test_worlds_commands_escape_control_characters_in_names(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    rig.account("\x1b[31mred").create()
    assert "\x1b" not in run("worlds", "list", "--store", path).out
    assert "\x1b" not in run("worlds", "show", "QuotedAccount/\x1b[31mred", "--store", path).out
    assert "\x1b" not in run("worlds", "pause", "QuotedAccount/\x1b[31mred", "--store", path).out


@pytest.mark.parametrize(
    "app", ["tests.ops:app", "tests.ops.app:nothing", "tests.ops.app:not_an_app", "app"]
)
def test_unknown_app_exits_with_2(run: RunCommand, path: Path, rig: AccountRig, app: str) -> None:
    for argv in (
        ["worlds", "journal", "QuotedAccount/ada", "--app", app],
        ["verify", "--app", app],
    ):
        result = run(*argv, "--store", path)
        assert (result.code, result.out) == (2, "")
        assert result.error.startswith("no_app: ")
    assert run("up", app, "--store", path).code == 2


def test_worlds_purge_prints_the_remaining_hash_and_the_copies(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    world_id = rig.world_id()
    child = rig.account().fork("child")
    head = rig.store.read(journal.head, subject_of(UNIVERSE, world_id))
    document = run("worlds", "purge", "QuotedAccount/ada", "--store", path, "--json").document
    assert (document["world_id"], document["hash"], document["height"]) == (
        world_id,
        head.hash.hex(),
        head.height,
    )
    assert document["purged_ns"] > 0
    assert document["copies"]["forks"] == [child.record().world_id]
    assert "backup" in document["copies"]["backups"]
    assert run("worlds", "show", "QuotedAccount/ada", "--store", path).error.startswith("not_found")
    # A second purge by id prints the same document. The fork still shows its lineage.
    assert run("worlds", "purge", world_id, "--store", path, "--json").document == document
    audited = run("audit", "--store", path, "--json").document["entries"]
    assert {(one["actor"], one["action"], one["subject"]) for one in audited} == {
        ("command line", "worlds.purge", f"world/by-id/{world_id}")
    }
    assert world_id in run("worlds", "show", "QuotedAccount/child", "--store", path).out
    assert run("verify", "--store", path).code == 0


def test_worlds_purge_of_a_world_in_use_is_refused_unless_forced(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    rig.account("eve").send(QuoteRequested("EUR"))
    rig.run_worker()
    assert run("worlds", "purge", "QuotedAccount/eve", "--store", path).error.startswith(
        "world_in_use"
    )
    assert rig.account("eve").height() == 1
    result = run("worlds", "purge", "QuotedAccount/eve", "--force", "--store", path)
    assert (result.code, "hash" in result.out) == (0, True)
    assert run("effects", "list", "--store", path, "--json").document["effects"][0]["ready"] == 0


def test_worlds_list_and_show_print_code_missing_with_the_height(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    need = CodeRequirement("QuotedAccount", CODE, "2@0a")
    record = rig.store.read(catalog.get_record, UNIVERSE, rig.world_id())
    rig.store.transact(
        lambda txn: unknown_events.mark_stopped(
            txn, record, need, seq=0, height=3, why="another state"
        )
    )
    [row] = run("worlds", "list", "--store", path).out.splitlines()[1:]
    assert row.split()[:4] == ["QuotedAccount", "ada", "active", "(code_missing)"]
    shown = run("worlds", "show", "QuotedAccount/ada", "--store", path)
    assert "code_missing since " in shown.out
    assert "'2@0a', which made entry 3" in shown.out
    document = run("worlds", "show", "QuotedAccount/ada", "--store", path, "--json").document
    assert (document["blocker"]["code"], document["blocker"]["height"]) == ("code_missing", 3)
    ready = run("ready", "--universe", UNIVERSE, "--store", path).out
    assert "QuotedAccount/ada: code_missing at height 3: no live worker has the code" in ready


def test_worlds_list_and_show_print_unknown_event_with_its_type(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    world_id = rig.world_id()
    rig.store.transact(
        deliver_by_id, UNIVERSE, world_id, None, event_ingress("Renamed", b"\x01\x80")
    )
    rig.run_worker()
    [row] = run("worlds", "list", "--store", path).out.splitlines()[1:]
    assert row.split()[:4] == ["QuotedAccount", "ada", "active", "(unknown_event)"]
    shown = run("worlds", "show", "QuotedAccount/ada", "--store", path)
    assert "unknown_event since " in shown.out
    assert "'Renamed'" in shown.out
    document = run("worlds", "show", "QuotedAccount/ada", "--store", path, "--json").document
    assert document["blocker"]["code"] == "unknown_event"
    # The blocker is the world's, not the universe's (which has no leader in this test).
    readiness = run("ready", "--universe", UNIVERSE, "--store", path, "--json").document
    [subject] = (
        readiness["universes"][0]["subjects"] if "universes" in readiness else readiness["subjects"]
    )
    assert subject["reasons"][0]["code"] == "unknown_event"
    assert "unknown_event" in run("ready", "--universe", UNIVERSE, "--store", path).out
    assert run("verify", "--store", path).code == 0
