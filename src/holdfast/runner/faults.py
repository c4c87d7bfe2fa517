"""What a handler's error means for its item: a table from exception type to class.

    SUCCESS       done
    CONFLICT      retryable: somebody else committed first
    BUSY          retryable: nothing is wrong, only not now
    TRANSIENT     retryable for another reason
    REFUSED       the item can never be handled (undecodable, misrouted): dead letter, and no alarm
    FATAL         anything else: dead letter, and the error surfaces to the worker's policy

The nearest class in the error's line of ancestors decides, by its row or, if it is one of ours and
says so itself, by its `retryable`. So a row for a subclass overrides that of its parent. A table is
immutable and grows by `retrying` and `failing`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from holdfast.config import ERROR_CODE_CHARS_MAX
from holdfast.errors import (
    Busy,
    CommitUnknown,
    Conflict,
    HoldfastError,
    Invalid,
    NotFound,
    StoreGone,
)

OK = "ok"
UNTYPED = "handler_error"


class Fault(Enum):
    SUCCESS = "success"
    CONFLICT = "conflict"
    BUSY = "busy"
    TRANSIENT = "transient"
    REFUSED = "refused"
    FATAL = "fatal"

    @property
    def retryable(self) -> bool:
        return self in _RETRYABLE


_RETRYABLE = frozenset({Fault.CONFLICT, Fault.BUSY, Fault.TRANSIENT})


class Exited(HoldfastError):
    code = "exited"
    retryable = True
    hint = "the handler tried to end its process or its own task"


class Refused(HoldfastError):
    """Raise it for an item that no retry can help: it is kept as a dead letter under this code."""

    code = "refused"


class Faults:
    def __init__(self, rows: Mapping[type[Exception], Fault] | None = None) -> None:
        self.rows = MappingProxyType({**_ROWS, **(rows or {})})

    def of(self, error: Exception | None) -> Fault:
        if error is None:
            return Fault.SUCCESS
        for kind in type(error).__mro__:
            if kind in self.rows:
                return self.rows[kind]
            if issubclass(kind, HoldfastError) and "retryable" in vars(kind):
                return Fault.TRANSIENT if kind.retryable else Fault.FATAL
        return Fault.FATAL

    def retrying(self, *kinds: type[Exception]) -> Faults:
        return self._with(Fault.TRANSIENT, kinds)

    def failing(self, *kinds: type[Exception]) -> Faults:
        return self._with(Fault.FATAL, kinds)

    def _with(self, fault: Fault, kinds: tuple[type[Exception], ...]) -> Faults:
        for kind in kinds:
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise Invalid(what="faults", why="not an exception class", found=repr(kind))
        return Faults({**self.rows, **dict.fromkeys(kinds, fault)})


_ROWS: Mapping[type[Exception], Fault] = {
    Conflict: Fault.CONFLICT,
    Busy: Fault.BUSY,
    # A handler may be run again after any crash, so it looks before it repeats anyway.
    CommitUnknown: Fault.TRANSIENT,
    Refused: Fault.REFUSED,
}


def code_of(error: Exception | None) -> str:
    """The stable text under which an outcome is logged, recorded and buried."""
    if error is None:
        return OK
    code = getattr(error, "code", None) if isinstance(error, HoldfastError) else None
    # Somebody's subclass may say anything; a code is short text, and never that of a success.
    usable = isinstance(code, str) and code.isascii() and code not in ("", OK)
    return str(code)[:ERROR_CODE_CHARS_MAX] if usable else UNTYPED


def transient(error: HoldfastError) -> bool:
    """Whether the store's refusal passes by itself. The loop counts it as busy and goes on.

    NotFound is among them: between two looks somebody else may have taken what was there.
    """
    return error.retryable or (isinstance(error, NotFound) and not isinstance(error, StoreGone))
