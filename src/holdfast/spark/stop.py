"""`Stop`: when a run stops by itself, because going on would only cost."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.ledger.stop_rules import StopRules
from holdfast.spark.errors import NotAStage

OF_DEFAULT = 100


@dataclass(frozen=True)
class Stop:
    """Bounds of one `stage.run`; the first that is reached stops it.

    `failures`: so many rows failed for good. `share`: such a share of the rows that ended, once `of` did.
    `cost`: the sum of `call.cost`. `same_error`: so many rows failed for good with one class and one
    normalised text. 0 is no bound.
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
                raise NotAStage(what=f"stop_after.{name}", why="a whole number", found=found)
        for name, most in (("share", 1.0), ("cost", float("inf"))):
            found = getattr(self, name)
            if not isinstance(found, int | float) or isinstance(found, bool):
                raise NotAStage(what=f"stop_after.{name}", why="a number", found=found)
            if not 0 <= found <= most or found == float("inf"):
                raise NotAStage(what=f"stop_after.{name}", why="out of bounds", found=found)
        rules = StopRules(
            self.failures, float(self.share), self.of, float(self.cost), self.same_error
        )
        if not rules.armed:
            raise NotAStage(what="stop_after", why="no bound is given", found=self)
        return rules
