"""The application of `test_rolling_deploy` in two versions. Each version has events, effects, timers, an
inbox, tasks and a state field that the other version lacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import holdfast as hf


class Placed(hf.Event):
    """An event that both versions handle."""

    id: str


class OldNote(hf.Event):
    id: str


class OldTick(hf.Event):
    """The event of a timer of the first version."""

    id: str


class OldAsked(hf.Event):
    id: str
    what: str


class NewNote(hf.Event):
    id: str


class NewTick(hf.Event):
    id: str


class NewAsked(hf.Event):
    id: str
    what: str


@hf.effect("roll.old")
def old_effect(call: hf.Call, id: str) -> str:
    return id


@hf.effect("roll.new")
def new_effect(call: hf.Call, id: str) -> str:
    return id


@hf.task
def old_task(id: str) -> str:
    return id


@hf.task
def new_task(id: str) -> str:
    return id


class OldState(hf.World):
    seen: int = 0
    old: int = 0


class NewState(hf.World):
    seen: int = 0
    new: int = 0


def _version(
    state: Any, mark: str, note: Any, tick: Any, asked: Any, effect: Any, task: Any
) -> SimpleNamespace:
    class Ledger(state):  # type: ignore[misc]
        @hf.on(Placed)
        def placed(self, event: Placed, cx: hf.Context) -> None:
            self.seen += 1

        @hf.on(note)
        def noted(self, event: Any, cx: hf.Context) -> None:
            self.seen += 1
            setattr(self, mark, getattr(self, mark) + 1)

        @hf.on(tick)
        def ticked(self, event: Any, cx: hf.Context) -> None:
            self.seen += 1

        @hf.on(hf.inbox(f"{mark}-box"))
        def posted(self, mail: hf.Mail[Any], cx: hf.Context) -> None:
            self.seen += 1

        @hf.on(asked)
        def asked_for(self, event: Any, cx: hf.Context) -> None:
            self.seen += 1
            if event.what == "effect":
                cx.do(effect, event.id, tag=event.id)
            elif event.what == "timer":
                cx.after(0.1, tick(event.id))
            elif event.what == "mail":
                cx.send(Ledger, "mail", note(f"{event.id}>"))
            else:
                cx.post(Ledger, "mail", f"{mark}-box", f"{event.id}>")

        @hf.on(effect)
        def done(self, receipt: hf.Receipt[str], cx: hf.Context) -> None:
            self.seen += 1

    app = hf.App("roll", worlds=[Ledger], tasks=[task], version=mark)
    return SimpleNamespace(app=app, Ledger=Ledger, note=note, asked=asked, task=task)


first = _version(OldState, "old", OldNote, OldTick, OldAsked, old_effect, old_task)
second = _version(NewState, "new", NewNote, NewTick, NewAsked, new_effect, new_task)
old: hf.App = first.app
new: hf.App = second.app
