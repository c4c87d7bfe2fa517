"""The JSON output of every command, compared with the output of the code before the rename.

`tests/data/cli_corpus` has a store of that code, the commands in order, and their recorded output. The commands change
the store, so all of them run in order over one copy. Keys, types, values, error codes, error fields and exit codes are
compared. Values that vary between two runs of the recorded code are compared by type.
"""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import COMMANDS
from tests.data.cli_corpus.corpus_run import TYPE, differences, merge_runs, run_command
from tests.processes import Proc

DATA = Path(__file__).resolve().parent.parent / "data" / "cli_corpus"
CORPUS: list[dict[str, Any]] = json.loads((DATA / "corpus.json").read_text("utf-8"))
# Fields that are compared by type, with the reason.
BY_KEY = {
    "next": "sentences for operators, reworded",
    "text": "a sentence for operators, reworded",
    "why": "a sentence for operators, reworded",
    "bytes": "stored operations have shorter names, and file sizes depend on the file system",
    "disk_bytes": "file sizes depend on the file system",
    "rows": "effects with a tag got an index, and a purge an audit entry",
    "commit_no": "a purge has a further commit, of its audit entry",
    "draining": "a drain reaches every worker of the process",
    "written": "a rebuild adds the error groups of an older store",
}
# Keys that a command's document got after the record, with the reason. A dotted key is one of the items of a list.
ADDED_KEYS = {
    "verify": dict.fromkeys(("flows", "flow_findings", "parks"), "the replay of stored flows"),
    "tasks": {"tag": "the tag of a task", "tasks.tag": "the same", "queues.paused_ns": "the pause of a queue",
              "trace_id": "the trace of the submission"},
    "worlds": {"epoch": "the fencing epoch of the lease", "leased_until_ns": "the end of the lease",
               "entries.value": "the fields of the event"},
    "workers": dict.fromkeys(("workers.leases", "workers.since_ns", "workers.version"), "what a worker reports"),
    "effects": dict.fromkeys(("intents.kind", "intents.state"), "a list by tag has several kinds"),
}  # fmt: skip


# Key spaces that the recorded code did not write.
ADDED_SPACES = ("statistic", "audit")


def without_added_keys(run: dict[str, Any]) -> dict[str, Any]:
    """Return the run without the keys that its document got after the record."""
    document = run["document"]
    if isinstance(document, dict):
        added = ADDED_KEYS.get(run["argv"][0], {})
        document = {
            key: _without(value, f"{key}.", added)
            for key, value in document.items()
            if key not in added
        }
    return {**run, "document": document}


def with_changed_spaces(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with some digests by type: audit entries of a purge have numbers, and workers got fields."""
    document = record["document"]
    if not isinstance(document, dict) or not isinstance(document.get("spaces"), list):
        return record
    spaces = [
        {**item, "sha256": {TYPE: ["str"]}} if item["space"] in ("sequence", "worker") else item
        for item in document["spaces"]
    ]
    return {**record, "document": {**document, "spaces": spaces}}


def _without(items: Any, prefix: str, added: dict[str, str]) -> Any:
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        return items
    return [
        {key: value for key, value in item.items() if prefix + key not in added}
        for item in items
        if item.get("space") not in ADDED_SPACES
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("short_linger")
def test_json_output_of_every_command_equals_the_recorded_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {name: tmp_path / name for name in ("store", "damaged", "tmp")} | {"data": DATA}
    with tarfile.open(DATA / "store.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    for name in ("store", "damaged"):
        places[name].chmod(0o700)
    places["tmp"].mkdir()
    monkeypatch.delenv("HOLDFAST_STORE", raising=False)
    monkeypatch.chdir(DATA)
    monkeypatch.setattr(sys, "path", [str(DATA), *sys.path])
    for module in ("corpus_app", "changed_app"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    found = [
        f"holdfast {' '.join(record['argv'])}: {line}"
        for record in CORPUS
        for line in differences(
            with_changed_spaces(record),
            without_added_keys(run_command(record["argv"], places)),
            by_key=BY_KEY,
        )
    ]
    assert not found, "\n".join(found)


def test_up_prints_the_recorded_ready_document(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast.cli", "up", "corpus_app:app", "--json"]
    options = ["--worker", "w9", "--store", str(tmp_path / "store")]
    with Proc.spawn([*command, *options], ready='{"ready"', cwd=DATA) as up:
        up.terminate()
        assert up.wait() == 0
        assert json.loads(up.lines[0]) == {
            "ready": "w9",
            "universe": "grid",
            "roles": ["orchestrator", "world", "adapter", "timer", "task"],
            "store": f"lmdb:{tmp_path / 'store'}",
        }


def test_json_corpus_contains_every_command_with_json_output() -> None:
    recorded = {record["argv"][0] for record in CORPUS}
    # `up` has a test above, `dev` has no end, the demo is an example, and `sim` and `tokens` print no JSON. Others are newer than the
    # corpus (tests/cli/test_flows.py, tests/cli/test_schedules.py, tests/cli/test_why.py, tests/cli/test_doctor.py,
    # tests/cli/test_limits.py, tests/cli/test_jobs.py, tests/api_server).
    assert recorded == set(COMMANDS) - {
        "up", "dev", "demo", "sim", "flows", "schedules", "serve", "tokens", "audit", "why", "doctor", "limits", "queues", "errors", "budgets",
        "jobs",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("recorded", "found"),
    [
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": [1]}, {"a": [1, 1]}),
        ({"a": {TYPE: ["int"]}}, {"a": "1"}),
        ({"text": "x"}, {"text": None}),
    ],
)
def test_corpus_comparison_finds_a_different_value_key_or_type(recorded: Any, found: Any) -> None:
    assert len(differences(recorded, found, by_key=BY_KEY)) == 1


def test_corpus_comparison_accepts_varying_values_and_reworded_texts() -> None:
    recorded = merge_runs({"at_ns": 1, "text": "x", "n": 3}, {"at_ns": 2, "text": "x", "n": 3})
    assert differences(recorded, {"at_ns": 9, "text": "y", "n": 3}, by_key=BY_KEY) == []
