"""Specs of tasks and flows in a simulation: short leases, and lost workers do not count.

Crashes kill workers all the time here, so an expired lease proves no task that kills its worker. A
stall of a process is longer than these leases.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from holdfast.app.app import App
from holdfast.app.tasks import Task, TaskCall
from holdfast.sim.settings import LEASE_NS

NEVER_DEAD_EXPIRIES = 1_000_000


def apply_specs(app: App) -> None:
    """Shorten the leases of the app's tasks and flows. Calls nest: the last `restore_specs` restores the specs."""
    uses, originals = _changed.get(app, (0, None))
    if originals is None:
        originals = {name: target.spec for name, target in _targets(app)}
        for _, target in _targets(app):
            lease_ns = min(target.spec.lease_ns, LEASE_NS)
            changes = {"lease_ns": lease_ns, "expiries_max": NEVER_DEAD_EXPIRIES}
            _set_spec(target, replace(target.spec, **changes))
    _changed[app] = (uses + 1, originals)


def restore_specs(app: App) -> None:
    uses, originals = _changed.pop(app)
    if uses > 1:
        _changed[app] = (uses - 1, originals)
        return
    for name, target in _targets(app):
        _set_spec(target, originals[name])


def _set_spec(target: Any, spec: Any) -> None:
    target.spec = spec
    if isinstance(target, Task):
        target.plain = TaskCall(target, {})


def _targets(app: App) -> Iterator[tuple[tuple[str, str], Any]]:
    for name, task in app.tasks.items():
        yield ("task", name), task
    for name, flow in app.flows.items():
        yield ("flow", name), flow


# Apps of open simulations: the number of simulations, and the original specs.
_changed: WeakKeyDictionary[App, tuple[int, Any]] = WeakKeyDictionary()
