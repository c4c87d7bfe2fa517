"""The application of `test_up`: a counter world, and reducers that hang or raise."""

import re
import threading

import holdfast as hf


class Added(hf.Event):
    n: int


class Hung(hf.Event):
    """Its reducer never returns."""


class Gripped(hf.Event):
    """Its reducer never returns and holds the GIL."""


class Broken(hf.Event):
    """Its reducer ends the role that runs it."""


class Beyond(KeyboardInterrupt):
    """A BaseException that is not an Exception. No reducer should raise it."""


class Counter(hf.World):
    total: int = 0
    seen: list[int] = []  # noqa: RUF012  (each world gets its own)

    @hf.on(Added)
    def added(self, event: Added, cx: hf.Context) -> None:
        self.total += event.n
        self.seen.append(event.n)
        cx.reply(self.total)

    @hf.on(Hung)
    def hung(self, event: Hung, cx: hf.Context) -> None:
        threading.Event().wait()

    @hf.on(Gripped)
    def gripped(self, event: Gripped, cx: hf.Context) -> None:
        re.match(r"(a+)+$", "a" * 100 + "b")

    @hf.on(Broken)
    def broken(self, event: Broken, cx: hf.Context) -> None:
        raise Beyond("no role survives this")


app = hf.App("count", worlds=[Counter])
