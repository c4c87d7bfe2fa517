"""Redacted documents: hides the values that the paths of a `Redactor` name in JSON documents about subjects.

A document is recognized by its fields, so the answers of the HTTP API, the data of its event streams and the output of
commands go through the same function. It hides

- values: arguments, results, progress, states, events, replies, published values and values of steps, by their paths;
- texts, such as those of errors: the hidden values of their subject are removed from them. If these are not known, as for
  the states before a failed event, the text is reduced to the class of the error;
- payloads in bytes, such as those of dead letters, as a whole.

A text of a subject without a path stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import inspect

from holdfast.durable import error_groups
from holdfast.errors import HoldfastError
from holdfast.flows.model import RECEIVE_NAME, UNDO_PREFIX
from holdfast.redaction import (
    QUOTING_CODES,
    REDACTED,
    HiddenValues,
    ParameterNames,
    Redactor,
    error_class,
)

if TYPE_CHECKING:
    from holdfast.app.app import App
    from holdfast.store.api import Store

Document = dict[str, Any]
STEPS_READ_MAX = 1_000


class SubjectPayload(NamedTuple):
    """The name of a task or a flow, its parts and its error. Of a flow also the names of its failed steps and of its child flows."""

    name: str
    parts: Mapping[str, Any]
    error: str = ""
    failed: frozenset[str] = frozenset()
    children: frozenset[str] = frozenset()


# Returns the payload of `task/ID` or `flow/ID`; None if it is gone, or too large to be read.
PayloadReader = Callable[[str, str], SubjectPayload | None]


class RedactionRules:
    """The paths, and what the applications declare."""

    def __init__(self, redactor: Redactor, apps: Iterable[App] = ()) -> None:
        self.redactor = redactor
        self._apps = tuple(apps)

    def __bool__(self) -> bool:
        return bool(self.redactor)

    def parameters_of(self, name: str) -> list[ParameterNames] | None:
        """The parameters of a task or a flow in each application that declares it; None if its code is not known."""
        found = []
        for app in self._apps:
            declared: Any = app.tasks.get(name) or app.flows.get(name)
            if declared is not None:
                found.append(ParameterNames.of(declared.signature))
        return found or None

    def may_quote_child(self, step: str, flow: SubjectPayload) -> bool:
        """Whether the error of a failed step may quote hidden values of its child task, effect or flow, which are not known
        here."""
        name = step.removeprefix(UNDO_PREFIX)
        if self.redactor.fields_of(name) or name in flow.children:
            return True
        declared = [kinds for app in self._apps for kinds in (app.tasks, app.effects, app.flows)]
        if declared and not any(name in kinds for kinds in declared):
            return False
        return self.may_hide(name) or any(name in app.flows for app in self._apps)

    def may_hide(self, *names: str) -> bool:
        """Whether a path may name a field of one of these types."""
        return any(self._may_hide(name) for name in names)

    def may_hide_world(self, type: str) -> bool:
        """Whether a path may name a field of the state of a world, or of the events and receipts that it handles."""
        if not self.redactor:
            return False
        programs = [app.programs[type] for app in self._apps if type in app.programs]
        return not programs or any(
            self.may_hide(type, *(cause for _, cause in program.handlers)) for program in programs
        )

    def _may_hide(self, name: str) -> bool:
        redactor = self.redactor
        if redactor.fields_of(name):
            return True
        wanted = redactor.any_type_fields
        if not wanted:
            return False
        declared = self._declared_fields.get(name)
        return declared is None or "*" in wanted or not wanted.isdisjoint(declared)

    @cached_property
    def _declared_fields(self) -> dict[str, frozenset[str]]:
        """The fields of the declared types at any depth. A type with a value of any type is not in it. Applications may
        declare different types with one name."""
        found: dict[str, frozenset[str]] = {}
        unknown: set[str] = set()
        for app in self._apps:
            kinds: dict[str, Any] = {}
            kinds |= {name: program.state for name, program in app.programs.items()}
            kinds |= {name: event.kind for name, event in app.events.items()}
            for name, kind in kinds.items():
                if (fields := _field_names(kind)) is None:
                    unknown.add(name)
                else:
                    found[name] = fields | found.get(name, frozenset())
        return {name: fields for name, fields in found.items() if name not in unknown}


class DocumentRedactor:
    """Hides values in one document. `hidden` has them afterwards."""

    def __init__(self, rules: RedactionRules, read: PayloadReader | None = None) -> None:
        self._rules = rules
        self._read = read or (lambda kind, id: None)
        self.hidden = HiddenValues()

    def hide(self, document: Any, subject: str = "") -> Any:
        """Return a JSON document without hidden values. `subject` is the one of its request, `kind/id`."""
        return self._walk(document, subject)

    def hide_text(self, text: str) -> str:
        """Return a text that was made from the same document."""
        return self.hidden.clean(text)

    def _walk(self, value: Any, subject: str) -> Any:
        if isinstance(value, list):
            return [self._walk(item, subject) for item in value]
        if not isinstance(value, dict):
            return value
        subject = _subject_of(value) or subject
        rule = next((rule for fields, rule in _RULES if fields <= value.keys()), None)
        if value.keys() == {"reply"}:
            rule = DocumentRedactor._reply
        shown = value if rule is None else rule(self, value, subject)
        done = _PAYLOAD_FIELDS if rule is not None else frozenset()
        return {
            name: item if name in done else self._walk(item, subject)
            for name, item in shown.items()
        }

    # -- values ------------------------------------------------------------------------------------

    def _task(self, value: Document, subject: str) -> Document:
        if not self._rules.may_hide(value["name"]):
            return value
        return self._parts(value, f"task/{value['id']}")

    def _flow(self, value: Document, subject: str) -> Document:
        # Its steps and events are of other types.
        return self._parts(value, f"flow/{value['id']}")

    def _parts(self, value: Document, subject: str) -> Document:
        local = HiddenValues()
        parts = _parts_of(value)
        if parts:
            value = value | self._hide_parts(value["name"], parts, local)
        return self._clean_texts(value, subject, local)

    def _hide_parts(self, name: str, parts: Mapping[str, Any], local: HiddenValues) -> Document:
        """Return the parts of a task or a flow without hidden values, and add these to `local` and to `hidden`."""
        redactor = self._rules.redactor
        others = {part: parts[part] for part in parts if part not in ("events", "steps")}
        shown = redactor.hide_parts(name, others, self._rules.parameters_of(name), local)
        if "events" in parts:
            shown["events"] = [
                one | {"event": redactor.hide(one["type"], one["event"], local)}
                for one in parts["events"]
            ]
        for step, value in parts.get("steps", ()):
            self._hide_step(name, step, value, local)
        self.hidden.update(local)
        return shown

    def _hide_step(self, flow: str, step: str, value: Any, local: HiddenValues) -> Any:
        """Return the value of a step: of a function, of a child task, flow or effect with this name, or an event."""
        redactor = self._rules.redactor
        type = step.removeprefix(UNDO_PREFIX)
        if step == RECEIVE_NAME and isinstance(value, list) and len(value) == 2:
            return [value[0], redactor.hide(str(value[0]), value[1], local)]
        shown = redactor.hide_parts(flow, {"steps": {step: value}}, (), local)["steps"]
        if not isinstance(shown, dict) or shown[step] == REDACTED:
            return REDACTED
        return redactor.hide_parts(type, {"result": shown[step]}, (), local)["result"]

    def _step(self, value: Document, subject: str) -> Document:
        payload = self._payload(subject)
        if payload is None:
            self._note_text(value["error"] or "")
            self.hidden.add(value["value"])
            return value | {"value": REDACTED, "error": value["error"] and REDACTED}
        local = HiddenValues()
        shown = self._hide_step(payload.name, value["name"], value["value"], local)
        self.hidden.update(local)
        value = value | {"value": shown}
        if self._rules.may_quote_child(value["name"], payload):
            return self._without_quotes(value, ("error",))
        return self._clean_texts(value, subject, local)

    def _state(self, value: Document, subject: str) -> Document:
        type = value["world"].partition("/")[0]
        return value | {"state": self._rules.redactor.hide(type, value["state"], self.hidden)}

    def _reply(self, value: Document, subject: str) -> Document:
        type = subject.split("/")[1] if subject.startswith("world/") else ""
        local = {"reply": value["reply"]}
        return self._rules.redactor.hide_parts(type, local, (), self.hidden)

    def _entry(self, value: Document, subject: str) -> Document:
        world = subject.split("/")[1] if subject.startswith("world/") else ""
        local = HiddenValues()
        payload = self._rules.redactor.hide(value["type"], value["value"], local)
        if local:
            self.hidden.update(local)
            self._note_text(value["shown"])
            shown = f"{value['type']} {json.dumps(payload, ensure_ascii=False)}"
            value = value | {"value": payload, "shown": shown}
        return self._without_quotes(value, ("error",)) if self._world_hides(world) else value

    def _letter(self, value: Document, subject: str) -> Document:
        names = [value["queue"], value["queue"].rpartition("/")[2]]
        event = value.get("event")
        hides = self._rules.may_hide(*names)
        if event:
            world = (event["world"] or "").partition("/")[0]
            hides = hides or self._rules.may_hide(event["type"]) or self._world_hides(world)
        if not hides:
            return value
        if value["payload"] is not None:
            self._note_text(value["payload"]["data"])
            value = value | {"payload": {"encoding": "utf-8", "data": REDACTED}}
        if value["blob"] is not None:
            # Its name is the hash of the payload.
            value = value | {"blob": REDACTED}
        return self._attempts(self._without_quotes(value, ("error",)))

    def _effect(self, value: Document, subject: str) -> Document:
        if not self._rules.may_hide(value["kind"]):
            return value
        return self._attempts(self._without_quotes(value, ("error",)))

    def _attempts(self, value: Document) -> Document:
        if not isinstance(value.get("attempts"), list):
            return value
        return value | {
            "attempts": [self._without_quotes(one, ("error",)) for one in value["attempts"]]
        }

    def _event_type(self, value: Document, subject: str) -> Document:
        """Return it as it is: a schema has the names of fields, and no values."""
        return value

    # -- texts -------------------------------------------------------------------------------------

    def _world(self, value: Document, subject: str) -> Document:
        if value["blocker"] is None or not self._world_hides(value["type"]):
            return value
        return value | {"blocker": self._without_quotes(value["blocker"], ("text",))}

    def _group(self, value: Document, subject: str) -> Document:
        example = value["example"]
        if value["kind"] == "dead":
            name = (example["queue"] or "").rpartition("/")[2]
            hides = name in ("events", "") or self._rules.may_hide(name)
            return self._without_quotes(value, ("text",)) if hides else value
        payload = self._payload(f"{value['kind']}/{example['id']}")
        if payload is None or self._quotes_children(payload):
            return self._without_quotes(value, ("text",))
        local = HiddenValues()
        self._hide_parts(payload.name, payload.parts, local)
        # The text of a group has parts of values only: their numbers and quoted texts are replaced.
        if payload.error and error_groups.group_text("", payload.error) == value["text"]:
            clean = error_groups.group_text("", local.clean(payload.error))
            return value | {"text": self._changed_text(value["text"], lambda _: clean)}
        if payload.error and value["text"] != error_groups.OTHER_TEXT:
            return self._without_quotes(value, ("text",))
        return value

    def _why(self, value: Document, subject: str) -> Document:
        return self._clean_texts(value, subject, HiddenValues())

    def _problem(self, value: Document, subject: str) -> Document:
        kind, _, id = subject.partition("/")
        if value["code"] not in QUOTING_CODES:
            return value
        if kind == "world" and not self._world_hides(id.partition("/")[0]):
            return value
        return value | {"detail": f"{value['code']}: {REDACTED}"}

    def _finding(self, value: Document, subject: str) -> Document:
        name = value.get("name") or str(value.get("world", "")).partition("/")[0]
        hides = self._rules.may_hide(name) if "flow" in value else self._world_hides(name)
        return self._without_quotes(value, ("text",)) if hides else value

    def _difference(self, value: Document, subject: str) -> Document:
        return self._without_quotes(value, ("found", "expected"))

    def _schedule(self, value: Document, subject: str) -> Document:
        if not self._rules.may_hide(value["target"]):
            return value
        return self._without_quotes(value, ("error",))

    def _readiness(self, value: Document, subject: str) -> Document:
        return (
            self._without_quotes(value, ("text",)) if value["reason"] in _QUOTING_REASONS else value
        )

    # -- inside ------------------------------------------------------------------------------------

    def _world_hides(self, type: str) -> bool:
        return self._rules.may_hide_world(type)

    def _payload(self, subject: str) -> SubjectPayload | None:
        kind, _, id = subject.partition("/")
        return self._read(kind, id) if kind in ("task", "flow") and id else None

    def _quotes_children(self, flow: SubjectPayload) -> bool:
        return any(self._rules.may_quote_child(step, flow) for step in flow.failed)

    def _clean_texts(self, value: Document, subject: str, local: HiddenValues) -> Document:
        """Clean the texts of a subject. Reduce them if its hidden values cannot be known."""
        kind, _, id = subject.partition("/")
        texts = {name: value[name] for name in _TEXTS if value.get(name)}
        blockers = value.get("blockers") or []
        if not texts and not blockers:
            return value
        name = id.partition("/")[0]
        clean = error_class
        hides = True
        if kind == "task" and "args" in value:
            clean = local.clean
        elif kind in ("task", "flow"):
            payload = self._payload(subject)
            if payload is not None:
                self._hide_parts(payload.name, payload.parts, local)
                if not self._quotes_children(payload):
                    clean = local.clean
        elif kind in ("world", "timer"):
            hides = self._world_hides(name)
        else:
            hides = kind in ("effect", "queue") and self._rules.may_hide(name, id)
        if not hides:
            return value
        shown = value | {name: self._changed_text(text, clean) for name, text in texts.items()}
        if blockers:
            shown["blockers"] = [
                one | {"text": self._changed_text(one["text"], clean)} for one in blockers
            ]
        return shown

    def _without_quotes(self, value: Document, names: Sequence[str]) -> Document:
        texts = {name: value[name] for name in names if value.get(name)}
        return value | {name: self._changed_text(text, error_class) for name, text in texts.items()}

    def _changed_text(self, text: str, clean: Callable[[str], str]) -> str:
        shown = clean(text)
        if shown != text:
            self._note_text(text)
        return shown

    def _note_text(self, text: str) -> None:
        """Remember a text that is shown in another form, also by its lines."""
        if text:
            self.hidden.add(text)


def _subject_of(value: Document) -> str:
    """Return the subject that a document names, for the documents within it."""
    if isinstance(value.get("world"), str) and ("entries" in value or "state" in value):
        return f"world/{value['world']}"
    if {"id", "run", "steps"} <= value.keys() or {"id", "state", "blockers"} <= value.keys():
        return f"flow/{value['id']}"
    if {"subject", "state", "blockers"} <= value.keys():
        return str(value["subject"])
    return ""


def read_payload(store: Store, universe: str, kind: str, id: str) -> SubjectPayload | None:
    """Return the payload of a task or a flow."""
    from holdfast.flows import step_list
    from holdfast.ops import flow_documents, task_documents
    from holdfast.ops.flow_documents import flow_details
    from holdfast.store.api import Txn
    from holdfast.tasks.ids import parse_task_id

    def read(txn: Txn) -> SubjectPayload | None:
        if kind == "task":
            report = task_documents.read_report(txn, universe, parse_task_id(id))
            document = task_documents.task_details(report)
            return SubjectPayload(document["name"], _parts_of(document), document["error"] or "")
        row = flow_documents.find_flow(txn, universe, id)
        document = flow_details(flow_documents.read_report(txn, universe, row))
        page = step_list.list_steps(txn, universe, row.seq, None, 0, STEPS_READ_MAX)
        if page.next_after:
            return None
        shown = [flow_documents.step_document(step) for step in page.steps]
        steps = [(step["name"], step["value"]) for step in shown]
        return SubjectPayload(
            document["name"],
            {**_parts_of(document), "steps": steps},
            document["error"] or "",
            failed=frozenset(step["name"] for step in shown if step["error"]),
            children=frozenset(child["name"] for child in document["children"]),
        )

    try:
        return store.read(read)
    except HoldfastError:
        return None


def _parts_of(document: Document) -> dict[str, Any]:
    return {name: document[name] for name in _PARTS if name in document}


def _field_names(kind: Any) -> frozenset[str] | None:
    """Return the names of the fields of a type at any depth; None if it may hold any other."""
    found: set[str] = set()
    seen: list[Any] = []

    def is_closed(info: Any) -> bool:
        if isinstance(
            info, inspect.AnyType | inspect.CustomType | inspect.RawType | inspect.DictType
        ):
            return False
        if any(info is one for one in seen):
            return True
        seen.append(info)
        inner = []
        for field in getattr(info, "fields", ()):
            found.add(field.name)
            found.add(field.encode_name)
            inner.append(field.type)
        inner += [one for name in ("types", "item_types") for one in getattr(info, name, ()) or ()]
        inner += [one for name in ("item_type", "type") if (one := getattr(info, name, None))]
        return all(is_closed(one) for one in inner)

    try:
        closed = is_closed(inspect.type_info(kind))
    except (TypeError, ValueError, msgspec.MsgspecError):
        return None
    return frozenset(found) if closed else None


_PARTS = ("args", "kwargs", "result", "progress", "published", "events")
_PAYLOAD_FIELDS = frozenset({*_PARTS, "fields", "value", "state", "reply", "payload"})
_TEXTS = ("error", "why", "reason", "text")
# The reasons of readiness whose texts may quote an error of the application.
_QUOTING_REASONS = frozenset({"world_paused", "world_parked", "unknown_event", "code_missing"})
_Rule = Callable[[DocumentRedactor, Document, str], Document]
# The first rule applies whose fields a document has.
_RULES: tuple[tuple[frozenset[str], _Rule], ...] = (
    (frozenset({"id", "name", "queue", "attempt", "expiries_max"}), DocumentRedactor._task),
    (frozenset({"id", "name", "run", "run_started_ns"}), DocumentRedactor._flow),
    (frozenset({"type", "version", "fields"}), DocumentRedactor._event_type),
    (frozenset({"position", "occurrence", "value"}), DocumentRedactor._step),
    (frozenset({"world", "at", "state"}), DocumentRedactor._state),
    (frozenset({"height", "shown", "outcome"}), DocumentRedactor._entry),
    (frozenset({"world_id", "status", "blocker"}), DocumentRedactor._world),
    (frozenset({"queue", "seq", "died_ns"}), DocumentRedactor._letter),
    (frozenset({"intent", "kind", "attempts", "error"}), DocumentRedactor._effect),
    (frozenset({"group", "kind", "text", "example"}), DocumentRedactor._group),
    (frozenset({"subject", "state", "blockers"}), DocumentRedactor._why),
    (frozenset({"id", "state", "blockers"}), DocumentRedactor._why),
    (frozenset({"detail", "code", "retryable", "status"}), DocumentRedactor._problem),
    (frozenset({"where", "what", "found", "expected"}), DocumentRedactor._difference),
    (frozenset({"every", "target", "error"}), DocumentRedactor._schedule),
    (frozenset({"reason", "code", "text", "since_ns"}), DocumentRedactor._readiness),
    (frozenset({"code", "text", "steps"}), DocumentRedactor._finding),
)  # fmt: skip
