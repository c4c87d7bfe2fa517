"""Variants of the drill: the commands that a reader of the pages typed, and the judge before and after.

`docs/drill-results.md` has what the pages lacked. `python -m tests.runbooks.drill NAME` plays a variant by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.watch import until
from tests.runbooks.drill_faults import DRILLS
from tests.runbooks.drill_variants import VARIANTS
from tests.runbooks.fault_scene import FaultScene
from tests.runbooks.test_runbooks import open_scene

# Questions come first: their exit code is that of the blocker.
REMEDIES = {
    "parked-and-pinned": """
        holdfast why world Cashier/a || true
        holdfast ready || true
        holdfast up drill:app &
        holdfast worlds resume Cashier/a
        until holdfast why world Cashier/a | grep -q worker_pinned_away; do sleep 1; done
        holdfast worlds unpin Cashier/a
        until holdfast why world Cashier/a; do sleep 1; done
    """,
    "failed-events": """
        holdfast ready || true
        holdfast why world Cashier/a || true
        holdfast dead list
        holdfast dead list market/failed-events
        holdfast dead redrive market/failed-events --all
        until holdfast dead list | grep -q "no dead letters"; do sleep 1; done
    """,
    "full-disk-at-the-start": """
        holdfast ready || true
        holdfast store info || true
        df -h "$DISK"
        mount -o remount,size=64m "$DISK"
        holdfast store info
        holdfast up drill:app &
        holdfast verify
    """,
    "frozen-machine": """
        holdfast why world Cashier/a || true
        holdfast workers list
        holdfast up drill:app &
        until holdfast why world Cashier/a; do sleep 1; done
    """,
    "read-only-server": """
        holdfast ready || true
        holdfast doctor || true
        sql: ALTER DATABASE jobs RESET default_transaction_read_only
        until holdfast ready; do sleep 1; done
    """,
    "exhausted-budget-of-a-world": """
        holdfast why world Clerk/b || true
        holdfast dead list
        holdfast dead list market/effects/llm.chat
        python -c 'import holdfast as hf, drill; rt = drill.app.open(roles=()); print(hf.llm.account(rt.store, universe="market", world=rt.world(drill.Clerk, "b"), unit="tokens"))'
        python -c 'import holdfast as hf, drill; rt = drill.app.open(roles=()); hf.llm.set_limit(rt.store, universe="market", world=rt.world(drill.Clerk, "b"), tokens=100000)'
        holdfast effects redrive llm.chat --code over_budget
    """,
    "two-stuck-reducers": """
        holdfast ready || true
        holdfast why world Cashier/a || true
        holdfast why world Cashier/c || true
        holdfast up drill:app &
        holdfast worlds resume Cashier/a
        holdfast worlds resume Cashier/b
        until holdfast why world Cashier/a; do sleep 1; done
    """,
    "no-worker-for-a-kind": """
        holdfast why world Clerk/a || true
        until holdfast why queue effects/llm.chat | grep -q no_effect_worker; do sleep 1; done
        holdfast up drill:app --role adapter --kinds llm.chat &
        until holdfast why queue effects/llm.chat; do sleep 1; done
    """,
    "clock-ahead": """
        holdfast why schedule labels || true
        holdfast schedules show labels
        holdfast doctor || true
        holdfast up drill:app &
        holdfast schedules run-now labels
    """,
    "full-inbox-of-a-paused-world": """
        holdfast why world Cashier/a || true
        holdfast limits show
        holdfast worlds resume Cashier/a
        until holdfast why world Cashier/a; do sleep 1; done
    """,
}


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultScene]:
    yield from open_scene(tmp_path, monkeypatch, str(tmp_path / "store"))


def test_every_variant_has_a_remedy_and_its_own_name() -> None:
    assert REMEDIES.keys() == VARIANTS.keys()
    assert not VARIANTS.keys() & DRILLS.keys()


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", VARIANTS)
def test_commands_of_the_pages_mend_the_variant(name: str, scene: FaultScene) -> None:
    drill = VARIANTS[name](scene)
    assert not drill.judge()
    for line in filter(None, map(str.strip, REMEDIES[name].splitlines())):
        run = scene.run_sql if line.startswith("sql: ") else scene.run_line
        print(f"$ {line}\n{run(line.removeprefix('sql: '))}")
    until(drill.judge, drill.complaint, 120.0, poll_s=0.5)
