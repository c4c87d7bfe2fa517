"""Trace contexts (W3C Trace Context) of calls, and the spans of the OpenTelemetry API.

    current()         the context of the calling code, to be stored with a task, an event or an intent
    enter(…)          the span of code that runs for a stored context: it is current inside the code
    start(…)          a span that is not current: a submission, or a lease of many tasks

- A stored context is bytes: trace id (16), span id (8), flags (1), then the text of `tracestate`. No bytes: no context.
- A process that has not imported OpenTelemetry stores and passes contexts on, and makes no spans. This module imports
  OpenTelemetry only if the process has imported it already.
- No span is made under a context that is not sampled. The context is passed on.
- A message without a context starts a trace. The samplers of the SDK that decide by the trace id alone are asked before
  anything else is made (`RootDraw`).
- An error of the OpenTelemetry SDK is logged once and never reaches a caller.
"""

from __future__ import annotations

import copy
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar, Token
from functools import lru_cache
from importlib import import_module
from typing import Any

from holdfast import logs

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
# The most bytes of a `tracestate` that are stored, and its most members (W3C Trace Context, section 3.3).
TRACESTATE_BYTES_MAX = 512
TRACESTATE_MEMBERS_MAX = 32
# A span has at most this many links to the contexts of a batch.
LINKS_MAX = 128
FLUSH_MS = 2_000
PRODUCER, CONSUMER, CLIENT, INTERNAL = "PRODUCER", "CONSUMER", "CLIENT", "INTERNAL"

Attributes = Mapping[str, "str | int | bool"]

