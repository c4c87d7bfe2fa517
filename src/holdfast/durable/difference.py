"""`Difference`: the finding of a consistency check.

Each feature has a module `consistency` whose checks recompute derived rows from their source and yield a
`Difference` for each deviation. `ops.verify` runs all of them.
"""

from __future__ import annotations

from typing import NamedTuple


class Difference(NamedTuple):
    """A stored value that differs from its source: its location, the stored value, the expected value."""

    kind: str
    where: str
    what: str
    found: object
    expected: object
    # The height of the log record that determines the expected value, 0 for none.
    height: int = 0

    def document(self) -> dict[str, str]:
        """Return the difference as text fields, as `holdfast verify --json` prints it."""
        what = f"{self.what} at height {self.height}" if self.height else self.what
        return {
            "kind": self.kind,
            "where": self.where,
            "what": what,
            "found": _text(self.found),
            "expected": _text(self.expected),
        }


def _text(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bytes):
        return value.hex()
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)
