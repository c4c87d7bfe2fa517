"""`holdfast worlds list | show | state | journal | fork | pause | resume | delete`."""

from pathlib import Path

import msgspec
import pytest

import holdfast as hf
from holdfast.durable import journal
from holdfast.messages import Receipt, Status, event_ingress
from holdfast.ops import service
from holdfast.world import catalog, unknown
from holdfast.world.catalog import subject_of
from holdfast.world.ingress import enqueue
from holdfast.world.need import CODE, Need
from tests.cli.conftest import Run
from tests.ops.app import Account, Asked, Deposited, Refused
from tests.ops.rig import UNIVERSE, WORKER, Rig

APP = "tests.ops.app:app"


def test_list_shows_status_height_and_what_is_unread(run: Run, path: Path, rig: Rig) -> None:
    rig.account("bob").send(Deposited(1))
    rig.account("bob").pause()
    ran = run("worlds", "list", "--store", path)
    header, *rows = ran.out.splitlines()
    assert header.split() == ["type", "name", "status", "height", "depth", "worker"]
    assert [row.split() for row in rows] == [
        ["Account", "ada", "active", "3", "0", WORKER],
        ["Account", "bob", "paused", "0", "1", "-"],
    ]


def test_list_of_one_type_in_pages(run: Run, path: Path, rig: Rig) -> None:
    for name in ("bob", "eve"):
        rig.account(name).create()
    ran = run("worlds", "list", "Account", "--limit", 2, "--store", path)
    assert ran.out.splitlines()[-1] == "2 shown; more with: Account --after bob"
    rest = run("worlds", "list", "Account", "--after", "bob", "--store", path, "--json").document
    assert [world["name"] for world in rest["worlds"]] == ["eve"]
    assert rest["more"] is False
    assert run("worlds", "list", "--after", "bob", "--store", path).error.startswith("invalid: ")
    assert run("worlds", "list", "Other", "--store", path).out == "no worlds\n"


def test_universes_are_told_apart_where_there_are_several(run: Run, path: Path, rig: Rig) -> None:
    elsewhere = hf.App("elsewhere", worlds=[Account]).open(rig.store, roles=())
    elsewhere.world(Account, "ada").create()
    assert run("worlds", "list", "--store", path).out.splitlines()[0].split()[0] == "universe"
    told = run("worlds", "list", "--universe", "elsewhere", "--store", path, "--json").document
    assert [world["universe"] for world in told["worlds"]] == ["elsewhere"]
    assert "several universes" in run("worlds", "show", "Account/ada", "--store", path).error
    one = run("worlds", "show", "Account/ada", "--universe", UNIVERSE, "--store", path)
    assert one.code == 0


def test_show_tells_what_blocks_and_where_it_came_from(run: Run, path: Path, rig: Rig) -> None:
    child = rig.account().fork("child", at=2)
    blocker = catalog.Blocker("replay_diverged", "height=2 what='reply'", 2)
    world_id = child.record().world_id
    rig.store.transact(catalog.change, UNIVERSE, world_id, catalog.Event.PARK, blocker)
    ran = run("worlds", "show", "Account/child", "--store", path)
    assert "parked" in ran.out
    assert "replay_diverged since " in ran.out
    assert "what='reply'" in ran.out
    assert "Account/ada after 2" in ran.out
    told = run("worlds", "show", world_id, "--store", path, "--json").document
    assert told["blocker"]["height"] == 2
    [parent] = told["lineage"]
    assert (parent["parent"], parent["forked_at_height"]) == ("Account/ada", 2)


def test_state_is_shown_as_it_is_and_as_it_was(run: Run, path: Path, rig: Rig) -> None:
    ada = rig.account()
    command = ("worlds", "state", "Account/ada", "--app", APP, "--store", path)
    for at in (None, 1, 2):
        options = () if at is None else ("--at", at)
        told = run(*command, *options, "--json").document
        assert told["state"] == msgspec.to_builtins(ada.state(at))
    assert run(*command, "--at", 1).out.splitlines()[0].split() == ["balance", "1"]


def test_state_needs_the_app_that_has_the_world(run: Run, path: Path, rig: Rig) -> None:
    other = "holdfast.cli.demo_buyer:app"
    ran = run("worlds", "state", "Account/ada", "--app", other, "--store", path)
    assert (ran.code, ran.error.partition(":")[0]) == (1, "invalid")
    assert run("worlds", "state", "Account/ada", "--store", path).code == 2


