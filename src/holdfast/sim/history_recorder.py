"""History recorder: one event per operation, and one for the function around them.

`SentTransaction` is a transaction in flight. The recorder writes its outcome to the history when
the engine decides, not when a client learns of it. The order of events is therefore the order of
commits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

from holdfast.durable.lease import Lease
from holdfast.errors import CommitUnknown, HoldfastError, from_wire
from holdfast.sim.history import History, HistoryEvent, to_plain
from holdfast.store.api import Deferred, Operation
from holdfast.store.lmdb.protocol import resolve_deferred
from holdfast.store.requests import CommitAnswer, CommitRequest
from holdfast.store.txn import ClientTxn


class HistoryRecorder:
    """Records the operations of one incarnation."""

    def __init__(
        self, history: History, actor: str, incarnation: str, now_ns: Callable[[], int]
    ) -> None:
        self._history = history
        self._actor = actor
        self._incarnation = incarnation
        self._now_ns = now_ns
        # Returns the lease under which a function of this incarnation acts, if its arguments do not
        # hold one.
        self.acting_lease: Callable[[Any], Lease | None] = lambda fn: None

    def add(self, op: str, args: dict[str, Any], result: str = "ok", **rest: Any) -> HistoryEvent:
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

    def add_fault(self, kind: str, boundary: int) -> None:
        self.add("fault", {"kind": kind, "boundary": boundary})


class RecordedCall:
    """One call of `transact`, over all its attempts."""

    def __init__(
        self,
        recorder: HistoryRecorder,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.txn_no = 0
        self.result: Any = None  # result of the function, if it is not an operation
        self._recorder = recorder
        self.fn = fn
        self._args = args
        self._kwargs = kwargs

    def record_failure(self, error: HoldfastError) -> None:
        self._add(*self._describe(), "fail", {"code": error.code, **to_plain(error.fields)})

    def record_refusal(self, error: HoldfastError) -> None:
        if isinstance(error, CommitUnknown):
            self._recorder.add_fault("outcome forgotten", 0)
            self.record_unknown()
        else:
            self.record_failure(error)

    def record_unknown(self) -> None:
        self._add(*self._describe(), "unknown", None)

    def record_applied(self, txn: ClientTxn, commit_no: int) -> list[HistoryEvent]:
        """Record the events of an applied transaction. Their result is `unknown` until the caller
        has the answer."""
        events = []
        if not isinstance(self.fn, Operation):
            value = None if isinstance(self.result, Deferred) else to_plain(self.result)
            events.append(self._add(*self._describe(), "unknown", value, commit_no))
        for (called, args), answer in zip(txn.calls, txn.call_results, strict=True):
            about = called.name, _named_arguments(called.by_position, args, {})
            events.append(self._add(*about, "unknown", to_plain(answer.value), commit_no))
        return events

    def _describe(self) -> tuple[str, dict[str, Any]]:
        fn = self.fn
        if isinstance(fn, Operation):
            return fn.name, _named_arguments(fn.fn, self._args, self._kwargs)
        arguments = _named_arguments(fn, self._args, self._kwargs)
        lease = self._recorder.acting_lease(fn)
        if lease is not None:
            arguments["lease"] = to_plain(lease)
        return getattr(fn, "__name__", "call"), arguments

    def _add(
        self, op: str, args: dict[str, Any], result: str, value: Any, commit_no: int = 0
    ) -> HistoryEvent:
        return self._recorder.add(
            op, args, result, value=value, commit_no=commit_no, txn_no=self.txn_no
        )


class SentTransaction:
    """A transaction in flight, later with its answer or the store's error."""

    def __init__(
        self,
        request: CommitRequest,
        call: RecordedCall,
        txn: ClientTxn,
        first_send: SentTransaction | None = None,
    ) -> None:
        self.request = request
        self.answer: CommitAnswer | None = None
        self.error: HoldfastError | None = None
        self.events: list[HistoryEvent] = []
        self._call = call
        self._txn = txn
        self._first_send = first_send

    def on_answer(self, answer: CommitAnswer) -> None:
        self.answer = answer
        if answer.error is not None:
            self._call.record_refusal(from_wire(answer.error))
            return
        resolve_deferred(self._txn, answer)
        # The store answers a resend and does not apply it. A second application is recorded as a
        # second event.
        first = None if self._first_send is None else self._first_send.answer
        if first is None or first.commit_no != answer.commit_no:
            self.events = self._call.record_applied(self._txn, answer.commit_no)


def _named_arguments(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    # Cached by code object: methods and closures are new objects in each call.
    code = fn.__code__
    names = _parameter_names.get(code)
    if names is None:
        parameters = inspect.signature(fn).parameters
        names = _parameter_names[code] = list(parameters)[1:]
    arguments = {name: to_plain(value) for name, value in zip(names, args, strict=False)}
    arguments.update({name: to_plain(value) for name, value in kwargs.items()})
    return arguments


_parameter_names: dict[CodeType, list[str]] = {}
