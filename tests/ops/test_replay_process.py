"""Replay processes: answers, lost children, time limits, errors, and the end of the children."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import store as stores
from holdfast.cli import EXIT_INTERRUPTED
from holdfast.errors import Invalid, NotFound
from holdfast.flows.model import parse_flow_id
from holdfast.ops import flow_replay, replay_process, world_replay
from holdfast.ops.flow_replay import FlowFinding, FlowTarget
from holdfast.ops.replay_process import (
    HASH_SEEDS,
    PROCESS_LOST,
    TIME_LIMIT,
    LostReplay,
    ReplayFailed,
    ReplayLane,
    ReplayPool,
)
from holdfast.store.api import Store, connection_url
from tests.ops import replay_actions
from tests.ops.account_rig import UNIVERSE, AccountRig
from tests.ops.app import QuotedDeposit
from tests.ops.replay_actions import act
from tests.process.watch import until
from tests.processes import Proc

APP = "tests.ops.replay_actions:app"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with stores.open(tmp_path / "store") as store:
        yield store


@pytest.fixture
def lane(store: Store) -> Iterator[ReplayLane]:
    with contextlib.closing(ReplayLane(connection_url(store), None)) as lane:
        yield lane


def test_replay_returns_one_answer_per_target_in_order(lane: ReplayLane) -> None:
    assert lane.replay(act, "1", ["say a", "say b", "say c"]) == ["a", "b", "c"]


def test_child_has_the_hash_seed_and_the_application(store: Store) -> None:
    before = os.environ.get("PYTHONHASHSEED")
    with contextlib.closing(ReplayLane(connection_url(store), APP)) as lane:
        found = [lane.replay(act, seed, ["seed", "app"]) for seed in HASH_SEEDS]
    assert found == [[seed, "shop"] for seed in HASH_SEEDS]
    assert os.environ.get("PYTHONHASHSEED") == before


def test_child_that_ends_is_lost_for_one_target_only(lane: ReplayLane) -> None:
    answers = lane.replay(act, "1", ["say a", "exit", "say b", "exit"])
    assert answers == ["a", LostReplay(PROCESS_LOST), "b", LostReplay(PROCESS_LOST)]


def test_child_that_ends_is_noticed_while_its_fork_keeps_the_pipe_open(lane: ReplayLane) -> None:
    assert lane.replay(act, "1", ["fork", "say a"]) == [LostReplay(PROCESS_LOST), "a"]


def test_child_beyond_the_time_limit_is_killed(
    lane: ReplayLane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_process, "STOP_S", 0.1)
    pid_file = tmp_path / "pid"
    assert lane.replay(act, "1", [f"hang {pid_file}", "say a"], 0.1) == [
        LostReplay(TIME_LIMIT),
        "a",
    ]
    assert not is_alive(pid_file)


def test_error_of_the_application_is_an_answer_and_its_traceback_is_on_stderr(
    lane: ReplayLane, capfd: pytest.CaptureFixture[str]
) -> None:
    raised, missing, after = lane.replay(act, "1", ["raise price", "not-found world", "say a"])
    assert isinstance(raised, ReplayFailed)
    assert raised.fields["why"] == "KeyError: 'price'"
    assert isinstance(missing, NotFound)
    assert (missing.fields["what"], after) == ("world", "a")
    assert "raise KeyError(argument)" in capfd.readouterr().err


def test_output_of_the_application_is_on_stderr(
    lane: ReplayLane, capfd: pytest.CaptureFixture[str]
) -> None:
    lane.replay(act, "1", ["print noise"])
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "noise\n")


def test_application_whose_import_does_not_end_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_process, "START_S", 0.1)
    lane = ReplayLane(connection_url(store), "tests.ops.endless_import:app")
    with contextlib.closing(lane), pytest.raises(Invalid, match="its import did not end"):
        lane.replay(act, "1", ["say a"])


# -- pools ---------------------------------------------------------------------------------------


def act_all(lane: ReplayLane, share: list[str]) -> list[Any]:
    return lane.replay(act, "1", share)


def test_pool_yields_the_result_of_every_share(store: Store) -> None:
    shares = [[f"say {n}"] for n in range(20)]
    found = list(ReplayPool(connection_url(store), None, 2).run(act_all, shares))
    assert sorted(int(one) for [one] in found) == list(range(20))


def test_pool_raises_the_error_of_a_share(store: Store) -> None:
    def fail(lane: ReplayLane, share: list[str]) -> None:
        raise NotFound(what=share[0])

    with pytest.raises(NotFound):
        list(ReplayPool(connection_url(store), None, 2).run(fail, [["a"], ["b"], ["c"]]))


def test_end_of_the_iteration_kills_the_children(store: Store, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    answers = ReplayPool(connection_url(store), None, 2).run(
        act_all, [[f"hang {pid_file}"], ["say a"]]
    )
    assert next(answers) == ["a"]
    until(lambda: pid_file.is_file() and pid_file.read_text() != "", "the child hangs")
    answers.close()
    assert not is_alive(pid_file)


def is_alive(pid_file: Path) -> bool:
    return Path(f"/proc/{pid_file.read_text()}").exists()


# -- worlds and flows ----------------------------------------------------------------------------


def test_world_whose_child_was_killed_once_is_replayed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = tmp_path / "killed"
    monkeypatch.setenv("HOLDFAST_TEST_KILLED_ONCE", str(killed))
    rig = AccountRig(str(tmp_path / "store"))
    with rig.store:
        for name in ("ada", "bob"):
            rig.account(name).send(QuotedDeposit(1))
        rig.run_worker()
        targets = rig.store.read(world_replay.targets, UNIVERSE)
        findings = world_replay.verify_worlds(
            rig.store, targets, app="tests.ops.app:app_killed_once"
        )
    assert killed.exists()
    # The targets are in the order of the world ids, which are random.
    assert [one.world_id for one in findings] == [target.world_id for target in targets]
    assert sorted((one.world, one.code, one.steps) for one in findings) == [
        (f"QuotedAccount/{name}", "", 1) for name in ("ada", "bob")
    ]


def start_orders(store: Store) -> list[FlowTarget]:
    """Start two flows. No worker runs them."""
    runtime = replay_actions.app.open(store, roles=())
    handles = [runtime.start(replay_actions.order, item) for item in ("lamp", "rug")]
    return [FlowTarget("shop", parse_flow_id(handle.id).seq) for handle in handles]


def verify_orders(store: Store, app: str, limit_s: float = 30.0) -> list[FlowFinding]:
    """Start two flows and replay them on the code of this app."""
    return flow_replay.verify_flows(store, start_orders(store), app=app, limit_s=limit_s)


def test_flow_that_fits_the_code_has_no_finding(store: Store) -> None:
    findings = verify_orders(store, APP)
    assert [(one.code, one.inserted) for one in findings] == [("", ("reserve#1",))] * 2


def test_flow_that_ends_its_process_is_a_finding(store: Store) -> None:
    lamp, rug = verify_orders(store, "tests.ops.replay_actions:app_exits")
    assert (lamp.code, lamp.text) == (PROCESS_LOST, "replaying it ended the process")
    assert (rug.code, rug.inserted) == ("", ("reserve#1",))


def test_flow_that_blocks_its_process_is_a_finding(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_process, "STOP_S", 0.1)
    lamp, rug = verify_orders(store, "tests.ops.replay_actions:app_blocks", limit_s=0.3)
    assert (lamp.code, lamp.text) == (TIME_LIMIT, "its code did not come to rest within 0.3 s")
    assert (rug.code, rug.inserted) == ("", ("reserve#1",))


def test_interrupt_of_verify_ends_the_replay_of_a_blocked_flow(tmp_path: Path) -> None:
    with stores.open(tmp_path / "store") as store:
        start_orders(store)
    blocked = tmp_path / "blocked"
    app = "tests.ops.replay_actions:app_blocks"
    argv = [sys.executable, "-m", "holdfast.cli", "verify", "--app", app, "--jobs", "1"]
    argv += ["--replay-timeout-s", "600", "--store", str(tmp_path / "store")]
    env = {"HOLDFAST_TEST_BLOCKED": str(blocked)}
    with Proc.spawn(argv, ready=None, env=env) as process:
        until(blocked.exists, "the child is blocked")
        # As a terminal does.
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait() == EXIT_INTERRUPTED
        assert not any(map(is_replay_process, process.survivors()))


def is_replay_process(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"holdfast.ops.replay_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
