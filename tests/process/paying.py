"""The application of `test_effects_killed`: each call writes a line outside before it goes on.

Whether a call is the first one of its order is known outside as well, by a file: a worker that dies
with a claim on an order that it never called has used up no first call.
"""

import asyncio
import os
import signal

import msgspec

import holdfast as hf

LOG = "HOLDFAST_TEST_CALLS"
WIRES_AT_ONCE = 8


class Ordered(hf.Event):
    n: int
    # The first call of this order hangs: whoever makes it is to be killed.
    deadly: bool = False


class Wired(hf.Event):
    """The first call of each is a coroutine that does not end."""

    first: int
    last: int


class Ruined(hf.Event):
    """Every call of this one ends the process that makes it."""

    n: int
    how: str


class Slept(hf.Event):
    n: int
    seconds: float


class Woken(hf.Event):
    n: int


@hf.effect("pay", attempts=3, timeout_s=60, concurrency=1)
def pay(call: hf.Call, n: int, deadly: bool) -> int:
    write_down(call, n)
    if deadly and first_call(n):
        print(f"called {n}", flush=True)
        os.read(0, 1)
    return n


@hf.effect("wire", attempts=3, timeout_s=60, concurrency=WIRES_AT_ONCE)
async def wire(call: hf.Call, n: int) -> int:
    write_down(call, n)
    if first_call(n):
        print(f"called {n}", flush=True)
        await asyncio.sleep(3600)
    return n


@hf.effect("ruin", attempts=3, timeout_s=60, concurrency=1)
def ruin(call: hf.Call, n: int, how: str) -> int:
    write_down(call, n)
    if how == "exit":
        os._exit(7)
    if how:
        signal.raise_signal(signal.Signals[how])
    return n


def write_down(call: hf.Call, n: int) -> None:
    line = f"{n} {call.idempotency_key} {call.attempt}\n".encode()
    fd = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, line)
    os.close(fd)


def first_call(n: int) -> bool:
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

    @hf.on(Ordered)
    def ordered(self, event: Ordered, cx: hf.Context) -> None:
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
        cx.do(ruin, event.n, event.how, tag=str(event.n))

    @hf.on(ruin)
    def ended(self, receipt: hf.Receipt[int], cx: hf.Context) -> None:
        self.ruined.append(f"{receipt.tag} {receipt.status} {receipt.code}".strip())

    @hf.on(Slept)
    def slept(self, event: Slept, cx: hf.Context) -> None:
        cx.after(event.seconds, Woken(event.n))

    @hf.on(Woken)
    def woke(self, event: Woken, cx: hf.Context) -> None:
        self.woken.append(event.n)


app = hf.App("pay", worlds=[Till])
