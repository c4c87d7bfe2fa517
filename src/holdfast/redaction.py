"""Redaction: hides values of payloads by their paths. Pure: JSON-able values in, JSON-able values out.

    Redactor(["Account.iban", "order.args.card", "*.password"])

- A path is the name of a type, and the names of fields. A type is a world, an event, an effect, a task or a flow. A `*`
  as a field is any member or item. A path passes through lists. `*` in place of the type is any type, and the fields are
  then found at any depth.
- `Redactor.hide` replaces the values of these fields by REDACTED, and adds them to a `HiddenValues`.
- `HiddenValues.clean` removes these values from a text, such as the text of an error that quotes them.

Nothing of a hidden value is shown, neither its length nor its hash. Stored data does not change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any, NamedTuple

from holdfast.errors import Invalid

REDACTED = "[redacted]"
PATHS_MAX = 1_000
PATH_CHARS_MAX = 500
# The variable with paths, divided by commas.
VARIABLE = "HOLDFAST_REDACT"
# Shorter texts and numbers are removed from a text only as whole words.
WORD_CHARS = 4
# A text that was cut may end inside of a hidden value: at least this number of its characters is removed.
PART_CHARS_MIN = 4
# The codes of errors whose texts quote the application.
QUOTING_CODES = frozenset({"no_reply", "replay_diverged", "replay_failed"})
# The parts of a task, a flow or an effect. A path without one applies to each.
ARGS = "args"
ANY = "*"
# Parts with several values by name.
NAMED_PARTS = ("published", "steps")

# The fields of a path, behind its type.
FieldPath = tuple[str, ...]
# The names that a member may have in a path; None if they are not known.
Keys = tuple[str, ...] | None


class BadRedaction(Invalid):
    code = "bad_redaction"
    hint = "a path names a type and a field: Account.iban, order.args.card or *.password"


def parse_paths(text: str) -> list[str]:
    """Return the paths of an option or of the environment, which are divided by commas."""
    return [path.strip() for path in text.split(",") if path.strip()]


class HiddenValues:
    """The values that were hidden in a document."""

    def __init__(self) -> None:
        self._texts: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._texts)

    def add(self, value: Any) -> None:
        """Add the texts and numbers of a value, at any depth."""
        if isinstance(value, Mapping):
            for key, item in value.items():
                self.add(key)
                self.add(item)
        elif isinstance(value, list | tuple):
            for item in value:
                self.add(item)
        elif value is not None and not isinstance(value, bool) and value not in ("", REDACTED):
            self._texts.update(_spellings(value))

    def update(self, other: HiddenValues) -> None:
        self._texts |= other._texts

    def clean(self, text: str) -> str:
        """Return a text without the hidden values, also if its start or its end is cut."""
        if not self._texts or not text:
            return text
        # A pattern of every value of a long list takes seconds to compile.
        found = sorted((value for value in self._texts if value in text), key=len, reverse=True)
        if found:
            text = re.sub("|".join(map(_spelling_pattern, found)), REDACTED, text)
        return self._clean_cuts(text)

    def _clean_cuts(self, text: str) -> str:
        parts = {text[at : at + PART_CHARS_MIN] for at in range(len(text))}
        for value in self._texts:
            start, end = value[:PART_CHARS_MIN], value[-PART_CHARS_MIN:]
            if len(value) >= PART_CHARS_MIN and parts.isdisjoint((start, end)):
                continue
            at = text.find(start)
            while at >= 0:
                # The end of the text, or the mark of a cut.
                until = text.find("…", at)
                until = len(text) if until < 0 else until
                if value.startswith(text[at:until]):
                    text = text[:at] + REDACTED + text[until:]
                at = text.find(start, at + 1)
            until = text.find(end) + len(end)
            if until >= len(end) and value.endswith(text[:until]):
                text = REDACTED + text[until:]
        return text


class ParameterNames(NamedTuple):
    """The names of the parameters of a function."""

    positional: tuple[str, ...]
    named: frozenset[str]
    # Of `*items` and `**options`; empty without one.
    rest: str = ""
    rest_by_name: str = ""

    @classmethod
    def of(cls, signature: Signature) -> ParameterNames:
        names: dict[Any, list[str]] = {}
        for name, parameter in signature.parameters.items():
            names.setdefault(parameter.kind, []).append(name)
        by_place = names.get(Parameter.POSITIONAL_ONLY, [])
        by_both = names.get(Parameter.POSITIONAL_OR_KEYWORD, [])
        return cls(
            (*by_place, *by_both),
            frozenset((*by_both, *names.get(Parameter.KEYWORD_ONLY, []))),
            *names.get(Parameter.VAR_POSITIONAL, [""]),
            *names.get(Parameter.VAR_KEYWORD, [""]),
        )

    def of_position(self, at: int) -> str:
        return self.positional[at] if at < len(self.positional) else self.rest


class Redactor:
    """Compiled paths."""

    def __init__(self, paths: Iterable[str] = ()) -> None:
        self.paths = tuple(dict.fromkeys(_checked(path) for path in paths))
        if len(self.paths) > PATHS_MAX:
            raise BadRedaction(what="redact", paths=len(self.paths), max=PATHS_MAX)
        # The fields of the paths of any type.
        self._anywhere = tuple(
            tuple(path.split(".")[1:]) for path in self.paths if path.startswith("*.")
        )

    def __bool__(self) -> bool:
        return bool(self.paths)

    def __or__(self, other: Redactor) -> Redactor:
        return Redactor((*self.paths, *other.paths))

    @property
    def any_type_fields(self) -> frozenset[str]:
        """The last fields of the paths of any type."""
        return frozenset(fields[-1] for fields in self._anywhere)

    def fields_of(self, name: str) -> tuple[FieldPath, ...]:
        """The fields of the paths that name this type. A name may contain dots."""
        start = name + "."
        return tuple(
            tuple(path[len(start) :].split(".")) for path in self.paths if path.startswith(start)
        )

    def unknown_types(self, names: Iterable[str]) -> list[str]:
        """Return the paths whose type is none of these."""
        known = tuple(f"{name}." for name in (*names, ANY))
        return [path for path in self.paths if not path.startswith(known)]

    def hide(self, name: str, value: Any, hidden: HiddenValues) -> Any:
        """Return the value of a type without the fields that its paths name."""
        return self._hide(value, self.fields_of(name), hidden)

    def hide_parts(
        self,
        name: str,
        parts: Mapping[str, Any],
        parameters: Sequence[ParameterNames] | None,
        hidden: HiddenValues,
    ) -> dict[str, Any]:
        """Return the parts of a task, flow or effect, such as `args` and `result`, without hidden fields.

        `parameters` are those of each function with this name. If they are not known, any field may name an argument.
        """
        paths = self.fields_of(name)
        shown: dict[str, Any] = {}
        for part, value in parts.items():
            role = ARGS if part == "kwargs" else part
            inner = [fields[1:] for fields in paths if fields[0] in (role, ANY)]
            if () in inner:
                hidden.add(value)
                # The form of arguments stays: a list and an object.
                shown[part] = [REDACTED] if isinstance(value, list) and part == ARGS else (
                    {REDACTED: REDACTED} if part == "kwargs" and value else REDACTED
                )  # fmt: skip
                continue
            within = (*(fields for fields in inner if fields), *paths)
            if part == ARGS and isinstance(value, list):
                shown[part] = [
                    self._hide_member(_argument_keys(at, parameters), item, within, hidden)
                    for at, item in enumerate(value)
                ]
            elif part == "kwargs" and isinstance(value, Mapping):
                shown[part] = {
                    key: self._hide_member(
                        _keyword_keys(str(key), parameters), item, within, hidden
                    )
                    for key, item in value.items()
                }
            elif part in NAMED_PARTS and isinstance(value, Mapping):
                named = (*(fields for fields in inner if fields), *((ANY, *path) for path in paths))
                shown[part] = self._hide(value, named, hidden)
            else:
                shown[part] = self._hide(value, within, hidden)
        return shown

    def _hide(self, value: Any, paths: tuple[FieldPath, ...], hidden: HiddenValues) -> Any:
        if isinstance(value, Mapping):
            return {
                key: self._hide_member((str(key),), item, paths, hidden)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._hide_item(at, item, paths, hidden) for at, item in enumerate(value)]
        return value

    def _hide_member(
        self, keys: Keys, item: Any, paths: tuple[FieldPath, ...], hidden: HiddenValues
    ) -> Any:
        within = [
            fields[1:]
            for fields in (*paths, *self._anywhere)
            if keys is None or fields[0] == ANY or fields[0] in keys
        ]
        if () in within:
            hidden.add(item)
            return REDACTED
        return self._hide(item, tuple(within), hidden)

    def _hide_item(
        self, at: int, item: Any, paths: tuple[FieldPath, ...], hidden: HiddenValues
    ) -> Any:
        within = [fields[1:] for fields in paths if fields[0] in (ANY, str(at))]
        if () in within:
            hidden.add(item)
            return REDACTED
        return self._hide(item, (*within, *paths), hidden)


def error_class(text: str) -> str:
    """Reduce the text of an error, which may quote values, to the name of its class. The name is certain in a traceback only."""
    if text.startswith("Traceback (most recent call last):"):
        for line in text.splitlines()[1:]:
            if line and not line[0].isspace():
                name = line.partition(":")[0]
                if re.fullmatch(r"[A-Za-z_][\w.]*", name):
                    return f"{name}: {REDACTED}"
                break
    return REDACTED


def _checked(path: str) -> str:
    fields = path.split(".") if isinstance(path, str) else []
    if len(fields) < 2 or not all(fields) or len(path) > PATH_CHARS_MAX:
        raise BadRedaction(what="redact", path=str(path)[:PATH_CHARS_MAX])
    if any(char.isspace() or char == "," for char in path):
        raise BadRedaction(what="redact", path=path, why="a path has neither spaces nor commas")
    return path


def _argument_keys(at: int, parameters: Sequence[ParameterNames] | None) -> Keys:
    if parameters is None:
        return None
    return (str(at), *(name for names in parameters if (name := names.of_position(at))))


def _keyword_keys(key: str, parameters: Sequence[ParameterNames] | None) -> Keys:
    return (key, *(names.rest_by_name for names in parameters or () if key not in names.named))


def _spellings(value: Any) -> set[str]:
    """Return the texts by which a text or a number appears in JSON, in `repr` and in tables."""
    if isinstance(value, int):
        return {str(value), f"{value:,}"}
    if isinstance(value, float):
        return {str(value), json.dumps(value)}
    text = str(value)
    shown = "".join(char if char.isprintable() else "�" for char in text)
    return {
        text,
        json.dumps(text)[1:-1],
        json.dumps(text, ensure_ascii=False)[1:-1],
        repr(text)[1:-1],
        shown,
        *(line.strip() for line in text.splitlines() if line.strip()),
    }


def _spelling_pattern(text: str) -> str:
    escaped = re.escape(text)
    is_word = len(text) < WORD_CHARS or text.replace(",", "").replace(".", "").lstrip("-").isdigit()
    return rf"(?<!\w){escaped}(?!\w)" if is_word else escaped