def test_lineage_goes_back_to_the_first_ancestor(run: Run, path: Path, rig: Rig) -> None:
    rig.account().fork("child", at=2).fork("grandchild")
    told = run("worlds", "show", "Account/grandchild", "--store", path, "--json").document
    assert [one["parent"] for one in told["lineage"]] == ["Account/child", "Account/ada"]


@pytest.mark.parametrize("name", ["Account/nobody", "Nope/ada", "ada", "/", "Account/", "\0/x"])
def test_a_world_that_is_not_there(run: Run, path: Path, rig: Rig, name: str) -> None:
    for action in ("show", "journal", "pause", "delete"):
        ran = run("worlds", action, name, "--store", path)
        assert ran.code == 1
        assert ran.error.startswith(("not_found: ", "invalid: "))


def test_the_journal_without_code_is_what_is_stored(run: Run, path: Path, rig: Rig) -> None:
    ran = run("worlds", "journal", "Account/ada", "--store", path)
    header, *rows = ran.out.splitlines()
    assert header.split() == ["height", "time", "kind", "event", "outcome", "emitted"]
    assert len(rows) == 3
    assert "Deposited {'amount': 2}" in rows[1]


def test_the_journal_as_the_code_sees_it(run: Run, path: Path, rig: Rig) -> None:
    rig.account().send(Refused())
    rig.account().send(Asked("EUR"))
    rig.work()
    rows = run("worlds", "journal", "Account/ada", "--app", APP, "--store", path).out.splitlines()
    assert "Deposited(amount=3)" in rows[3]
    assert rows[4].split()[-2:] == ["failed", "0"]
    assert rows[5].split()[-2:] == ["ok", "1"]
    told = run("worlds", "journal", "Account/ada", "--store", path, "--json").document
    assert told["head"] == 5
    assert told["entries"][0]["correlation_id"] == "c-1"
    assert "this account refuses" in told["entries"][3]["error"]


def test_a_receipt_in_the_journal(run: Run, path: Path, rig: Rig) -> None:
    rig.account().send(Asked("EUR"))
    rig.work()
    receipt = Receipt(rig.intent().intent_hash, "fx.quote", Status.ERROR, code="refused")
    service.receipt_inject(rig.store, UNIVERSE, rig.world_id(), receipt)
    rig.work()
    rows = run("worlds", "journal", "Account/ada", "--from", 5, "--store", path).out.splitlines()
    assert "fx.quote error refused" in rows[1]


def test_the_journal_in_pages(run: Run, path: Path, rig: Rig) -> None:
    ran = run("worlds", "journal", "Account/ada", "--limit", 2, "--store", path)
    assert ran.out.splitlines()[-1] == "… up to 3; more with --from 3"
    rest = run("worlds", "journal", "Account/ada", "--from", 3, "--store", path, "--json").document
    assert [line["height"] for line in rest["entries"]] == [3]
    rig.account("new").create()
    assert run("worlds", "journal", "Account/new", "--store", path).out == "no entries\n"


def test_fork_at_a_snapshot_needs_no_code(run: Run, path: Path, rig: Rig) -> None:
    ran = run("worlds", "fork", "Account/ada", "child", "--store", path)
    assert ran.out == "Account/child starts from Account/ada after entry 3\n"
    assert rig.account("child").state().balance == 6
    again = run("worlds", "fork", "Account/ada", "child", "--store", path)
    assert again.code == 0


def test_fork_between_snapshots_asks_for_the_code(run: Run, path: Path, rig: Rig) -> None:
    argv = ["worlds", "fork", "Account/ada", "child", "--at", "2", "--store", path]
    assert "give the app" in run(*argv).error
    told = run(*argv, "--app", APP, "--json").document
    assert (told["name"], told["height"]) == ("child", 2)
    assert told["lineage"][0]["forked_at_height"] == 2
    assert rig.account("child").state().balance == 3


def test_pause_resume_and_delete(run: Run, path: Path, rig: Rig) -> None:
    def change(action: str) -> str:
        ran = run("worlds", action, "Account/ada", "--store", path)
        assert ran.code == 0, ran.err
        return ran.out

    assert change("pause") == "Account/ada is paused\n"
    assert change("resume") == "Account/ada is active\n"
    assert change("delete") == "Account/ada is deleted\n"
    assert run("worlds", "show", "Account/ada", "--store", path).code == 1
    assert run("worlds", "list", "--store", path).out == "no worlds\n"


def test_names_cannot_draw_on_the_screen(run: Run, path: Path, rig: Rig) -> None:
    rig.account("\x1b[31mred").create()
    assert "\x1b" not in run("worlds", "list", "--store", path).out
    assert "\x1b" not in run("worlds", "show", "Account/\x1b[31mred", "--store", path).out
    assert "\x1b" not in run("worlds", "pause", "Account/\x1b[31mred", "--store", path).out


