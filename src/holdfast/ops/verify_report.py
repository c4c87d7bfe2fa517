"""The saved report of the last `holdfast verify --save`, for a universe or for the whole store.

setting <u> "verify"     the report; an empty universe stands for the whole store
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast import codec
from holdfast.app.app import App
from holdfast.errors import NotFound
from holdfast.store import schema
from holdfast.store.api import Txn
from holdfast.store.schema import Space

# The most findings of each kind that a saved report keeps, and the most characters of a text in them.
FINDINGS_KEPT = 100
CHARS_KEPT = 500


class NoReport(NotFound):
    hint = "run `holdfast verify --save` first"


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a verification. `universe` is null if it covers the whole store. The counts are complete, the
    lists have the first findings."""

    at_ns: int
    universe: str | None
    app: str | None
    sound: bool
    worlds: int
    steps: int
    compared: int
    not_compared: int
    findings_count: int
    findings: list[dict[str, Any]]
    differences_count: int
    differences: list[dict[str, Any]]
    flows: int
    flow_findings_count: int
    flow_findings: list[dict[str, Any]]
    parks_count: int
    # The fingerprint of the code that replayed. Null without an app, and in reports of former releases.
    build: str | None = None


def build_of(app: App) -> str:
    """Return the fingerprint of the code of an app's worlds and flows."""
    worlds = sorted((name, program.version) for name, program in app.programs.items())
    flows = sorted((name, flow.code_version) for name, flow in app.flows.items())
    return codec.digest(codec.pack([worlds, flows])).hex()[:12]


def make_report(
    document: dict[str, Any],
    at_ns: int,
    universe: str | None,
    app: str | None,
    build: str | None = None,
) -> VerifyReport:
    """Build a report from the document that `holdfast verify --json` prints."""
    lists = {
        name: [_shortened(item) for item in document[name][:FINDINGS_KEPT]]
        for name in ("findings", "differences", "flow_findings")
    }
    counts = {f"{name}_count": len(document[name]) for name in (*lists, "parks")}
    plain = ("sound", "worlds", "steps", "compared", "not_compared", "flows")
    about = {"at_ns": at_ns, "universe": universe, "app": app, "build": build}
    fields = about | {name: document[name] for name in plain} | lists | counts
    return msgspec.convert(fields, VerifyReport)


def save(txn: Txn, report: VerifyReport) -> None:
    """Replace the saved report of the same universe."""
    txn.put(_key(report.universe or ""), codec.pack(msgspec.to_builtins(report)))


def find_last(txn: Txn, universe: str) -> VerifyReport:
    """Return the newer one of the reports of the universe and of the whole store."""
    rows = [row for name in (universe, "") if (row := txn.get(_key(name))) is not None]
    if not rows:
        raise NoReport(what="verify report", universe=universe)
    reports = [msgspec.convert(codec.unpack(row), VerifyReport) for row in rows]
    return max(reports, key=lambda report: report.at_ns)


def _shortened(item: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value[:CHARS_KEPT] if isinstance(value, str) else value
        for name, value in msgspec.to_builtins(item).items()
    }


def _key(universe: str) -> bytes:
    return schema.key_prefix(Space.SETTING, universe, "verify")
