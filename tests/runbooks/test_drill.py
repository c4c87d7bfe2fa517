"""The newcomer's drill: ten faults of a real system, the commands that mended them, and the judge before and after.

`docs/drill-results.md` has the steps of a person. `python -m tests.runbooks.drill NAME` plays a fault by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.watch import until
from tests.runbooks.drill_faults import DRILLS
from tests.runbooks.fault_scene import FaultScene
from tests.runbooks.test_runbooks import open_scene

# The commands that the newcomer typed. Questions come first: their exit code is that of the blocker.
REMEDIES = {
    "parked-worlds": """
        holdfast ready || true
        holdfast why world Cashier/a || true
        kill $RUNNING
        rm tax-changed
        holdfast up drill:app &
        holdfast worlds resume Cashier/a
        holdfast worlds resume Cashier/b
    """,
    "dead-letters": """
        holdfast tasks list --state failed
        holdfast flows redrive --all --dry-run
        holdfast flows redrive --all
        holdfast tasks redrive --all --dry-run
        holdfast tasks redrive --all
    """,
    "full-disk": """
        holdfast store info
        rm disk/old.log
    """,
    "stopped-writer": """
        holdfast doctor || true
        holdfast workers list
    """,
    "lost-server": """
        holdfast doctor || true
        start the server
        until holdfast ready; do sleep 1; done
    """,
    "exhausted-budget": """
        holdfast why world Clerk/a || true
        holdfast dead list
        holdfast effects list
        python -c 'import holdfast as hf, drill; rt = drill.app.open(roles=()); hf.llm.set_limit(rt.store, universe="market", tokens=100000)'
        holdfast effects redrive llm.chat --code over_budget
    """,
    "stuck-reducer": """
        holdfast why world Cashier/a || true
        holdfast up drill:app &
        holdfast worlds resume Cashier/a
    """,
    "no-worker-for-a-type": """
        holdfast why world Clerk/a || true
        holdfast up drill:app &
    """,
    "skewed-clocks": """
        holdfast why schedule labels || true
        holdfast doctor
        holdfast up drill:app &
        holdfast schedules run-now labels
    """,
    "backlog-over-its-limit": """
        holdfast why universe market || true
        holdfast why queue default || true
        holdfast up drill:app &
    """,
}


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultScene]:
    yield from open_scene(tmp_path, monkeypatch, str(tmp_path / "store"))


def test_every_drill_has_a_remedy() -> None:
    assert REMEDIES.keys() == DRILLS.keys()


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", DRILLS)
def test_commands_of_the_newcomer_mend_the_fault(name: str, scene: FaultScene) -> None:
    drill = DRILLS[name](scene)
    # The client of a judge itself repairs a stopped writer, and it waits for a lost server.
    assert name in ("stopped-writer", "lost-server") or not drill.judge()
    for line in filter(None, map(str.strip, REMEDIES[name].splitlines())):
        if line == "start the server":
            assert scene.start_server is not None
            scene.start_server()
        else:
            print(f"$ {line}\n{scene.run_line(line)}")
    until(drill.judge, drill.complaint, 120.0, poll_s=0.5)
