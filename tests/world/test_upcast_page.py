"""The example of docs/events.md, as it stands there, on a journal of the release before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import holdfast as hf
from holdfast.world.restore import check_snapshots
from tests.world.rig import Rig

MODULES = ("holdfast.app.declare",)

PAGE = Path(__file__).parents[2] / "docs" / "events.md"


class Deposited(hf.Event):
    """As the release before declared it."""

    euros: float


class Account(hf.World):
    cents: int = 0

    @hf.on(Deposited)
    def deposited(self, event: Deposited, cx: hf.Context) -> None:
        self.cents += round(event.euros * 100)


def example() -> dict[str, Any]:
    [code] = PAGE.read_text().split("```python\n")[1:]
    found: dict[str, Any] = {"__name__": "example"}
    exec(code.partition("```")[0], found)
    return found


def test_the_example_reads_what_the_release_before_has_stored() -> None:
    rig = Rig(hf.App("bank", worlds=[Account]))
    old = rig.world(Account, "ada")
    old.send(Deposited(1.5))
    rig.run()
    # This one is not handled before the deploy.
    old.send(Deposited(2.25))
    page = example()
    new = Rig(page["app"], rig.backend, rig.clock)
    ada = new.world(page["Account"], "ada")
    rig.expire()
    ada.send(page["Deposited"](100))
    new.run(new.worker("A", "2"))
    assert ada.state().cents == 475
    assert [one.event.cents for one in ada.journal()] == [150, 225, 100]
    assert [one.step.ingress.value[0] for one in ada.journal()] == [1, 1, 2]
    assert new.read(check_snapshots, new.kernel(ada)) == 3
