"""The application of `test_timers_killed`: worlds that set timers and record the ones that fire early."""

from datetime import UTC, datetime, timedelta

import msgspec

import holdfast as hf
from holdfast.clock import MS, S


class TimerRequested(hf.Event):
    n: int
    seconds: float
    # Due by the wall clock if true, by store time otherwise.
    calendar: bool = False


class TimerDelivered(hf.Event):
    n: int
    due_ns: int


class Sleeper(hf.World):
    woken: list[int] = msgspec.field(default_factory=list)
    early: list[int] = msgspec.field(default_factory=list)

    @hf.on(TimerRequested)
    def slept(self, event: TimerRequested, cx: hf.Context) -> None:
        due_ns = cx.now_ns + int(event.seconds * S)
        if event.calendar:
            # Rounded up to a microsecond, so that the timer is not due early.
            when = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=due_ns // 1000 + 1)
            cx.at(when, TimerDelivered(event.n, due_ns))
        else:
            cx.after(event.seconds, TimerDelivered(event.n, due_ns))

    @hf.on(TimerDelivered)
    def woke(self, event: TimerDelivered, cx: hf.Context) -> None:
        self.woken.append(event.n)
        # The wall clock may be slewed slightly against store time.
        if cx.now_ns < event.due_ns - MS:
            self.early.append(event.n)


app = hf.App("sleep", worlds=[Sleeper])
