"""A call of an endpoint: what its handler receives, and how its changes commit.

`transact` commits the change of a handler together with its audit entry. `invoke` decodes a request and runs its
handler without a server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from holdfast.errors import Invalid
from holdfast.ops import audit
from holdfast.ops.api.endpoint import ApiAnswer, Endpoint
from holdfast.store.api import Store, Txn

if TYPE_CHECKING:
    from holdfast.app.app import App

T = TypeVar("T")

# The actor of a call without a token, which only loopback permits.
LOCAL_ACTOR = "local"


class NeedsApp(Invalid):
    code = "needs_app"
    hint = "this request needs the code of the application: start the server with --app MODULE:APP"


@dataclass(frozen=True, kw_only=True)
class ApiCall:
    endpoint: Endpoint
    store: Store
    universe: str
    app: App | None = None
    path: Mapping[str, str] = field(default_factory=dict)
    query: Any = None
    body: Any = None
    # The name of the token.
    actor: str = LOCAL_ACTOR
    # The header Idempotency-Key, or "".
    key: str = ""
    # The header If-None-Match, or "".
    etag: str = ""

    def read(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Read on a snapshot."""
        return self.store.read(fn, *args)

    def transact(
        self, fn: Callable[..., Any], *args: Any, subject: str = "", detail: str = ""
    ) -> Any:
        """Commit `fn(txn, *args)`, with an audit entry in the same commit if the endpoint is audited. `subject`
        is `kind/id`, such as `world/Account/ada`."""
        if not self.endpoint.is_audited:
            return self.store.transact(fn, *args)

        def audited(txn: Txn) -> Any:
            done = fn(txn, *args)
            audit.record(
                txn, self.universe, self.actor, self.endpoint.operation_id, subject, detail
            )
            return done

        return self.store.transact(audited)

    def require_app(self) -> App:
        if self.app is None:
            raise NeedsApp(what=self.endpoint.operation_id)
        return self.app


def invoke(
    endpoint: Endpoint,
    store: Store,
    universe: str,
    *,
    path: Mapping[str, str] | None = None,
    query: Mapping[str, str] | None = None,
    body: Any = None,
    app: App | None = None,
    actor: str = LOCAL_ACTOR,
    key: str = "",
) -> Any:
    """Run an endpoint on JSON data and return its answer as JSON data."""
    options = endpoint.options
    call = ApiCall(
        endpoint=endpoint,
        store=store,
        universe=universe,
        app=app,
        path=path or {},
        query=decode_query(options.query, query or {}),
        body=None if options.body is None else _decode_body(options.body, body or {}),
        actor=actor,
        key=key,
    )
    if options.needs_app:
        call.require_app()
    answer = endpoint.handler(call)
    value = answer.value if isinstance(answer, ApiAnswer) else answer
    return msgspec.json.decode(msgspec.json.encode(value))


def decode_query(kind: type[T], query: Mapping[str, str]) -> T:
    """Decode a query string. Its values are texts, which become numbers and truth values by their types."""
    try:
        return msgspec.convert(dict(query), kind, strict=False)
    except msgspec.ValidationError as error:
        raise Invalid(what="query", why=str(error)) from None


def _decode_body(kind: type[T], body: Any) -> T:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise Invalid(what="body", why=str(error)) from None
