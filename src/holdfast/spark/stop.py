"""`Stop`: bounds at which a run stops before it wastes further calls."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.ledger.stop_rules import StopRules
from holdfast.spark.errors import NotAStage

OF_DEFAULT = 100


@dataclass(frozen=True)
class Stop:
    """Bounds of one `stage.run`. The first bound reached stops the run.

    `failures`: number of rows that finally failed. `share`: failed share of the finished rows, once
    `of` rows finished. `cost`: sum of `call.cost`. `same_error`: number of rows that finally failed
    with one error class and one normalised text. 0 means unlimited.
    """

    failures: int = 0
    share: float = 0.0
    of: int = OF_DEFAULT
    cost: float = 0.0
    same_error: int = 0

    def rules(self) -> StopRules:
        for name in ("failures", "of", "same_error"):
            found = getattr(self, name)
            if not isinstance(found, int) or isinstance(found, bool) or found < 0:
                raise NotAStage(
                    what=f"stop_after.{name}", why="must be a whole number", found=found
                )
        for name, most in (("share", 1.0), ("cost", float("inf"))):
            found = getattr(self, name)
            if not isinstance(found, int | float) or isinstance(found, bool):
                raise NotAStage(what=f"stop_after.{name}", why="must be a number", found=found)
            if not 0 <= found <= most or found == float("inf"):
                raise NotAStage(what=f"stop_after.{name}", why="out of bounds", found=found)
        rules = StopRules(
            self.failures, float(self.share), self.of, float(self.cost), self.same_error
        )
        if not rules.has_bounds:
            raise NotAStage(what="stop_after", why="no bound is given", found=self)
        return rules
