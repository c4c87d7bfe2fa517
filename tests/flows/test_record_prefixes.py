"""Replays with each prefix of a flow's records, as a worker runs a flow after a crash."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

import holdfast as hf
from holdfast.flows.model import parse_flow_id
from holdfast.flows.record_prefixes import prefix_lengths
from holdfast.ops.flow_replay import DIVERGED, FlowFinding, FlowTarget, replay_flow
from holdfast.sim.flow_parity import FlowDisparity, check_flows
from tests.flows.rig import BEFORE
from tests.flows.test_steps import app_of, double

MODULES = ("holdfast.flows.record_prefixes", "holdfast.sim.flow_parity")


def replayed(rig: Any, handle: Any) -> FlowFinding:
    target = FlowTarget(rig.universe, parse_flow_id(handle.id).seq)
    found = replay_flow(rig.store, rig.app, target)
    assert found is not None
    return found


@pytest.mark.parametrize("differing_run", [3, 4, 5])
@pytest.mark.parametrize("check", ["parity", "verify"])
def test_replay_of_each_prefix_finds_a_later_run_that_differs(
    make_rig: Any, differing_run: int, check: str
) -> None:
    """The worker is run 1 and the replay of all records run 2. Run 3 has no record, run 4 one, run 5 two."""
    runs: Iterator[int] = count(1)

    @hf.flow
    async def order() -> None:
        run = next(runs)
        for step in (1, 2, 3):
            await hf.step(double, 7 if (run, step) == (differing_run, differing_run - 2) else step)
        await hf.sleep(60)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.run(rig.is_idle)
    step, with_records = (
        f"double#{differing_run - 2}",
        f"its first {differing_run - 3} of 3 records",
    )
    if check == "parity":
        with pytest.raises(FlowDisparity, match=with_records) as found:
            check_flows(rig.store.read, rig.app)
        assert found.value.step == step
    else:
        finding = replayed(rig, handle)
        assert (finding.code, finding.step, finding.parks) == (DIVERGED, step, None)
        assert with_records in finding.text


def test_values_that_a_lost_worker_did_not_record_are_no_difference(make_rig: Any) -> None:
    """The worker made a value and died before its commit. The flow is DEAD, without a record of the value."""

    @hf.flow(expiries_max=2)
    async def order() -> None:
        await hf.step(double, 1)
        await hf.step(double, hf.now().year)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.plan.update({("flows.commit", number): BEFORE for number in (2, 3)})
    rig.run(handle.done)
    assert (handle.status().state, len(handle.steps())) == ("DEAD", 1)
    check_flows(rig.store.read, rig.app)


def test_values_behind_a_prefix_are_the_recorded_ones(make_rig: Any) -> None:
    @hf.flow
    async def order() -> None:
        await hf.step(double, hf.now().microsecond)
        await hf.step(double, int(hf.random() * 1_000_000))
        await hf.step(double, hf.uuid().int % 1_000)
        await hf.sleep(60)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.run(rig.is_idle)
    check_flows(rig.store.read, rig.app)
    assert replayed(rig, handle).code == ""


def test_prefixes_of_long_records_deliver_a_bounded_number_of_records() -> None:
    assert prefix_lengths(0) == []
    assert prefix_lengths(316) == list(range(316))
    for records in (317, 1_000, 60_000, 1_000_000):
        lengths = prefix_lengths(records)
        assert lengths == sorted(set(lengths))
        assert lengths[-1] < records
        assert sum(lengths) <= 50_000
    assert len(prefix_lengths(1_000)) == 100
