"""States of worlds over HTTP: computed in another process, whose end, hang or hunger leaves the server alive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.errors import StatesBusy
from holdfast.store.api import Store
from tests.api_server import meter_apps
from tests.api_server.meter_apps import LitresUsed, MeterRig, WaterMeter
from tests.ops.http_rig import JsonResponse

pytestmark = pytest.mark.timeout(120)

MODULES = ("holdfast.ops.state_process",)

STATE = "/v1/worlds/WaterMeter/main/state"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    path: Path = tmp_path_factory.mktemp("meters") / "data"
    with stores.open(path) as store:
        with meter_apps.app.open(store) as runtime:
            meter = runtime.world(WaterMeter, "main")
            for by in (5, 6, 7):
                meter.send(LitresUsed(by))
            meter.wait_for(lambda state: state.total == 18)
        yield store


@pytest.fixture
def rig(store: Store) -> Iterator[MeterRig]:
    rig = MeterRig(store)
    try:
        yield rig
    finally:
        rig.close()


def assert_problem(answer: JsonResponse, status: int, code: str) -> None:
    assert (answer.status, answer.document["code"]) == (status, code), answer.document


def test_states_come_from_one_warm_process(rig: MeterRig) -> None:
    process = rig.process("app")
    client = rig.client(process)
    assert client.get(STATE).document["state"] == {"total": 18, "note": ""}
    child = process.pid
    assert child is not None
    assert client.get(f"{STATE}?at=2").document["state"]["total"] == 11
    assert client.get(f"{STATE}?at=0").document["state"]["total"] == 0
    assert_problem(client.get(f"{STATE}?at=4"), 404, "not_found")
    assert process.pid == child


def test_reducer_that_ends_its_process_is_an_error_and_the_server_answers(rig: MeterRig) -> None:
    process = rig.process("exiting")
    client = rig.client(process)
    assert_problem(client.get(f"{STATE}?at=2"), 409, "reducer_died")
    # Height 0 needs no reducer: a new process computes it.
    assert client.get(f"{STATE}?at=0").document["state"]["total"] == 0
    assert client.get("/v1/worlds/WaterMeter/main").document["height"] == 3


def test_reducer_that_hangs_is_killed_at_the_time_limit(rig: MeterRig) -> None:
    process = rig.process("hanging", limit_s=1.0)
    client = rig.client(process)
    assert client.get(f"{STATE}?at=0").document["state"]["total"] == 0
    child = process.pid
    assert_problem(client.get(f"{STATE}?at=2"), 409, "reducer_timeout")
    assert client.get(f"{STATE}?at=0").document["state"]["total"] == 0
    assert process.pid not in (None, child)
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.deep
def test_reducer_that_allocates_without_end_is_an_error(rig: MeterRig) -> None:
    client = rig.client(rig.process("allocating"))
    assert_problem(client.get(f"{STATE}?at=2"), 409, "reducer_memory")
    assert client.get(f"{STATE}?at=0").document["state"]["total"] == 0


@pytest.mark.deep
def test_request_waits_for_the_process_a_bounded_time(rig: MeterRig) -> None:
    process = rig.process("app", wait_s=0.0)
    with process.in_use(), pytest.raises(StatesBusy):
        process.read("meters", "any", 0)


def test_without_code_the_state_is_the_raw_snapshot(rig: MeterRig) -> None:
    client = rig.client(None)
    shown = client.get(STATE).document
    assert shown == {
        "world": "WaterMeter/main",
        "at": None,
        "state": {"total": 18, "note": ""},
        "raw_height": 3,
    }
    assert_problem(client.get(f"{STATE}?at=2"), 409, "needs_app")
    assert_problem(client.get(f"{STATE}?at=4"), 404, "not_found")
