"""The paths of hidden values: `--redact PATH,…`, the variable HOLDFAST_REDACT, and `hf.App(redact=…)` of loaded applications.

Every command prints its document through `emit`, which hides these values in the document and in its text.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import HoldfastError
from holdfast.redaction import QUOTING_CODES, VARIABLE, Redactor, error_class, parse_paths

if TYPE_CHECKING:
    from holdfast.app.app import App
    from holdfast.ops.redacted_documents import RedactionRules


class ShownResult(NamedTuple):
    document: Any
    text: str


def add_redact(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--redact",
        metavar="PATH,…",
        action="append",
        default=[],
        help="hide the values of these fields, such as Account.iban or *.password; repeatable; added to those of the "
        f"application and of ${VARIABLE}",
    )


def redactor_of(args: argparse.Namespace) -> Redactor:
    """Return the paths of the option and of the environment. Raise BadRedaction for a malformed one."""
    texts = [*getattr(args, "redact", ()), os.environ.get(VARIABLE, "")]
    return Redactor(path for text in texts for path in parse_paths(text))


def warn_unknown_types(redactor: Redactor, apps: Iterable[App]) -> None:
    """Print the paths whose type no application declares: they may be mistyped, or of another application."""
    names = {name for app in apps for name in app.type_names}
    for path in redactor.unknown_types(names) if names else ():
        print(f"holdfast: --redact: no application declares the type of {path}", file=sys.stderr)


class ProcessRules:
    """The rules of a process: its options, and the applications that it has loaded so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._redactor = redactor_of(args)
        self._rules: RedactionRules | None = None
        self._apps: list[App] = []

    def __call__(self) -> RedactionRules:
        loaded = sys.modules.get("holdfast.ops.app_loader")
        apps: list[App] = [] if loaded is None else loaded.loaded_apps
        if self._rules is None or apps != self._apps:
            from holdfast.ops.redacted_documents import RedactionRules

            self._apps = list(apps)
            redactor = reduce(or_, [app.redactor for app in apps], self._redactor)
            self._rules = RedactionRules(redactor, apps)
        return self._rules


def hide_result(args: argparse.Namespace, document: Any, text: str) -> ShownResult:
    """Return the document and the text of a command without hidden values."""
    rules = ProcessRules(args)()
    if not rules:
        return ShownResult(document, text)
    from holdfast.ops.redacted_documents import DocumentRedactor

    hiding = DocumentRedactor(rules)
    shown = hiding.hide(document)
    return ShownResult(shown, hiding.hide_text(text))


def hide_quotes(args: argparse.Namespace, error: HoldfastError) -> None:
    """Reduce the texts of an error that may quote hidden values."""
    if error.code in QUOTING_CODES and ProcessRules(args)():
        for name in ("error", "why"):
            if name in error.fields:
                error.fields[name] = error_class(str(error.fields[name]))
