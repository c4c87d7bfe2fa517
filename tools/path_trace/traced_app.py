"""The traced application: one task, one world with one effect. Its handlers mark the ends of a round."""

from __future__ import annotations

import window

import holdfast as hf


class Noted(hf.Event):
    """The traced message."""


class CallWanted(hf.Event):
    """Makes the world start the traced effect."""


@hf.task
def double(number: int) -> int:
    return 2 * number


@hf.effect("trace.call")
def call(call: hf.Call, number: int) -> int:
    return number + 1


class Counter(hf.World):
    notes: int = 0
    calls: int = 0

    @hf.on(Noted)
    def noted(self, event: Noted, cx: hf.Context) -> None:
        self.notes += 1
        window.finish()

    @hf.on(CallWanted)
    def call_wanted(self, event: CallWanted, cx: hf.Context) -> None:
        # The path of an effect starts here. The message that caused it is a separate path.
        window.open_next()
        cx.do(call, self.calls)

    @hf.on(call)
    def called(self, receipt: hf.Receipt[int], cx: hf.Context) -> None:
        self.calls += 1
        window.finish()


app = hf.App("trace-paths", worlds=[Counter], effects=[call], tasks=[double])
