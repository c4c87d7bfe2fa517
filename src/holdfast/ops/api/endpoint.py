"""An endpoint of the HTTP API as data: path, scope, types of its request and answer, and its handler.

    Endpoint("POST", "/v1/worlds/{type}/{name}/pause", Scope.OPERATE, pause_world, WorldAnswer, "Pause a world")

- A handler is synchronous, takes an `ApiCall` and returns a value of the type `answer`, or an `ApiAnswer` around it.
  The server runs it in a thread. It raises typed errors, which become problems (RFC 9457).
- The types are msgspec structs. The server decodes requests with them, and the OpenAPI document is generated from them.
- A change is one transaction through `ApiCall.transact`. The audit entry and the idempotency key commit with it.
- The module uses no sockets. Tests call handlers through `invoke`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from holdfast.errors import HoldfastError

T = TypeVar("T")

LIMIT_DEFAULT = 100
LIMIT_MAX = 1_000


class Scope(StrEnum):
    """What a token permits. OPERATE implies READ. No other scope implies another."""

    READ = "read"
    SUBMIT = "submit"
    WORK = "work"
    OPERATE = "operate"


class RequestModel(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The base class of bodies and query strings. Unknown fields are refused."""


class NoQuery(RequestModel):
    pass


class ListQuery(RequestModel):
    """The query of a list. The fields of a subclass are its filters, and each has an index. Any other filter is refused
    with `no_index`."""


class PageQuery(ListQuery):
    """The query of a list of pages: where it continues, and how many items it returns."""

    limit_min: ClassVar[int] = 1

    cursor: str = ""
    limit: int = LIMIT_DEFAULT


class EmptyBody(RequestModel):
    pass


class Page(msgspec.Struct, Generic[T], kw_only=True):
    """A page of a list. `next` is the cursor of the next page, and null on the last one."""

    items: list[T]
    next: str | None = None


@dataclass(frozen=True)
class ApiAnswer:
    """An answer with another status, an entity tag or further headers."""

    value: Any
    status: int = 0
    etag: str = ""
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class BodyScope:
    """The scope of the requests whose bodies match, in place of the scope of their endpoint."""

    scope: Scope
    applies: Callable[[Any], bool]
    # The condition in words, for the OpenAPI document.
    when: str


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    query: type[msgspec.Struct] = NoQuery
    # None: the request has no body.
    body: type[msgspec.Struct] | None = None
    status: int = 200
    # Errors besides those of every endpoint, for the OpenAPI document.
    problems: tuple[type[HoldfastError], ...] = ()
    # Answers 409 `needs_app` when the server has no app.
    needs_app: bool = False
    # The repeat of an unfinished request with its idempotency key continues it: the handler skips the finished part.
    continues: bool = False
    # The handler may wait for seconds. The server runs it in one of a bounded number of threads.
    waits: bool = False
    body_scope: BodyScope | None = None
    # The operation of the handler recognizes the idempotency key itself. A repeat whose answer is not stored runs the
    # handler again, and its operation may write nothing.
    finds_repeat: bool = False


_DEFAULT = EndpointOptions()


@dataclass(frozen=True)
class Endpoint:
    method: str
    path: str
    scope: Scope
    handler: Callable[[Any], Any]
    answer: Any
    summary: str
    options: EndpointOptions = _DEFAULT

    @property
    def segments(self) -> tuple[str, ...]:
        """The parts of the path; a part in braces is a parameter."""
        return tuple(self.path.strip("/").split("/"))

    @property
    def operation_id(self) -> str:
        """The stable name of this endpoint, as in the OpenAPI document and in audit entries."""
        return self.handler.__name__

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """The scopes that a request may need. Its body determines which one."""
        other = self.options.body_scope
        return (self.scope,) if other is None else (self.scope, other.scope)

    def scope_of(self, body: Any) -> Scope:
        other = self.options.body_scope
        return other.scope if other is not None and other.applies(body) else self.scope


def match_path(endpoint: Endpoint, parts: Sequence[str]) -> dict[str, str] | None:
    """Return the path parameters of a decoded path, or None."""
    segments = endpoint.segments
    if len(segments) != len(parts):
        return None
    parameters: dict[str, str] = {}
    for segment, part in zip(segments, parts, strict=True):
        if segment.startswith("{"):
            parameters[segment[1:-1]] = part
        elif segment != part:
            return None
    return parameters
