"""The faults behind the blocker codes of two versions of the code."""

from __future__ import annotations

from tests.process.watch import until
from tests.runbooks.alert_faults import SHORT_LEASE, Exists
from tests.runbooks.blocker_faults import flow_waits, variant
from tests.runbooks.fault_scene import FaultScene, kill
from tests.runbooks.shelf_app import LabelledShelf, Stocked, next_app, watch_level


@variant("worlds-stopped")
def entry_of_a_newer_version(scene: FaultScene) -> Exists:
    """The newer version, whose state has a further field, handled a message and was killed."""
    rt = scene.client(next_app)
    shelf = rt.world(LabelledShelf, "a")
    worker = scene.up("shop:next_app", *SHORT_LEASE)
    shelf.send(Stocked(1))
    shelf.wait_for(lambda state: state.count == 1)
    kill(worker)
    scene.up("shop:app", *SHORT_LEASE)
    shelf.send(Stocked(1))
    return scene.blocked(rt, "code_missing", "world", "Shelf/a")


@variant("flows-parked")
def flow_with_a_value_of_a_former_class(scene: FaultScene) -> Exists:
    rt = scene.client()
    former = scene.file("former-class")
    handle = rt.start(watch_level, "a")
    worker = scene.up("shop:app")
    until(lambda: scene.metric(rt, "holdfast_flows", state="waiting") == 1, "its sleep")
    scene.stop(worker)
    former.unlink()
    missing = scene.file("no-upcast")
    changed = scene.up("shop:app")
    unreadable = flow_waits(scene, rt, "value_unreadable", handle)
    until(unreadable, "the flow is parked")
    # The operator deploys the code with the upcast.
    scene.stop(changed)
    missing.unlink()
    return unreadable
