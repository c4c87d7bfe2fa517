"""Verification of the rows of flows: a change of each kind of row is found and named."""

from typing import Any

import pytest

from holdfast.clock import SimClock
from holdfast.flows import consistency, derived_rows
from holdfast.ops import index_rebuild
from holdfast.store import schema, tuples
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend
from tests.flows import damage
from tests.flows.damage import DERIVED, SOURCES, UNIVERSE
from tests.flows.rig import FlowRig

MODULES = (
    "holdfast.flows.consistency",
    "holdfast.flows.derived_rows",
    "holdfast.flows.record_facts",
)
EVERY = DERIVED | SOURCES


@pytest.fixture
def rig() -> Any:
    clock = SimClock()
    with InProcessStore("memory:", MemoryBackend(), clock) as store:
        rig = FlowRig(store, clock, damage.app)
        damage.start_flows(rig.start)
        while rig.run_one():
            pass
        assert differences(rig) == []
        yield rig
        rig.threads.shutdown(wait=True)


def differences(rig: FlowRig) -> list[Any]:
    found: list[Any] = rig.store.read(lambda txn: list(consistency.find_differences(txn, UNIVERSE)))
    return found


@pytest.mark.parametrize("name", EVERY)
def test_verify_names_a_changed_row_of_a_flow(rig: FlowRig, name: str) -> None:
    change, what = EVERY[name]
    rig.store.transact(change)
    found = differences(rig)
    assert what in [difference.what for difference in found]
    assert all(difference.kind == "flow" for difference in found)
    assert all(difference.where.startswith(UNIVERSE) for difference in found)


@pytest.mark.parametrize("name", DERIVED)
def test_rebuild_restores_each_row_of_a_flow_that_follows_from_others(
    rig: FlowRig, name: str
) -> None:
    before = rows_of(rig)
    rig.store.transact(DERIVED[name][0])
    assert rows_of(rig) != before
    assert broken(rig) == []
    rig.store.transact(index_rebuild.rebuild_flows, UNIVERSE)
    assert rows_of(rig) == before


@pytest.mark.parametrize("name", SOURCES)
def test_rebuild_does_not_hide_a_lost_row_of_a_flow(rig: FlowRig, name: str) -> None:
    change, _ = SOURCES[name]
    rig.store.transact(change)
    if not broken(rig):
        rig.store.transact(index_rebuild.rebuild_flows, UNIVERSE)
        assert differences(rig) != []


def rows_of(rig: FlowRig) -> list[Any]:
    prefix = schema.key_prefix(schema.Space.FLOW, UNIVERSE)
    return list(rig.store.read(lambda txn: txn.scan(prefix, tuples.prefix_end(prefix))))


def broken(rig: FlowRig) -> list[str]:
    stored = rig.store.read(derived_rows.load_flows, UNIVERSE)
    return [why for flow in stored.flows.values() for why in index_rebuild.broken_records(flow)]
