"""The applications of `test_mail_between_stores`: two universes whose worlds send mail to each other."""

from typing import Any

import msgspec

import holdfast as hf


class Letter(hf.Event):
    n: int


class Write(hf.Event):
    n: int
    to: str = "bob"
    universe: str = "south"


class Office(hf.World):
    read: list[int] = msgspec.field(default_factory=list)
    sent: int = 0
    told: dict[str, str] = msgspec.field(default_factory=dict)
    answers: int = 0

    @hf.on(Letter)
    def letter(self, event: Letter, cx: hf.Context) -> None:
        self.read.append(event.n)

    @hf.on(Write)
    def write(self, event: Write, cx: hf.Context) -> None:
        cx.send(Office, event.to, Letter(event.n), universe=event.universe)
        self.sent += 1

    @hf.on(hf.sent)
    def heard(self, receipt: hf.Receipt[Any], cx: hf.Context) -> None:
        self.answers += 1
        self.told[receipt.intent_hash.hex()] = receipt.value.status


north = hf.App("north", worlds=[Office])
south = hf.App("south", worlds=[Office])
