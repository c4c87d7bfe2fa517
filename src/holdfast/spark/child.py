"""The process that runs the user's function: `python -m holdfast.spark.child`.

A Spark Python worker starts one and keeps it for its later tasks. On standard input come duties,
one after another: a header and the pickled function; on what was standard output goes how each
ended. What the function prints goes to standard error, where executors keep their logs.

The end of the input means that the worker is gone. Calls that are under way have been paid for, so
they may end and are told, for `DRAIN_S` at most; nothing is begun any more. What is left then is
reclaimed when the connection closes.
"""

from __future__ import annotations

import functools
import gc
import os
import queue
import signal
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from holdfast.clock import SYSTEM
from holdfast.errors import HoldfastError
from holdfast.spark import code, wire
from holdfast.spark.call_slots import CallSlots
from holdfast.spark.caller import Caller
from holdfast.spark.client import Client
from holdfast.spark.engine import Duty, Engine, HungCall
from holdfast.spark.rows import Encoder

# How a child that cannot stop a hung call leaves.
EXIT_HUNG = 75
DRAIN_S = 2.0
_LENGTHS = struct.Struct("<II")


class Verdict(msgspec.Struct, frozen=True):
    """How a duty ended: over, stop, timed_out, or an error of the set-up; and how many steps it took."""

    state: str
    steps: int
    error: str = ""
    code: str = ""
    # The same error as it travels.
    told: list[Any] = []
    # The rows whose calls ran out of time: this process ends, and its successor tells of them.
    timed_out: list[int] = []
    # Of the calls that ended.
    calls: int = 0
    cost: float = 0.0

    @classmethod
    def failed(cls, error: HoldfastError, steps: int = 0) -> Verdict:
        return cls("failed", steps, str(error), error.code, wire.refused(error).error)


def main() -> None:
    # Spark hangs up on the whole group of its workers; here the end of the pipe is the word.
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # The pipes are taken out of reach of `print`, of `input` and of programs that the function starts.
    answers, source = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    slots = CallSlots(os.fdopen(int(sys.argv[1]), "r+b")) if len(sys.argv) > 1 else CallSlots()
    duties: queue.SimpleQueue[tuple[bytes, bytes] | None] = queue.SimpleQueue()
    orphaned = threading.Event()
    threading.Thread(target=_read, args=(source, duties, orphaned), daemon=True).start()
    while (given := duties.get()) is not None:
        header, function = given
        verdict = _do(msgspec.msgpack.decode(header, type=Duty), function, orphaned, slots)
        if orphaned.is_set():
            os._exit(0)
        data = msgspec.msgpack.encode(verdict)
        answers.write(struct.pack("<I", len(data)) + data)
        answers.flush()
        if verdict.state == "timed_out":
            os._exit(EXIT_HUNG)


def _do(duty: Duty, function: bytes, orphaned: threading.Event, slots: CallSlots) -> Verdict:
    code.look_in(duty.paths)
    try:
        fn, retry_on, tokens = code.load(function)
    except code.NotLoadable as error:
        return Verdict.failed(error)
    if duty.probe:
        return _probed(duty, fn)
    from pyspark.sql.types import StructType  # after the function's own imports

    _keep_modules()

    encoder = Encoder(StructType.fromJson(msgspec.json.decode(duty.schema)))
    caller = Caller(fn, retry_on, encoder, duty.run_id, duty.timeout_s)
    with Client(duty.address, "child") as client:
        client.owner = duty.owner or client.owner
        engine = Engine(duty, caller, client, orphaned, slots, tokens)
        try:
            state = engine.run()
            return Verdict(
                state, engine.steps, calls=engine.figures.calls, cost=engine.figures.cost
            )
        except HungCall as hung:
            print(f"holdfast: {hung}; leaving", file=sys.stderr, flush=True)
            return _handed_over(client, hung, engine)
        except HoldfastError as error:
            return Verdict.failed(error, engine.steps)


@functools.cache
def _keep_modules() -> None:
    """Once, before the first row: a collection of garbage need not look at modules again. They are
    most of the objects of this process, and would be half of the time of a short call."""
    gc.freeze()


def _probed(duty: Duty, fn: Callable[..., Any]) -> Verdict:
    from holdfast.spark.probe import in_child  # once a run

    try:
        in_child(duty, fn)
    except HoldfastError as error:
        return Verdict.failed(error)
    return Verdict("probed", 0)


def _handed_over(client: Client, hung: HungCall, engine: Engine) -> Verdict:
    """The successor of this process takes what it holds; without a word it would be reclaimed."""
    try:
        client.ask(wire.HandOver(client.owner))
    except HoldfastError as error:
        return Verdict.failed(error, engine.steps)
    return Verdict(
        "timed_out",
        engine.steps,
        timed_out=hung.seqs,
        calls=engine.figures.calls,
        cost=engine.figures.cost,
    )


def _read(
    source: BinaryIO,
    duties: queue.SimpleQueue[tuple[bytes, bytes] | None],
    orphaned: threading.Event,
) -> None:
    try:
        while True:
            lengths = source.read(_LENGTHS.size)
            if len(lengths) < _LENGTHS.size:
                break
            header, function = _LENGTHS.unpack(lengths)
            duties.put((source.read(header), source.read(function)))
        orphaned.set()
        duties.put(None)
        SYSTEM.sleep(DRAIN_S)
    finally:
        os._exit(0)


def frame(duty: Duty, function: bytes) -> bytes:
    header = msgspec.msgpack.encode(duty)
    return _LENGTHS.pack(len(header), len(function)) + header + function


if __name__ == "__main__":
    main()
