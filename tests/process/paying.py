"""The application of `test_effects_killed`: each call writes a line outside before it goes on."""

import os

import msgspec

import holdfast as hf

LOG = "HOLDFAST_TEST_CALLS"


class Ordered(hf.Event):
    n: int
    # The first call of this order hangs: whoever makes it is to be killed.
    deadly: bool = False


class Slept(hf.Event):
    n: int
    seconds: float


class Woken(hf.Event):
    n: int


@hf.effect("pay", attempts=3, timeout_s=1, concurrency=2)
def pay(call: hf.Call, n: int, deadly: bool) -> int:
    line = f"{n} {call.idempotency_key} {call.attempt}\n".encode()
    fd = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, line)
    os.close(fd)
    if deadly and call.attempt == 1:
        print(f"called {n}", flush=True)
        os.read(0, 1)
    return n


class Till(hf.World):
    paid: list[int] = msgspec.field(default_factory=list)
    attempts: list[int] = msgspec.field(default_factory=list)
    woken: list[int] = msgspec.field(default_factory=list)

    @hf.on(Ordered)
    def ordered(self, event: Ordered, cx: hf.Context) -> None:
        cx.do(pay, event.n, event.deadly)

    @hf.on(pay)
    def done(self, receipt: hf.Receipt[int], cx: hf.Context) -> None:
        self.paid.append(receipt.value if receipt.ok else -1)
        self.attempts.append(receipt.attempts)

    @hf.on(Slept)
    def slept(self, event: Slept, cx: hf.Context) -> None:
        cx.after(event.seconds, Woken(event.n))

    @hf.on(Woken)
    def woke(self, event: Woken, cx: hf.Context) -> None:
        self.woken.append(event.n)


app = hf.App("pay", worlds=[Till])
