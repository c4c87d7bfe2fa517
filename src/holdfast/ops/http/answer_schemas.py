"""The types of the answers of the worker protocol and of the server's own routes, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class LeasedTask(msgspec.Struct, frozen=True):
    """A task and its lease. Report under `lease`. `idempotency_key` is the same for every attempt."""

    id: str
    lease: str
    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    queue: str
    attempt: int
    suspect: bool
    idempotency_key: str
    lease_s: float
    execution_window_s: float
    expires_in_s: float
    # The trace context of the submission, if it had one.
    traceparent: str | UnsetType = UNSET
    tracestate: str | UnsetType = UNSET


class LeaseAnswer(msgspec.Struct, frozen=True):
    """The leased tasks. `suspects`: quarantined tasks wait for a worker that holds no other task."""

    tasks: list[LeasedTask]
    suspects: bool


class HeartbeatItem(msgspec.Struct, frozen=True):
    lease: str
    answer: str
    expires_in_s: float


class HeartbeatAnswer(msgspec.Struct, frozen=True):
    leases: list[HeartbeatItem]


class WorkerReportAnswer(msgspec.Struct, frozen=True):
    """COMMITTED, CANCELLED or REJECTED: `answer` for one report, `answers` for several."""

    answer: str | UnsetType = UNSET
    answers: list[str] | UnsetType = UNSET


class HealthAnswer(msgspec.Struct, frozen=True):
    ok: bool


class ReadyAnswer(msgspec.Struct, frozen=True):
    """Clients with the scope `read` also get the whole readiness snapshot."""

    ready: bool


class UniverseItem(msgspec.Struct, frozen=True):
    """`has_app`: the server has the code of this universe."""

    universe: str
    has_app: bool


class UniverseList(msgspec.Struct, frozen=True):
    items: list[UniverseItem]
    next: None


class SessionDocument(msgspec.Struct, frozen=True):
    """The token of this client. `required`: the server has tokens. `csrf` and `until_ns` belong to the session of a
    browser. `version` is the server's, and `trace_url` the URL of a trace with `{trace_id}` in it; a client without a token
    gets neither."""

    required: bool
    token: str | None
    scopes: list[str]
    csrf: str | None
    until_ns: int | None
    version: str | None
    trace_url: str | None


class ProblemDocument(msgspec.Struct, frozen=True):
    """An error (RFC 9457). `code` is stable. `retryable`: the same request may succeed later."""

    type: str
    title: str
    status: int
    code: str
    retryable: bool
    detail: str | UnsetType = UNSET
