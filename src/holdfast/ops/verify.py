"""Verification of derived rows and redundant records: runs the consistency checks of every feature.

`durable.consistency`, `world.consistency`, `leadership.consistency`, `dispatch.consistency`,
`tasks.consistency`, `flows.consistency`, `schedules.consistency`, `error_group_check`, `ended_count_check`, `effects.daily_costs`, `ledger.stage_costs` and `limit_check` hold the checks. All of them read one snapshot, so
concurrent commits cause no differences. `world_replay` verifies the journals of worlds, and `tasks.replay_check` reads the task log.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.dispatch.consistency import check_dispatches
from holdfast.durable import consistency as durable_consistency
from holdfast.durable.difference import Difference
from holdfast.effects import daily_costs
from holdfast.flows import consistency as flow_consistency
from holdfast.leadership.consistency import check_leader_lease
from holdfast.ledger import stage_costs
from holdfast.ops import (
    catalog_queries,
    decode_errors,
    ended_count_check,
    error_group_check,
    limit_check,
)
from holdfast.schedules import consistency as schedule_consistency
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_names
from holdfast.store.schema import Space
from holdfast.tasks import consistency as task_consistency
from holdfast.tasks import model as task_rows
from holdfast.tasks import replay_check
from holdfast.world import catalog
from holdfast.world import consistency as world_consistency


def find_differences(txn: Txn) -> list[Difference]:
    """Run all checks and return their differences, grouped by kind.

    A row that cannot be decoded adds one difference and ends only its own check.
    """
    differences: list[Difference] = []
    for kind, location, check in _checks(txn):
        try:
            for difference in check:
                differences.append(difference)
        except decode_errors.DECODE_ERRORS as error:
            text = decode_errors.error_text(error)
            differences.append(Difference(kind, location, "a row", text, "a record"))
    return differences


def _checks(txn: Txn) -> Iterator[tuple[str, str, Iterator[Difference]]]:
    """Yield each check with its kind and location."""
    for name in iter_names(txn, (int(Space.QUEUE),)):
        yield "queue", name, durable_consistency.check_queue(txn, name)
    for universe in catalog_queries.universes(txn):
        yield "catalog", universe, world_consistency.check_world_records(txn, universe)
        yield "catalog", universe, world_consistency.check_catalog(txn, universe)
        yield "effect", universe, world_consistency.check_open_effects(txn, universe)
        yield "effect", universe, world_consistency.check_effect_tags(txn, universe)
        yield "assignment", universe, world_consistency.check_assignments(txn, universe)
        yield "authority", universe, check_leader_lease(txn, universe)
        yield "dispatch", universe, check_dispatches(txn, universe)
        yield "limit", universe, limit_check.find_differences(txn, universe)
    for universe in iter_names(txn, (int(Space.APP_STATE), "budget")):
        yield "statistic", universe, daily_costs.find_differences(txn, universe)
    yield "statistic", "stages", stage_costs.find_differences(txn)
    yield "lease", "all", durable_consistency.check_leases(txn)
    yield "lease", "log", durable_consistency.check_lease_log(txn)
    yield "journal", "all", _check_journals(txn)
    yield "blob", "all", durable_consistency.check_blobs(txn)
    yield "snapshot", "all", durable_consistency.check_baselines(txn)
    for universe in iter_names(txn, (int(Space.TASK),)):
        yield "task", universe, task_consistency.check_specs(txn, universe)
        yield "task", universe, _check_tasks(txn, universe)
    for universe in iter_names(txn, (int(Space.FLOW),)):
        yield "flow", universe, flow_consistency.find_differences(txn, universe)
    for universe in iter_names(txn, (int(Space.STATISTIC),)):
        yield "statistic", universe, error_group_check.find_differences(txn, universe)
        yield "statistic", universe, ended_count_check.find_differences(txn, universe)
    for universe in iter_names(txn, (int(Space.SCHEDULE),)):
        yield "schedule", universe, schedule_consistency.find_differences(txn, universe)


def _check_tasks(txn: Txn, universe: str) -> Iterator[Difference]:
    yield from replay_check.find_differences(txn, universe)
    yield from task_consistency.find_differences(txn, universe)


def _check_journals(txn: Txn) -> Iterator[Difference]:
    """Check the journals that are neither a world's nor the task log."""
    universes = set(iter_names(txn, (int(Space.TASK),)))
    task_logs = {task_rows.keys_of(universe).subject for universe in universes}

    def is_checked_elsewhere(subject: str) -> bool:
        return subject in task_logs or _is_live_world(txn, subject)

    yield from durable_consistency.check_journals(txn, is_checked_elsewhere)


def _is_live_world(txn: Txn, subject: str) -> bool:
    universe, _, world_id = subject.rpartition("/")
    return bool(universe) and not catalog.is_deleted(txn, universe, world_id)