_IDS_BYTES = 25
_SAMPLED = 1
_RANDOM = 2
# The sampled flag and the flag of a random trace id. Other flags have no meaning yet and are cleared.
_KNOWN_FLAGS = 3
# The context of replays: not sampled.
_REPLAY = b"\x01" * 24 + b"\x00"
_TRACEPARENT_PATTERN = re.compile(
    r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_MEMBER_PATTERN = re.compile(
    r"([a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)

# The context of code in a process without OpenTelemetry, and of a received request.
_received: ContextVar[bytes] = ContextVar("holdfast_trace", default=b"")
_otel: _OpenTelemetry | None = None


def current() -> bytes:
    """Return the context of the calling code, or no bytes."""
    otel = _otel or _find_otel()
    if otel is not None:
        context = otel.current()
        if context:
            return context
    return _received.get()


def parse(traceparent: str | None, tracestate: str | None = None) -> bytes:
    """Return the context of the two headers. A malformed `traceparent` is no context. A malformed `tracestate` is
    dropped, and a long one loses its last members."""
    match = _TRACEPARENT_PATTERN.fullmatch((traceparent or "").strip(" \t"))
    if match is None:
        return b""
    version, trace, span, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not int(trace, 16) or not int(span, 16):
        return b""
    known = int(flags, 16) & _KNOWN_FLAGS
    ids = bytes.fromhex(trace) + bytes.fromhex(span) + bytes([known])
    return ids + _bounded_state(tracestate or "")


def headers(context: bytes) -> dict[str, str]:
    """Return the headers of a context: none, `traceparent`, or `traceparent` and `tracestate`."""
    if len(context) < _IDS_BYTES:
        return {}
    text = f"00-{context[:16].hex()}-{context[16:24].hex()}-{context[24]:02x}"
    state = context[_IDS_BYTES:].decode("ascii", errors="replace")
    return {TRACEPARENT: text, TRACESTATE: state} if state else {TRACEPARENT: text}


def trace_id(context: bytes) -> str:
    """Return the trace id of a context for a log line, or empty text."""
    return context[:16].hex() if len(context) >= _IDS_BYTES else ""


def log_ids(context: bytes) -> dict[str, str]:
    """Return the log field of a context."""
    return {"trace_id": trace_id(context)} if context else {}


def is_sampled(context: bytes) -> bool:
    return len(context) >= _IDS_BYTES and bool(context[24] & _SAMPLED)


def start(
    name: str, kind: str, attributes: Attributes, *, links: Iterable[bytes] = ()
) -> TraceSpan | None:
    """Start a span under the current context. None if no SDK is configured, or if the current context is not sampled."""
    otel = _otel or _find_otel()
    tracer = None if otel is None else otel.tracer()
    if otel is None or tracer is None:
        return None
    local = otel.local_sampled()
    if local is None:
        received = _received.get()
        if not received or is_sampled(received):
            return otel.start_span(tracer, name, kind, attributes, otel.remote(received), links)
        return None
    # A local parent stays the SDK's own object.
    return otel.start_span(tracer, name, kind, attributes, None, links) if local else None


def start_root(
    name: str, kind: str, attributes: Attributes, parent: bytes, links: Iterable[bytes]
) -> TraceSpan | None:
    """Start a span under a stored context, or a new trace without one."""
    otel = _otel or _find_otel()
    tracer = None if otel is None else otel.tracer()
    if otel is None or tracer is None or (parent and not is_sampled(parent)):
        return None
    return otel.start_span(tracer, name, kind, attributes, otel.remote(parent), links)


def is_recording() -> bool:
    """Whether the process has configured an SDK, so that code without a stored context starts a new trace."""
    otel = _otel or _find_otel()
    return otel is not None and otel.tracer() is not None


def makes_span(context: bytes) -> bool:
    """Whether code that runs for a stored context gets a span."""
    return (not context or is_sampled(context)) and is_recording()


def pass_on(context: bytes) -> TraceScope | None:
    """Make a stored context current without a span. None without a context."""
    if not context:
        return None
    token = _received.set(context)
    otel = _otel or _find_otel()
    return TraceScope(None, token, None if otel is None else otel.attach(otel.remote(context)))


def enter(
    context: bytes,
    name: str,
    kind: str,
    attributes: Attributes,
    *,
    links: Iterable[bytes] = (),
) -> TraceScope:
    """Start the span of code that runs for a stored context, and make it current in this thread or coroutine. Without
    a span, the stored context is current."""
    otel = _otel or _find_otel()
    if otel is None:
        return TraceScope(None, _received.set(context), None)
    span = start_root(name, kind, attributes, context, links)
    under = otel.remote(context) if span is None else otel.with_span(span)
    return TraceScope(span, _received.set(context), otel.attach(under))


def enter_child(name: str, kind: str, attributes: Attributes) -> TraceScope | None:
    """Start a span under the current context and make it current. None if no span is made."""
    span = start(name, kind, attributes)
    if span is None or _otel is None:
        return None
    return TraceScope(span, _received.set(span.context), _otel.attach(_otel.with_span(span)))


def enter_replay() -> TraceScope | None:
    """Make a context that is not sampled current in a replay, so that the user's own spans are not made again."""
    otel = _otel or _find_otel()
    if otel is None or otel.tracer() is None:
        return None
    return TraceScope(None, _received.set(b""), otel.attach(otel.remote(_REPLAY)))


def receive(context: bytes) -> Token[bytes]:
    """Make the context of a received request current in this thread or coroutine."""
    return _received.set(context)


def forget(token: Token[bytes]) -> None:
    """Undo `receive`."""
    _received.reset(token)


def sending(operation: str, target: str, destination: str) -> Sending:
    """Return the block that sends a message: its span is `<operation> <target>`, for example `submit resize`."""
    otel = _otel or _find_otel()
    tracer = None if otel is None else otel.tracer()
    if otel is None or tracer is None:
        return _UNTRACED
    under = None
    local = otel.current_span_context()
    if local is not None:
        if not local.trace_flags & _SAMPLED:
            return Sending(None, _pack(local))
    elif received := _received.get():
        if not received[24] & _SAMPLED:
            return Sending(None, received)
        under = otel.remote(received)
    else:
        if otel.root_draw is not None:
            drawn = otel.root_draw.draw()
            if isinstance(drawn, bytes):
                return Sending(None, drawn)
            tracer = drawn
        under = otel.remote(b"")
    name, attributes = _message_of(operation, target, destination)
    span = otel.start_span(tracer, name, PRODUCER, attributes, under, ())
    return Sending(span, None if span is None else span.context)


@lru_cache(1024)
def _message_of(operation: str, target: str, destination: str) -> tuple[str, Attributes]:
    return f"{operation} {target}", message_attributes(operation, "send", destination)


def message_attributes(operation: str, kind: str, destination: str) -> dict[str, str | int | bool]:
    """Return the attributes of the semantic conventions for messages."""
    return {
        "messaging.system": "holdfast",
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
        "messaging.destination.name": destination,
    }


class Sending:
    """A block that sends a message, with a span if one is made."""

    __slots__ = ("_context", "_span")

    def __init__(self, span: TraceSpan | None, context: bytes | None) -> None:
        self._span = span
        self._context = context

    @property
    def context(self) -> bytes:
        """The context to store with the message."""
        return current() if self._context is None else self._context

    def sent(self, message_id: object) -> None:
        """Record the id of the message."""
        if self._span is not None:
            self._span.set({"messaging.message.id": str(message_id)})

    def sent_batch(self, count: int) -> None:
        if self._span is not None:
            self._span.set({"messaging.batch.message_count": count})

    def __enter__(self) -> Sending:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if self._span is not None:
            if error is not None:
                self._span.fail(code_of(error), str(error))
            self._span.end()


_UNTRACED = Sending(None, None)
# The owners that hide the texts of errors.
_hiding: weakref.WeakSet[Any] = weakref.WeakSet()


def hide_error_texts(owner: object) -> None:
    """Leave the texts of errors out of the spans of this process: they may quote values that an application hides."""
    _hiding.add(owner)


def show_error_texts(owner: object) -> None:
    """End `hide_error_texts` of this owner."""
    _hiding.discard(owner)


def flush() -> None:
    """Export the ended spans of this process before it may be ended. Waits `FLUSH_MS` at most."""
    if _otel is not None:
        _otel.flush()


class TraceSpan:
    """A span of the SDK, and its context to store."""

    __slots__ = ("_error_status", "context", "span")

    def __init__(self, span: Any, context: bytes, error_status: Any) -> None:
        self.span = span
        self.context = context
        self._error_status = error_status

    def set(self, attributes: Attributes) -> None:
        if self.span.is_recording():
            self.span.set_attributes(attributes)

    def fail(self, code: str, error: str = "") -> None:
        """Set the status of the span to an error."""
        if self.span.is_recording():
            self.span.set_attribute("error.type", code)
            self.span.set_status(self._error_status, code if _hiding else error or code)

    def end(self, end_ns: int | None = None) -> None:
        try:
            self.span.end(end_ns)
        except Exception as error:
            _warn_once(error)


class TraceScope:
    """The current context of running code, with its span if it has one."""

    __slots__ = ("_attached", "_token", "span")

    def __init__(self, span: TraceSpan | None, token: Token[bytes], attached: Any) -> None:
        self.span = span
        self._token = token
        self._attached = attached

    def leave(self) -> None:
        """Make the former context current again. The span stays open."""
        _received.reset(self._token)
        if self._attached is not None and _otel is not None:
            _otel.detach(self._attached)

    def __enter__(self) -> TraceScope:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is None:
            self.exit()
        else:
            self.exit(code_of(error), str(error))

    def exit(self, code: str = "", error: str = "") -> None:
        """Make the former context current again, and end the span. `code` is the code of an error."""
        self.leave()
        self.end(code, error)

    def end(self, code: str = "", error: str = "") -> None:
        """End the span, also from another thread or coroutine."""
        if self.span is not None:
            if code:
                self.span.fail(code, error)
            self.span.end()


class _OpenTelemetry:
    """The OpenTelemetry API that the process has imported."""

    def __init__(self) -> None:
        context = import_module("opentelemetry.context")
        trace = import_module("opentelemetry.trace")
        self._trace = trace
        self._context_class = context.Context
        self._current_context = context.get_current
        self._empty = context.Context()
        # The key of the span in a context.
        [self._span_key] = trace.set_span_in_context(trace.INVALID_SPAN, self._empty)
        self._error_status = trace.StatusCode.ERROR
        self._kinds = {kind.name: kind for kind in trace.SpanKind}
        # Most contexts that are not sampled are only passed on: their objects are made when they are needed.
        self._stored_span = _stored_span_class(trace.NonRecordingSpan, self._span_context)
        # Loads a provider that an environment variable names.
        self._seen: Any = trace.get_tracer_provider()
        self._tracer = self._tracer_of(self._seen)
        self.root_draw = find_root_draw(self._tracer)
        self.attach = context.attach
        self.detach = context.detach

    def tracer(self) -> Any:
        """Return the tracer of the configured SDK, or None."""
        # The attribute takes 40 ns, the public function a microsecond.
        provider = getattr(self._trace, "_TRACER_PROVIDER", self)
        if provider is self:
            provider = self._trace.get_tracer_provider()
        if provider is not self._seen:
            self._seen, self._tracer = provider, self._tracer_of(provider)
            self.root_draw = find_root_draw(self._tracer)
        return self._tracer

    def flush(self) -> None:
        force_flush = getattr(self._seen, "force_flush", None)
        if force_flush is not None:
            try:
                force_flush(FLUSH_MS)
            except Exception as error:
                _warn_once(error)

    def _tracer_of(self, provider: Any) -> Any:
        without_sdk = (self._trace.ProxyTracerProvider, self._trace.NoOpTracerProvider)
        if provider is None or isinstance(provider, without_sdk):
            return None
        return provider.get_tracer("holdfast")

    def local_sampled(self) -> bool | None:
        """Whether the current span of this process is sampled. None without one."""
        context = self.current_span_context()
        return None if context is None else bool(context.trace_flags & _SAMPLED)

    def current_span_context(self) -> Any:
        """Return the SDK's context of the current span, or None without a valid one."""
        span = self._current_context().get(self._span_key)
        if span is None:
            return None
        context = span.get_span_context()
        return context if context.is_valid else None

    def current(self) -> bytes:
        context = self.current_span_context()
        return b"" if context is None else _pack(context)

    def start_span(
        self,
        tracer: Any,
        name: str,
        kind: str,
        attributes: Attributes,
        under: Any,
        links: Iterable[bytes],
    ) -> TraceSpan | None:
        try:
            linked = [self._link(one) for one in links] if links else None
            span = tracer.start_span(name, under, self._kinds[kind], attributes, linked)
            return TraceSpan(span, _pack(span.get_span_context()), self._error_status)
        except Exception as error:
            _warn_once(error)
            return None

    def with_span(self, span: TraceSpan) -> Any:
        return self._context_class({self._span_key: span.span})

    def _link(self, context: bytes) -> Any:
        return self._trace.Link(self._span_context(context))

    def remote(self, context: bytes) -> Any:
        """Return the context of OpenTelemetry for a stored context."""
        if len(context) < _IDS_BYTES:
            return self._empty
        return self._context_class({self._span_key: self._stored_span(context)})

    def _span_context(self, context: bytes) -> Any:
        trace = self._trace
        state = context[_IDS_BYTES:].decode("ascii", errors="replace")
        return trace.SpanContext(
            int.from_bytes(context[:16], "big"),
            int.from_bytes(context[16:24], "big"),
            True,
            trace.TraceFlags(context[24]),
            trace.TraceState.from_header([state]) if state else trace.DEFAULT_TRACE_STATE,
        )


def _stored_span_class(base: type, decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return the class of the remote parent with a stored context."""

    def __init__(span: Any, context: bytes) -> None:
        span.stored = context

    def get_span_context(span: Any) -> Any:
        if span.decoded is None:
            span.decoded = decode(span.stored)
        return span.decoded

    members = {"decoded": None, "__init__": __init__, "get_span_context": get_span_context}
    return type("StoredSpan", (base,), members)


_LOW_64_BITS = (1 << 64) - 1
_SDK = "opentelemetry.sdk.trace"


class RootDraw:
    """Decides about a new trace as the SDK would, without a span, a context object or attributes for a dropped one.

    Only for the SDK's samplers that decide by the trace id alone. `bound` is the least low half of a trace id that is
    dropped.
    """

    def __init__(self, tracer: Any, bound: int) -> None:
        self._tracer = tracer
        self._bound = bound
        ids = tracer.id_generator
        self._trace_id, self._span_id = ids.generate_trace_id, ids.generate_span_id
        is_random = getattr(ids, "is_trace_id_random", None)
        self._flags = _RANDOM if is_random is not None and is_random() else 0

    def draw(self) -> Any:
        """Return the context of a dropped trace, or the tracer that starts the root span of a sampled one."""
        try:
            trace_id = self._trace_id()
            if trace_id & _LOW_64_BITS >= self._bound:
                ids = trace_id << 64 | self._span_id()
                return (ids << 8 | self._flags).to_bytes(_IDS_BYTES, "big")
        except Exception as error:
            _warn_once(error)
            return b""
        # The SDK asks its sampler again, so that it gets the same trace id.
        tracer = copy.copy(self._tracer)
        tracer.id_generator = _DrawnId(self._tracer.id_generator, trace_id)
        return tracer


class _DrawnId:
    """An id generator of the SDK whose trace id was drawn."""

    def __init__(self, ids: Any, trace_id: int) -> None:
        self._ids, self._trace_id = ids, trace_id

    def generate_trace_id(self) -> int:
        return self._trace_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ids, name)


def find_root_draw(tracer: Any) -> RootDraw | None:
    """Return the draw for the sampler of a tracer, or None if only the SDK can ask the sampler."""
    sdk, sampling = sys.modules.get(_SDK), sys.modules.get(f"{_SDK}.sampling")
    if tracer is None or sdk is None or sampling is None or type(tracer) is not sdk.Tracer:
        return None
    try:
        sampler = tracer.sampler
        if (
            isinstance(sampler, sampling.ParentBased)
            and type(sampler).__module__ == sampling.__name__
        ):
            sampler = sampler._root
        if type(sampler) is sampling.TraceIdRatioBased:
            return RootDraw(tracer, sampler.bound)
        if sampler is sampling.ALWAYS_OFF:
            return RootDraw(tracer, 0)
    except AttributeError as error:
        # Another version of the SDK.
        _warn_once(error)
    return None


def _pack(span_context: Any) -> bytes:
    if not span_context.is_valid:
        return b""
    both = span_context.trace_id << 64 | span_context.span_id
    ids: bytes = (both << 8 | span_context.trace_flags & _KNOWN_FLAGS).to_bytes(_IDS_BYTES, "big")
    state = span_context.trace_state
    return ids + _bounded_state(state.to_header()) if state else ids


def code_of(error: BaseException) -> str:
    """Return the `error.type` of an error."""
    return str(getattr(error, "code", "") or type(error).__name__)


def _find_otel() -> _OpenTelemetry | None:
    global _otel
    if "opentelemetry.trace" not in sys.modules:
        return None
    if _otel is None:
        try:
            _otel = _OpenTelemetry()
        except Exception as error:
            # Another thread may still import it, or it is not the OpenTelemetry API.
            _warn_once(error)
    return _otel


def _bounded_state(text: str) -> bytes:
    """Return the valid members of a `tracestate` that fit into its limits."""
    members = [member for part in text.split(",") if (member := part.strip(" \t"))]
    size = -1
    kept: list[str] = []
    keys: set[str] = set()
    for member in members:
        match = _MEMBER_PATTERN.fullmatch(member)
        if match is None or match[1] in keys:
            return b""
        keys.add(match[1])
        if size + 1 + len(member) <= TRACESTATE_BYTES_MAX and len(kept) < TRACESTATE_MEMBERS_MAX:
            kept.append(member)
            size += 1 + len(member)
    return ",".join(kept).encode()


_warned = False


def _warn_once(error: Exception) -> None:
    global _warned
    if not _warned:
        _warned = True
        logs.warn("traces", "tracing failed", error=f"{type(error).__name__}: {error}")
