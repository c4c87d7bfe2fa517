"""The faults behind the blocker codes of a machine, of another version, of panes and of stage runs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import holdfast
from holdfast.cli import main
from holdfast.errors import HoldfastError, IllegalTransition
from holdfast.store import schema
from tests.ledger_service.service_rig import running_service
from tests.process.watch import until, writers_of
from tests.processes import Proc
from tests.runbooks import label_driver
from tests.runbooks.alert_faults import Exists
from tests.runbooks.blocker_faults import code_fault, variant
from tests.runbooks.fault_scene import DRIVER_S, FaultScene
from tests.runbooks.shelf_app import NightShift, PromptAsked, panes
from tests.tmux_panes import running_tmux

# Shifts the clock of a Python process.
SHIFTED_CLOCK = """
import os, time
read_clock, shift_ns = time.time_ns, int(os.environ["CLOCK_SHIFT_NS"])
time.time_ns = lambda: read_clock() + shift_ns
"""
FIRST_EVENT = "import shop; shop.app.open(roles=()).world(shop.Shelf, 'a').send(shop.Stocked(1))"
BOOT_ID = "/proc/sys/kernel/random/boot_id"


def use_store_before_boot(scene: FaultScene, days: int) -> None:
    """Write to the store in a former boot of a machine whose clock was `days` behind."""
    assert os.geteuid() == 0, "this test mounts a boot id: run the tests as root"
    clock = scene.directory / "clock"
    clock.mkdir()
    (clock / "sitecustomize.py").write_text(SHIFTED_CLOCK)
    scene.file("boot_id").write_text("00000000-0000-4000-8000-000000000000\n")
    env = {**os.environ, "PYTHONPATH": str(clock), "CLOCK_SHIFT_NS": str(-days * 86_400 * 10**9)}
    line = ["unshare", "--mount", "sh", "-ec", f'mount --bind boot_id {BOOT_ID}; exec "$@"', "sh"]
    subprocess.run([*line, sys.executable, "-c", FIRST_EVENT], env=env, cwd=scene.directory, check=True)  # fmt: skip
    until(lambda: not writers_of(Path(scene.store)), "the exit of the writer")
    scene.env["DAY"] = (datetime.now(UTC) + timedelta(days=2)).strftime("%Y-%m-%d")


@code_fault("clock-step")
def clock_that_was_behind_before_the_boot(scene: FaultScene) -> Exists:
    use_store_before_boot(scene, 90)
    return scene.blocked(scene.client(), "store_time", "universe", "shop")


@variant("clock-step")
def clock_that_was_years_behind_before_the_boot(scene: FaultScene) -> Exists:
    use_store_before_boot(scene, 900)
    return lambda: main(["store", "info"]) != 0


@code_fault("schema-mismatch")
def store_of_a_newer_version(scene: FaultScene) -> Exists:
    """The newer version is a copy of this one with a higher schema version."""
    newer = scene.directory / "newer"
    shutil.copytree(Path(holdfast.__file__).parent, newer / "holdfast")
    module = newer / "holdfast" / "store" / "schema.py"
    minor = f"SCHEMA_MINOR = {schema.SCHEMA_MINOR + 1}"
    text, edits = re.subn(r"^SCHEMA_MINOR = .*$", minor, module.read_text(), flags=re.MULTILINE)
    assert edits == 1
    module.write_text(text)
    program = newer / "bin" / "holdfast"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH={newer} exec {sys.executable} -m holdfast.cli "$@"\n'
    )
    program.chmod(0o755)
    scene.env["NEWER"] = str(program.parent)
    env = {**os.environ, "PYTHONPATH": str(newer)}
    subprocess.run([sys.executable, "-c", FIRST_EVENT], env=env, cwd=scene.directory, check=True)

    def mismatched() -> bool:
        """Whether this version is refused: by a running writer of the newer one, then by the marker."""
        try:
            scene.client()
        except HoldfastError as error:
            return error.code == "schema_mismatch"
        return False

    return mismatched


@code_fault("dispatch-waiting")
def prompt_for_a_leader_without_a_pane(scene: FaultScene) -> Exists:
    tmux = scene.enter(running_tmux())
    rt = scene.client(panes)
    scene.up("shop:panes")
    rt.world(NightShift, "ada").send(PromptAsked(tmux.socket))
    deferred = scene.blocked(rt, "notification_deferred", "universe", "shop")
    until(deferred, "the prompt is deferred")
    scene.env["PANE"] = tmux.start_program("lead", "cat")
    scene.env["SOCKET"] = tmux.socket
    return deferred


@variant("dispatch-waiting")
def notices_without_a_dispatch_worker(scene: FaultScene) -> Exists:
    tmux = scene.enter(running_tmux())
    rt = scene.client(panes)
    scene.env |= {"PANE": tmux.start_program("lead", "cat"), "SOCKET": tmux.socket}
    scene.up("shop:panes", "--role", "orchestrator", "--role", "world", "--role", "adapter")
    assert main(["dispatch", "leader", scene.env["PANE"], "--socket", tmux.socket]) == 0
    rt.world(NightShift, "ada").send(PromptAsked(tmux.socket))
    return scene.blocked(rt, "replay_pending", "universe", "shop")


@code_fault("run-stopped")
def stage_that_failed_too_often(scene: FaultScene) -> Exists:
    broken = scene.file("scale-is-broken")
    with start_driver(scene) as driver:
        assert driver.wait(DRIVER_S) == 1
        assert any("RunStopped" in line for line in driver.errors), driver.errors
    broken.unlink()
    return scene.blocked(scene.client(), "run_stopped", "run", "labels")


@variant("run-stopped")
def stage_of_a_killed_driver(scene: FaultScene) -> Exists:
    slow = scene.file("scale-is-slow")
    rt = scene.client()
    with start_driver(scene) as driver:
        called = scene.directory / "called"
        until(called.exists, "the first call", DRIVER_S)
        driver.kill()
    slow.unlink()
    return scene.blocked(rt, "no_driver", "run", "labels")


@variant("run-stopped")
def run_with_an_illegal_report(scene: FaultScene) -> Exists:
    """A child with a bug reports a row that it has not begun."""
    with running_service(Path(scene.store), 40, name="labels") as service:
        line = service.connect("child/with a bug")
        grant = line.claim(10, begin=5)
        with contextlib.suppress(IllegalTransition):
            line.report(grant, done=[(7, 8)])
    copy_driver(scene, "fresh")
    return scene.blocked(scene.client(), "run_halted", "run", "labels")


def copy_driver(scene: FaultScene, *options: str) -> list[str]:
    driver = scene.directory / "label.py"
    shutil.copy(label_driver.__file__, driver)
    words = [str(driver), scene.store, *options]
    scene.env["DRIVER"] = " ".join(words)
    return words


def start_driver(scene: FaultScene) -> Proc:
    return Proc([sys.executable, *copy_driver(scene)], cwd=scene.directory)
