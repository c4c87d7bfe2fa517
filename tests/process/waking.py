"""The application of `test_timers_killed`: worlds that sleep, and tell who woke them too early."""

from datetime import UTC, datetime, timedelta

import msgspec

import holdfast as hf
from holdfast.clock import MS, S


class Slept(hf.Event):
    n: int
    seconds: float
    # By the clock on the wall, or else by store time.
    calendar: bool = False


class Woken(hf.Event):
    n: int
    due_ns: int


class Sleeper(hf.World):
    woken: list[int] = msgspec.field(default_factory=list)
    early: list[int] = msgspec.field(default_factory=list)

    @hf.on(Slept)
    def slept(self, event: Slept, cx: hf.Context) -> None:
        due_ns = cx.now_ns + int(event.seconds * S)
        if event.calendar:
            # To the microsecond, and not before.
            when = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=due_ns // 1000 + 1)
            cx.at(when, Woken(event.n, due_ns))
        else:
            cx.after(event.seconds, Woken(event.n, due_ns))

    @hf.on(Woken)
    def woke(self, event: Woken, cx: hf.Context) -> None:
        self.woken.append(event.n)
        # The wall clock may be slewed against the other by a little meanwhile.
        if cx.now_ns < event.due_ns - MS:
            self.early.append(event.n)


app = hf.App("sleep", worlds=[Sleeper])