@pytest.mark.parametrize(
    "app", ["tests.ops.nothing:app", "tests.ops.app:nothing", "tests.ops.app:not_an_app", "app"]
)
def test_an_app_that_is_not_there_is_wrong_usage(run: Run, path: Path, rig: Rig, app: str) -> None:
    for argv in (["worlds", "journal", "Account/ada", "--app", app], ["verify", "--app", app]):
        ran = run(*argv, "--store", path)
        assert (ran.code, ran.out) == (2, "")
        assert ran.error.startswith("no_app: ")
    assert run("up", app, "--store", path).code == 2


def test_purge_names_what_is_left_and_where_copies_are(run: Run, path: Path, rig: Rig) -> None:
    world_id = rig.world_id()
    child = rig.account().fork("child")
    head = rig.store.read(journal.head, subject_of(UNIVERSE, world_id))
    told = run("worlds", "purge", "Account/ada", "--store", path, "--json").document
    assert (told["world_id"], told["hash"], told["height"]) == (
        world_id,
        head.hash.hex(),
        head.height,
    )
    assert told["purged_ns"] > 0
    assert told["copies"]["forks"] == [child.record().world_id]
    assert "backup" in told["copies"]["backups"]
    assert run("worlds", "show", "Account/ada", "--store", path).error.startswith("not_found")
    # Asked again by its id, it is the same answer; the child still shows where it came from.
    assert run("worlds", "purge", world_id, "--store", path, "--json").document == told
    assert world_id in run("worlds", "show", "Account/child", "--store", path).out
    assert run("verify", "--store", path).code == 0


def test_purge_of_a_world_in_use_is_refused_unless_forced(run: Run, path: Path, rig: Rig) -> None:
    rig.account("eve").send(Asked("EUR"))
    rig.work()
    assert run("worlds", "purge", "Account/eve", "--store", path).error.startswith("world_in_use")
    assert rig.account("eve").height() == 1
    told = run("worlds", "purge", "Account/eve", "--force", "--store", path)
    assert (told.code, "hash" in told.out) == (0, True)
    assert run("effects", "list", "--store", path, "--json").document["effects"][0]["ready"] == 0


def test_a_world_that_waits_for_code_is_shown_with_the_code_and_the_height(
    run: Run, path: Path, rig: Rig
) -> None:
    need = Need("Account", CODE, "2@0a")
    record = rig.store.read(catalog.record, UNIVERSE, rig.world_id())
    rig.store.transact(
        lambda txn: unknown.mark(txn, record, need, 0, height=3, why="another state")
    )
    [row] = run("worlds", "list", "--store", path).out.splitlines()[1:]
    assert row.split()[:4] == ["Account", "ada", "active", "(code_missing)"]
    shown = run("worlds", "show", "Account/ada", "--store", path)
    assert "code_missing since " in shown.out
    assert "'2@0a', which made entry 3" in shown.out
    told = run("worlds", "show", "Account/ada", "--store", path, "--json").document
    assert (told["blocker"]["code"], told["blocker"]["height"]) == ("code_missing", 3)
    ready = run("ready", "--universe", UNIVERSE, "--store", path).out
    assert "Account/ada: code_missing at height 3: no live worker has the code" in ready


def test_a_world_that_stopped_before_an_unknown_event_is_shown_with_the_type(
    run: Run, path: Path, rig: Rig
) -> None:
    world_id = rig.world_id()
    rig.store.transact(enqueue, UNIVERSE, world_id, None, event_ingress("Renamed", b"\x01\x80"))
    rig.work()
    [row] = run("worlds", "list", "--store", path).out.splitlines()[1:]
    assert row.split()[:4] == ["Account", "ada", "active", "(unknown_event)"]
    shown = run("worlds", "show", "Account/ada", "--store", path)
    assert "unknown_event since " in shown.out
    assert "'Renamed'" in shown.out
    told = run("worlds", "show", "Account/ada", "--store", path, "--json").document
    assert told["blocker"]["code"] == "unknown_event"
    # The world waits; its universe does not (it has no leader here).
    found = run("ready", "--universe", UNIVERSE, "--store", path, "--json").document
    [subject] = found["universes"][0]["subjects"] if "universes" in found else found["subjects"]
    assert subject["reasons"][0]["code"] == "unknown_event"
    assert "unknown_event" in run("ready", "--universe", UNIVERSE, "--store", path).out
    assert run("verify", "--store", path).code == 0
