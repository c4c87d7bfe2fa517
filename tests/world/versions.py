"""Two versions of one application. Each declares an event, an effect and an inbox that the other
version does not declare. Only the second version has the world type `Extra`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

import holdfast as hf
from holdfast import errors as hf_errors


class Kept(hf.Event):
    """Handled by both versions."""

    text: str = ""


class Named(hf.Event):
    """Declared in `events=` by both versions. No world handles it."""


class EmissionRequested(hf.Event):
    """Handled by both versions. The handler emits an item that only its own version declares."""

    what: str


class Old(hf.Event):
    """Handled by the first version only."""

    text: str = ""


class New(hf.Event):
    """Handled by the second version only."""

    text: str = ""


@hf.effect("fx.old")
def old_effect(call: hf.Call) -> str:
    return "old"


@hf.effect("fx.new")
def new_effect(call: hf.Call) -> str:
    return "new"


def _version(version: str, own_event: type[hf.Event], effect: Any, inbox: str) -> SimpleNamespace:
    class VersionedDesk(hf.World):
        seen: list[str] = msgspec.field(default_factory=list)

        @hf.on(Kept)
        def kept(self, event: Kept, cx: hf.Context) -> None:
            self.seen.append(f"kept {event.text}")
            cx.reply(event.text)

        @hf.on(own_event)
        def mine(self, event: Any, cx: hf.Context) -> None:
            self.seen.append(f"{version} {event.text}")
            cx.reply(f"{version} {event.text}")

        @hf.on(hf.inbox(inbox))
        def posted(self, mail: hf.Mail[Any], cx: hf.Context) -> None:
            self.seen.append(f"{version} mail {mail.payload}")

        @hf.on(EmissionRequested)
        def asked(self, event: EmissionRequested, cx: hf.Context) -> None:
            if event.what == "timer":
                cx.after(1, own_event("timer"))
            elif event.what == "effect":
                cx.do(effect)
            elif event.what == "mail":
                cx.send(VersionedDesk, "other", own_event("mail"))
            elif event.what == "post":
                cx.post(VersionedDesk, "other", inbox, 7)
            elif event.what == "wrong mail":
                cx.send(VersionedDesk, "other", New() if own_event is Old else Old())
            elif event.what == "wrong timer":
                cx.after(1, New() if own_event is Old else Old())
            elif event.what == "wrong post":
                cx.post(VersionedDesk, "other", "nowhere", 1)
            elif event.what == "wrong effect":
                cx.do(new_effect if own_event is Old else old_effect)
            elif event.what.startswith("send_to "):
                cx.send_to(event.what[8:], own_event("by id"))
            elif event.what.startswith("fabric.send "):
                cx.do(hf.fabric.send, _mail_to(event.what[12:], own_event))
            elif event.what == "caught":
                try:
                    cx.send(VersionedDesk, "other", New() if own_event is Old else Old())
                except hf_errors.Invalid:
                    self.seen.append("caught")

        @hf.on(effect)
        def done(self, receipt: hf.Receipt[str], cx: hf.Context) -> None:
            self.seen.append(f"{version} {receipt.value}")

    class Extra(hf.World):
        """Declared by the second version only."""

        count: int = 0

        @hf.on(Kept)
        def kept(self, event: Kept, cx: hf.Context) -> None:
            self.count += 1

    worlds: list[type[hf.World]] = [VersionedDesk, Extra] if own_event is New else [VersionedDesk]
    app = hf.App("desk", worlds=worlds, events=[Named], version=version)
    return SimpleNamespace(app=app, VersionedDesk=VersionedDesk, Extra=Extra)


def _mail_to(world_id: str, own: type[hf.Event]) -> dict[str, Any]:
    schema, value = (new if own is New else old).app.encode_event(own("by id"))
    return {"dest_world": world_id, "schema": schema, "value_cbor": value}


old = _version("old", Old, old_effect, "old-box")
new = _version("new", New, new_effect, "new-box")
