"""Runs the example of docs/events.md on a journal written by the previous release of the sample
app."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import holdfast as hf
from holdfast.world.restore import check_snapshots
from tests.world.rig import WorldRig

MODULES = ("holdfast.app.definitions",)

PAGE = Path(__file__).parents[2] / "docs" / "events.md"


class EuroDeposit(hf.Event):
    """The event as the previous release declared it."""

    euros: float


EuroDeposit.__name__ = "Deposited"


class EuroAccount(hf.World):
    cents: int = 0

    @hf.on(EuroDeposit)
    def deposited(self, event: EuroDeposit, cx: hf.Context) -> None:
        self.cents += round(event.euros * 100)


EuroAccount.__name__ = "Account"


def run_page_example() -> dict[str, Any]:
    [code] = PAGE.read_text().split("```python\n")[1:]
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(code.partition("```")[0], namespace)
    return namespace


def test_docs_upcast_example_reads_events_of_the_previous_release() -> None:
    rig = WorldRig(hf.App("bank", worlds=[EuroAccount]))
    old = rig.world(EuroAccount, "ada")
    old.send(EuroDeposit(1.5))
    rig.run()
    # This event is still in the inbox at the deploy.
    old.send(EuroDeposit(2.25))
    page = run_page_example()
    new = WorldRig(page["app"], rig.backend, rig.clock)
    ada = new.world(page["Account"], "ada")
    rig.advance_clock()
    ada.send(page["Deposited"](100))
    new.run(new.worker("A", "2"))
    assert ada.state().cents == 475
    assert [one.event.cents for one in ada.journal()] == [150, 225, 100]
    assert [one.step.ingress.value[0] for one in ada.journal()] == [1, 1, 2]
    assert new.read(check_snapshots, new.world_spec(ada)) == 3
