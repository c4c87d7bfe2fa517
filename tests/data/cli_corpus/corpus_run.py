"""Run the commands of the corpus in this process, and compare two runs.

It uses only `holdfast.cli.main`, so that the recorded code and this code run it. A value that two runs of the recorded
code print differently (a time, an age, a new id) is recorded as its type.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

from holdfast.cli import main

# The key of a value that is compared by its type.
TYPE = "compared by type"
# An error is one line: `holdfast: CODE: FIELD=VALUE … (HINT)`.
ERROR = re.compile(r"holdfast: (?P<code>[\w-]+):\s*(?P<rest>.*)")


def run_command(argv: list[str], places: dict[str, Path]) -> dict[str, Any]:
    """Run one command. Return its exit code, its JSON document, and the code and field names of its error."""
    out, err = io.StringIO(), io.StringIO()
    words = [word.format(**places) for word in argv]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    text = out.getvalue()
    for name, path in places.items():
        text = text.replace(str(path), f"{{{name}}}")
    document = json.loads(text) if text.lstrip().startswith(("{", "[")) else text
    return {"argv": argv, "exit": code, "document": document, "errors": _errors(err.getvalue())}


def _errors(text: str) -> list[dict[str, Any]]:
    found = [match for line in text.splitlines() if (match := ERROR.match(line))]
    return [
        {
            "code": match["code"],
            "fields": re.findall(r"(?:^| )([a-z_]+)=", re.sub(r" \([^()]*\)$", "", match["rest"])),
        }
        for match in found
    ]


def merge_runs(first: Any, second: Any) -> Any:
    """One record of two runs: equal values stay, other values become their type."""
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return {key: merge_runs(first[key], second[key]) for key in first}
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [merge_runs(*pair) for pair in zip(first, second, strict=True)]
    if first == second and type(first) is type(second):
        return first
    return {TYPE: sorted({type(first).__name__, type(second).__name__})}


def differences(
    recorded: Any, present: Any, *, by_key: dict[str, str], path: str = ""
) -> list[str]:
    """The places where a run differs from the record. Fields of `by_key` need the same type only."""
    if isinstance(recorded, dict) and TYPE in recorded:
        same = type(present).__name__ in recorded[TYPE]
        return [] if same else [f"{path}: {present!r} is not of type {recorded[TYPE]}"]
    if isinstance(recorded, dict) and isinstance(present, dict):
        if recorded.keys() != present.keys():
            return [f"{path}: keys {sorted(present)}, recorded {sorted(recorded)}"]
        return [
            line
            for key in recorded
            for line in differences(
                recorded[key], present[key], by_key=by_key, path=f"{path}.{key}"
            )
        ]
    if isinstance(recorded, list) and isinstance(present, list) and len(recorded) == len(present):
        return [
            line
            for at, pair in enumerate(zip(recorded, present, strict=True))
            for line in differences(*pair, by_key=by_key, path=f"{path}[{at}]")
        ]
    if path.rpartition(".")[2].partition("[")[0] in by_key and type(recorded) is type(present):
        return []
    if recorded != present or type(recorded) is not type(present):
        return [f"{path}: {present!r}, recorded {recorded!r}"]
    return []
