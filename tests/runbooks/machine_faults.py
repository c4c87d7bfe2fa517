"""The faults behind the blocker codes of a machine, of another version, of panes and of stage runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import holdfast
from holdfast.cli import main
from holdfast.errors import HoldfastError
from holdfast.store import schema
from tests.process.watch import until, writers_of
from tests.runbooks import label_driver
from tests.runbooks.alert_faults import Exists
from tests.runbooks.blocker_faults import code_fault, variant
from tests.runbooks.fault_scene import FaultScene
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


@code_fault("run-stopped")
def stage_that_failed_too_often(scene: FaultScene) -> Exists:
    broken = scene.file("scale-is-broken")
    driver = scene.directory / "label.py"
    shutil.copy(label_driver.__file__, driver)
    scene.env["DRIVER"] = f"{driver} {scene.store}"
    done = subprocess.run(
        [sys.executable, str(driver), scene.store], cwd=scene.directory, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "RunStopped" in done.stderr, done.stderr
    broken.unlink()
    return scene.blocked(scene.client(), "run_stopped", "run", "labels")
