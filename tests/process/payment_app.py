"""The application of `test_effects_killed`: each effect call first appends a line to a log file.

A file per order marks its first call. A worker that dies with a claim but before the call leaves no
such file.
"""

import asyncio
import os
import signal

import msgspec

import holdfast as hf

LOG = "HOLDFAST_TEST_CALLS"
WIRES_AT_ONCE = 8


class PaymentRequested(hf.Event):
    n: int
    # The first call of this order hangs. The test kills the adapter that makes it.
    deadly: bool = False


class Wired(hf.Event):
    """Orders `first` to `last` of the effect `wire`. The first call of each hangs in a coroutine."""

    first: int
    last: int


class Ruined(hf.Event):
    """An order of the effect `ruin-<how>`. Every call of a deadly order crashes the calling process."""

    n: int
    how: str
    deadly: bool


class SleepRequested(hf.Event):
    n: int
    seconds: float


class SleepEnded(hf.Event):
    n: int


@hf.effect("pay", attempts=3, timeout_s=60, concurrency=1)
def pay(call: hf.Call, n: int, deadly: bool) -> int:
    log_call(call, n)
    if deadly and is_first_call(n):
        print(f"called {n}", flush=True)
        os.read(0, 1)
    return n


@hf.effect("wire", attempts=3, timeout_s=60, concurrency=WIRES_AT_ONCE)
async def wire(call: hf.Call, n: int) -> int:
    log_call(call, n)
    if is_first_call(n):
        print(f"called {n}", flush=True)
        await asyncio.sleep(3600)
    return n


def crash_effect(how: str) -> hf.Effect:
    """Declare an effect whose deadly calls crash their process by `exit` or by the named signal."""

    @hf.effect(f"ruin-{how}", attempts=3, timeout_s=60, concurrency=1)
    def ruin(call: hf.Call, n: int, deadly: bool) -> int:
        log_call(call, n)
        if deadly and how == "exit":
            os._exit(7)
        if deadly:
            signal.raise_signal(signal.Signals[how])
        return n

    return ruin


CRASH_EFFECTS = {how: crash_effect(how) for how in ("exit", "SIGKILL", "SIGSEGV")}


def log_call(call: hf.Call, n: int) -> None:
    line = f"{n} {call.idempotency_key} {call.attempt}\n".encode()
    fd = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, line)
    os.close(fd)


def is_first_call(n: int) -> bool:
    try:
        os.close(os.open(f"{os.environ[LOG]}-{n}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Till(hf.World):
    paid: list[int] = msgspec.field(default_factory=list)
    attempts: list[int] = msgspec.field(default_factory=list)
    woken: list[int] = msgspec.field(default_factory=list)
    ruined: list[str] = msgspec.field(default_factory=list)

    @hf.on(PaymentRequested)
    def ordered(self, event: PaymentRequested, cx: hf.Context) -> None:
        cx.do(pay, event.n, event.deadly)

    @hf.on(Wired)
    def wired(self, event: Wired, cx: hf.Context) -> None:
        for n in range(event.first, event.last + 1):
            cx.do(wire, n)

    @hf.on(pay, wire)
    def done(self, receipt: hf.Receipt[int], cx: hf.Context) -> None:
        self.paid.append(receipt.value if receipt.ok else -1)
        self.attempts.append(receipt.attempts)

    @hf.on(Ruined)
    def told_to(self, event: Ruined, cx: hf.Context) -> None:
        cx.do(CRASH_EFFECTS[event.how], event.n, event.deadly, tag=str(event.n))

    @hf.on(*CRASH_EFFECTS.values())
    def ended(self, receipt: hf.Receipt[int], cx: hf.Context) -> None:
        self.ruined.append(f"{receipt.tag} {receipt.status} {receipt.code}".strip())

    @hf.on(SleepRequested)
    def slept(self, event: SleepRequested, cx: hf.Context) -> None:
        cx.after(event.seconds, SleepEnded(event.n))

    @hf.on(SleepEnded)
    def woke(self, event: SleepEnded, cx: hf.Context) -> None:
        self.woken.append(event.n)


app = hf.App("pay", worlds=[Till])
