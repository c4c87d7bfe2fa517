"""Error classification: a table from exception type to the treatment of the item.

    SUCCESS       done
    CONFLICT      retryable: a concurrent transaction committed first
    BUSY          retryable: a resource is temporarily unavailable
    TRANSIENT     retryable for another reason
    REFUSED       the item can never be handled (undecodable, misrouted): dead letter without `on_fatal`
    FATAL         all other errors: dead letter, and the policy's `on_fatal` applies

The first class in the error's MRO that has a table row, or that is a HoldfastError with a `retryable`
attribute of its class, decides. So a row for a subclass overrides the row of its parent. A table is
immutable. `with_retryable` and `with_fatal` return extended copies.
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

OK_CODE = "ok"
UNTYPED_CODE = "handler_error"


class ErrorKind(Enum):
    SUCCESS = "success"
    CONFLICT = "conflict"
    BUSY = "busy"
    TRANSIENT = "transient"
    REFUSED = "refused"
    FATAL = "fatal"

    @property
    def retryable(self) -> bool:
        return self in _RETRYABLE


_RETRYABLE = frozenset({ErrorKind.CONFLICT, ErrorKind.BUSY, ErrorKind.TRANSIENT})


class HandlerExited(HoldfastError):
    code = "exited"
    retryable = True
    hint = "the handler tried to exit its process or cancelled its own task"


class Refused(HoldfastError):
    """Raise it for an item that no retry can help. The item becomes a dead letter with this code."""

    code = "refused"


class ErrorPolicy:
    def __init__(self, rows: Mapping[type[Exception], ErrorKind] | None = None) -> None:
        self.rows = MappingProxyType({**_DEFAULT_ROWS, **(rows or {})})

    def classify(self, error: Exception | None) -> ErrorKind:
        if error is None:
            return ErrorKind.SUCCESS
        for error_class in type(error).__mro__:
            if error_class in self.rows:
                return self.rows[error_class]
            if issubclass(error_class, HoldfastError) and "retryable" in vars(error_class):
                return ErrorKind.TRANSIENT if error_class.retryable else ErrorKind.FATAL
        return ErrorKind.FATAL

    def with_retryable(self, *error_classes: type[Exception]) -> ErrorPolicy:
        return self._with(ErrorKind.TRANSIENT, error_classes)

    def with_fatal(self, *error_classes: type[Exception]) -> ErrorPolicy:
        return self._with(ErrorKind.FATAL, error_classes)

    def _with(self, kind: ErrorKind, error_classes: tuple[type[Exception], ...]) -> ErrorPolicy:
        for error_class in error_classes:
            if not (isinstance(error_class, type) and issubclass(error_class, Exception)):
                raise Invalid(what="faults", why="not an exception class", found=repr(error_class))
        return ErrorPolicy({**self.rows, **dict.fromkeys(error_classes, kind)})


_DEFAULT_ROWS: Mapping[type[Exception], ErrorKind] = {
    Conflict: ErrorKind.CONFLICT,
    Busy: ErrorKind.BUSY,
    # Retryable, because handlers must be idempotent anyway: any crash may repeat them.
    CommitUnknown: ErrorKind.TRANSIENT,
    Refused: ErrorKind.REFUSED,
}


def code_of(error: Exception | None) -> str:
    """Return the stable code of an outcome for logs, recordings and dead letters."""
    if error is None:
        return OK_CODE
    code = getattr(error, "code", None) if isinstance(error, HoldfastError) else None
    # A user's subclass may define any value. A valid code is short ASCII text other than "ok".
    usable = isinstance(code, str) and code.isascii() and code not in ("", OK_CODE)
    return str(code)[:ERROR_CODE_CHARS_MAX] if usable else UNTYPED_CODE


def is_transient(error: HoldfastError) -> bool:
    """Whether a store error is transient. The loop counts it as busy and continues.

    NotFound is transient: another worker may remove an item between two reads.
    """
    return error.retryable or (isinstance(error, NotFound) and not isinstance(error, StoreGone))
