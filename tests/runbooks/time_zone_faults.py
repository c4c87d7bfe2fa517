"""The faults behind the blocker codes of a machine without time zone data."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from zoneinfo import TZPATH

from tests.process.watch import until, writers_of
from tests.runbooks.alert_faults import Exists
from tests.runbooks.blocker_faults import variant
from tests.runbooks.fault_scene import FaultScene
from tests.runbooks.machine_faults import SHIFTED_CLOCK
from tests.runbooks.shelf_app import ChecksPlanned, DeliveryAsked, Shelf, app, count_stock, refill

ZONE = "Asia/Tokyo"
MINUTE_NS = 60 * 10**9


@variant("schedule-stopped")
def schedule_without_its_time_zone(scene: FaultScene) -> Exists:
    with app.open(scene.store, roles=()) as rt:
        rt.schedule("each-minute", count_stock, every="* * * * *", zone=ZONE, args=("a",))
    start_without_zones(scene)
    stopped = scene.blocked(scene.client(), "schedule_stopped", "schedule", "each-minute")
    until(stopped, "the rule fails")
    install_zone(scene)
    return stopped


@variant("dead-letters-growing")
def timer_without_its_time_zone(scene: FaultScene) -> Exists:
    """There is a dead effect, too."""
    down = scene.file("carrier-is-down")
    with app.open(scene.store, roles=()) as rt:
        shelf = rt.world(Shelf, "a")
        shelf.send(ChecksPlanned(ZONE))
        worker = scene.up("shop:app")
        shelf.wait_for(lambda state: state.planned == 1)
        shelf.send(DeliveryAsked())
        until(lambda: scene.metric(rt, "holdfast_effects", state="dead") == 1, "the dead effect")
        down.unlink()
        rt.submit(count_stock, "a")
        rt.start(refill, "a")
        scene.stop(worker)
    start_without_zones(scene)
    dead = scene.blocked(scene.client(), "timer_dead", "timer", "Shelf/a/check")
    until(dead, "the delivery fails")
    install_zone(scene)
    return dead


def start_without_zones(scene: FaultScene) -> None:
    """Start a worker, and with it the writer, on a machine without time zone data. Its clock is a minute ahead. It finds
    data in the directory `zones`."""
    until(lambda: not writers_of(Path(scene.store)), "the exit of the writer")
    machine = scene.directory / "machine"
    (machine / "tzdata").mkdir(parents=True)
    (machine / "tzdata" / "__init__.py").touch()
    (machine / "sitecustomize.py").write_text(SHIFTED_CLOCK)
    (scene.directory / "zones").mkdir()
    env = {
        "PYTHONPATH": str(machine),
        "PYTHONTZPATH": str(scene.directory / "zones"),
        "CLOCK_SHIFT_NS": str(MINUTE_NS),
    }
    scene.up("shop:app", env={**os.environ, **env})


def install_zone(scene: FaultScene) -> None:
    [source, *_] = [Path(path, ZONE) for path in TZPATH if Path(path, ZONE).exists()]
    target = scene.directory / "zones" / ZONE
    target.parent.mkdir()
    shutil.copy(source, target)
