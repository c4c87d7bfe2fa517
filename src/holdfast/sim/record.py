"""How a call is written down: an event per operation, and one for the function around them.

`Sent` is a transaction on its way. What becomes of it goes to the history at the moment the engine
decides, whoever learns of it and whenever; so the order of events is the order of commits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

from holdfast.durable.lease import Lease
from holdfast.errors import CommitUnknown, HoldfastError, from_wire
from holdfast.sim.history import Event, History, plain
from holdfast.store.api import Operation, Pending
from holdfast.store.engine import Answer, Request
from holdfast.store.txn import ClientTxn
from holdfast.store.wire import fill


class Scribe:
    """Writes down what one incarnation does."""

    def __init__(
        self, history: History, actor: str, incarnation: str, now_ns: Callable[[], int]
    ) -> None:
        self._history = history
        self._actor = actor
        self._incarnation = incarnation
        self._now_ns = now_ns
        # Under which lease a function of this incarnation acts, where its arguments do not tell.
        self.acting: Callable[[Any], Lease | None] = lambda fn: None

    def add(self, op: str, args: dict[str, Any], result: str = "ok", **rest: Any) -> Event:
        lease = args.get("lease")
        return self._history.add(
            self._now_ns(),
            op,
            args,
            actor=self._actor,
            incarnation=self._incarnation,
            result=result,
            epoch=lease["epoch"] if isinstance(lease, dict) else 0,
            **rest,
        )

    def fault(self, kind: str, boundary: int) -> None:
        self.add("fault", {"kind": kind, "boundary": boundary})


class Call:
    """One call of `transact`, over all its tries."""

    def __init__(
        self, scribe: Scribe, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.txn_no = 0
        self.result: Any = None  # of the function, where it is no operation
        self._scribe = scribe
        self.fn = fn
        self._args = args
        self._kwargs = kwargs

    def failed(self, error: HoldfastError) -> None:
        self._add(*self._about(), "fail", {"code": error.code, **plain(error.fields)})

    def refused(self, error: HoldfastError) -> None:
        if isinstance(error, CommitUnknown):
            self._scribe.fault("outcome forgotten", 0)
            self.unknown()
        else:
            self.failed(error)

    def unknown(self) -> None:
        self._add(*self._about(), "unknown", None)

    def applied(self, txn: ClientTxn, commit_no: int) -> list[Event]:
        """Unknown, until the caller has the answer."""
        events = []
        if not isinstance(self.fn, Operation):
            value = None if isinstance(self.result, Pending) else plain(self.result)
            events.append(self._add(*self._about(), "unknown", value, commit_no))
        for (called, args), answer in zip(txn.calls, txn.results, strict=True):
            about = _op_name(called), _named(called.fn, args, {})
            events.append(self._add(*about, "unknown", plain(answer.value), commit_no))
        return events

    def _about(self) -> tuple[str, dict[str, Any]]:
        fn = self.fn
        if isinstance(fn, Operation):
            return _op_name(fn), _named(fn.fn, self._args, self._kwargs)
        told = _named(fn, self._args, self._kwargs)
        lease = self._scribe.acting(fn)
        if lease is not None:
            told["lease"] = plain(lease)
        return getattr(fn, "__name__", "call"), told

    def _add(
        self, op: str, args: dict[str, Any], result: str, value: Any, commit_no: int = 0
    ) -> Event:
        return self._scribe.add(
            op, args, result, value=value, commit_no=commit_no, txn_no=self.txn_no
        )


class Sent:
    """A transaction on its way, and its answer or the store's failure once there is one."""

    def __init__(
        self, request: Request, call: Call, txn: ClientTxn, first: Sent | None = None
    ) -> None:
        self.request = request
        self.answer: Answer | None = None
        self.error: HoldfastError | None = None
        self.events: list[Event] = []
        self._call = call
        self._txn = txn
        self._first = first

    def answered(self, answer: Answer) -> None:
        self.answer = answer
        if answer.error is not None:
            self._call.refused(from_wire(answer.error))
            return
        fill(self._txn, answer)
        # A resend is answered, not applied. If it was applied after all, that must show.
        first = None if self._first is None else self._first.answer
        if first is None or first.commit_no != answer.commit_no:
            self.events = self._call.applied(self._txn, answer.commit_no)


def _op_name(called: Operation[Any, Any]) -> str:
    module, _, name = called.name.partition(":")
    package, _, noun = module.rpartition(".")
    if package == "holdfast.tasks":
        return f"tasks.{name}"
    # Claims and dead letters are parts of the queue, for those who use one.
    return f"{'queue' if noun in ('claim', 'dead') else noun}.{name}"


def _named(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    # By its code: methods and closures are made anew for each call.
    code = fn.__code__
    names = _names.get(code)
    if names is None:
        found = inspect.signature(fn).parameters
        names = _names[code] = list(found)[1:]
    told = {name: plain(value) for name, value in zip(names, args, strict=False)}
    told.update({name: plain(value) for name, value in kwargs.items()})
    return told


_names: dict[CodeType, list[str]] = {}
