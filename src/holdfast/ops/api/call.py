"""A call of an endpoint: what its handler receives, and how its changes commit.

`transact` commits the change of a handler together with its audit entry and its idempotency key. `run` runs the
handler, or returns the stored answer to a repeated request. `invoke` decodes a request and calls `run` without a
server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from holdfast import codec
from holdfast.app.store_calls import Cancellation
from holdfast.errors import Invalid
from holdfast.ops import audit
from holdfast.ops.api import cursors, idempotency
from holdfast.ops.api.endpoint import ApiAnswer, Endpoint, ListQuery, PageQuery, Scope
from holdfast.ops.api.idempotency import AnswerPending, RequestKey
from holdfast.store.api import Store, Txn, unwrap
from holdfast.store.txn import ApplyTxn

if TYPE_CHECKING:
    from holdfast.app.app import App
    from holdfast.ops.state_process import StateProcess

T = TypeVar("T")

# The actor of a call without a token, which only loopback permits.
LOCAL_ACTOR = "local"


class NeedsApp(Invalid):
    code = "needs_app"
    hint = "this request needs the code of the application: start the server with --app MODULE:APP"


class NoIndex(Invalid):
    code = "no_index"
    hint = "a list has only the filters that an index answers; `indexed` names them"


@dataclass
class CommitMarks:
    """What the commits of a call have recorded so far. `repeats`: an earlier request with this key has committed."""

    audited: bool = False
    claimed: bool = False
    repeats: bool = False


@dataclass(frozen=True, kw_only=True)
class ApiCall:
    endpoint: Endpoint
    store: Store
    universe: str
    app: App | None = None
    # Computes states of worlds in another process. None: in this one.
    states: StateProcess | None = None
    path: Mapping[str, str] = field(default_factory=dict)
    query: Any = None
    body: Any = None
    # The name of the token.
    actor: str = LOCAL_ACTOR
    # The header Idempotency-Key, or "".
    key: str = ""
    # The header If-None-Match, or "".
    etag: str = ""
    marks: CommitMarks = field(default_factory=CommitMarks)
    # Cancelled when the client disconnects.
    cancellation: Cancellation = field(default_factory=Cancellation)

    def read(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Read on a snapshot."""
        return self.store.read(fn, *args)

    def transact(
        self, fn: Callable[..., Any], *args: Any, subject: str = "", detail: str = ""
    ) -> Any:
        """Commit `fn(txn, *args)`. The first commit of a call also records its idempotency key, and its audit entry
        if the request is audited. `subject` is `kind/id`, such as `world/Account/ada`.

        The call of a repeat commits nothing: `fn` runs on a snapshot and returns the result of the first request.
        """
        marks = self.marks
        if marks.repeats:
            return self._find_result(fn, *args)
        audits = self.is_audited and not marks.audited
        claims = self.has_key and not marks.claimed
        if not audits and not claims:
            return self.store.transact(fn, *args)

        def recorded(txn: Txn) -> Any:
            if claims:
                idempotency.claim(txn, self.request_key)
            done = fn(txn, *args)
            if audits:
                audit.record(
                    txn, self.universe, self.actor, self.endpoint.operation_id, subject, detail
                )
            return done

        try:
            done = self.store.transact(recorded)
        except AnswerPending:
            # A simultaneous request with this key has committed first.
            if not self.endpoint.options.finds_repeat:
                raise
            marks.repeats = True
            return self._find_result(fn, *args)
        marks.audited, marks.claimed = True, True
        return done

    def _find_result(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Return the result of an operation that recognizes its key. Raise AnswerPending if it would write."""

        def find(txn: Txn) -> Any:
            buffer = ApplyTxn(txn, now_ns=txn.now_ns, generation=txn.generation)
            result = unwrap(fn(buffer, *args))
            if buffer.writes:
                raise AnswerPending(key=self.key)
            return result

        return self.store.read(find)

    def recording_store(self, subject: str = "", detail: str = "") -> Store:
        """Return a store for functions that call `Store.transact`: its commits go through `ApiCall.transact`."""
        return cast(Store, RecordingStore(self, subject, detail))

    @property
    def is_audited(self) -> bool:
        """Whether the request needs the scope `operate`."""
        endpoint = self.endpoint
        return endpoint.method != "GET" and endpoint.scope_of(self.body) is Scope.OPERATE

    @property
    def has_key(self) -> bool:
        return bool(self.key) and self.endpoint.method != "GET"

    @property
    def request_key(self) -> RequestKey:
        """The idempotency key with the digest of the request."""
        request = [self.endpoint.operation_id, dict(self.path), self.query, self.body]
        # Sorted keys: the order of the members of a JSON object has no meaning.
        encoded = msgspec.json.encode(request, order="deterministic")
        return RequestKey(self.universe, self.key, codec.digest(encoded))

    def require_app(self) -> App:
        if self.app is None:
            raise NeedsApp(what=self.endpoint.operation_id)
        return self.app


class RecordingStore:
    """A store whose commits go through `ApiCall.transact`."""

    def __init__(self, call: ApiCall, subject: str, detail: str) -> None:
        self._call = call
        self._about = {"subject": subject, "detail": detail}

    def transact(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._call.transact(partial(fn, **kwargs) if kwargs else fn, *args, **self._about)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call.store, name)


def run(call: ApiCall) -> ApiAnswer:
    """Run the handler of a call. A repeat of an idempotency key returns the first answer and changes nothing. An endpoint
    that `continues` finishes a request whose first commit has recorded the key."""
    if call.endpoint.options.needs_app:
        call.require_app()
    if not call.has_key:
        return _as_answer(call, call.endpoint.handler(call))
    first = call.store.read(idempotency.find_answer, call.request_key)
    if first is not None:
        return first
    if call.store.read(idempotency.is_claimed, call.request_key):
        _prepare_repeat(call)
    answer = _as_answer(call, call.endpoint.handler(call))
    return cast(ApiAnswer, call.store.transact(idempotency.save_answer, call.request_key, answer))


def _prepare_repeat(call: ApiCall) -> None:
    """Prepare the repeat of a request that has committed and has no stored answer. Raise AnswerPending if its handler
    cannot run again."""
    options, marks = call.endpoint.options, call.marks
    if options.continues:
        marks.audited, marks.claimed = True, True
    elif options.finds_repeat:
        marks.repeats = True
    else:
        raise AnswerPending(key=call.key)


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
    etag: str = "",
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
        etag=etag,
    )
    return msgspec.json.decode(msgspec.json.encode(run(call).value))


def _as_answer(call: ApiCall, value: Any) -> ApiAnswer:
    answer = value if isinstance(value, ApiAnswer) else ApiAnswer(value)
    return answer if answer.status else replace(answer, status=call.endpoint.options.status)


def decode_query(kind: type[T], query: Mapping[str, str]) -> T:
    """Decode a query string. Its values are texts, which become numbers and truth values by their types."""
    if issubclass(kind, ListQuery):
        indexed = sorted(name for name in kind.__struct_encode_fields__)
        unknown = sorted(set(query) - set(indexed))
        if unknown:
            raise NoIndex(what="filter", found=unknown[0][:64], indexed=indexed)
    if issubclass(kind, PageQuery) and "limit" in query:
        cursors.check_limit_text(query["limit"], kind.limit_min)
    try:
        return msgspec.convert(dict(query), kind, strict=False)
    except msgspec.ValidationError as error:
        raise Invalid(what="query", why=str(error)) from None


def _decode_body(kind: type[T], body: Any) -> T:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise Invalid(what="body", why=str(error)) from None
