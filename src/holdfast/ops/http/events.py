"""Server-sent events: `GET /v1/events?subject=kind/id` streams a document each time that it changes.

- The data of an event is the answer of a `GET` request: of the subject, of `/v1/readiness`, or of the counts of queues,
  flows and effects. So one event is enough to show the subject, and a client that missed some needs only the last one.
- The id of an event is a digest of its data. A client that reconnects with `Last-Event-ID` gets an event only if the
  document has changed since. This holds on any server of the store, also after a restart.
- `also=readiness,counts` adds these documents to the stream of a subject: a browser opens few connections to one host. The
  id of an event then has the digest of each document.
- All streams of a subject share one read at a time. A stream ends after STREAM_S, and the client reconnects: its token is
  checked again. It also ends before an event for a token or session that has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast import codec
from holdfast.errors import HoldfastError, Invalid, NotFound
from holdfast.ops.api.call import ApiCall, decode_query, run
from holdfast.ops.api.endpoint import Endpoint, Scope
from holdfast.ops.http.problem import HttpResponse, ServerOverloaded
from holdfast.ops.http.routes import ClientDisconnect, RouteCall

if TYPE_CHECKING:
    from holdfast.ops.api.universes import UniverseChoice
    from holdfast.ops.http.redacted_responses import ResponseRedactor
    from holdfast.ops.http.server import HttpServer
    from holdfast.store.api import Store

CONTENT_TYPE = "text/event-stream"
STREAMS_MAX = 500
# The interval of reads of a subject, of comments that keep the connection open, and the longest stream.
READ_S = 0.5
COMMENT_S = 15.0
STREAM_S = 900.0
RECONNECT_MS = 1_000
_COMMENT = b":\n\n"
_log = logging.getLogger("holdfast.http")

# Each kind with the operations whose answers it shows, and the path parameters in its id.
READINESS, COUNTS = "readiness", "counts"
SUBJECTS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    READINESS: (("show_readiness",), ()),
    COUNTS: (("list_queues", "count_flows", "count_effects"), ()),
    "world": (("show_world",), ("type", "name")),
    "task": (("show_task",), ("id",)),
    "flow": (("show_flow",), ("id",)),
    "effect": (("show_effect",), ("intent",)),
    "timer": (("show_timer",), ("type", "name", "key")),
    "run": (("show_run",), ("run",)),
    "schedule": (("show_schedule",), ("name",)),
    "queue": (("show_queue",), ("queue",)),
    "worker": (("show_worker",), ("worker",)),
}
# These fields change without a change of the subject.
VOLATILE = frozenset(("at_ns", "leased_until_ns", "heartbeat_ns"))


class SubjectEvent(NamedTuple):
    id: str
    data: bytes
    # The subject no longer exists.
    gone: bool = False


class SubjectFeed:
    """The last event of a subject, and the streams that wait for the next one."""

    def __init__(self) -> None:
        self.members = 0
        self.event: SubjectEvent | None = None
        self.waiting: set[asyncio.Future[None]] = set()
        self.reader: asyncio.Task[None] | None = None

    def publish(self, event: SubjectEvent) -> None:
        if self.event is None or event.id != self.event.id:
            self.event = event
            self.wake()

    def wake(self) -> None:
        for future in list(self.waiting):
            if not future.done():
                future.set_result(None)


class StreamedSubject(NamedTuple):
    # The universe and the subject.
    key: tuple[str, str]
    read: Callable[[], SubjectEvent]
    first: SubjectEvent

    @property
    def kind(self) -> str:
        return self.key[1].partition("/")[0]


class EventStreams:
    """Used in the event loop of the server."""

    def __init__(
        self,
        server: HttpServer,
        store: Store,
        universes: UniverseChoice,
        endpoints: Mapping[str, Endpoint],
        redactor: ResponseRedactor | None = None,
    ) -> None:
        """`endpoints` by their operation id."""
        self._redactor = redactor
        self._server = server
        self._store = store
        self._universes = universes
        self._endpoints = endpoints
        self._feeds: dict[tuple[str, str], SubjectFeed] = {}
        self._streams = 0
        self._closed = False

    async def serve(self, call: RouteCall) -> HttpResponse:
        query = dict(call.request.query)
        universe = query.pop("universe", "")
        subjects = [query.pop("subject", ""), *parse_also(query.pop("also", ""))]
        if query:
            expected = ["also", "subject", "universe"]
            raise Invalid(what="query", found=min(query)[:64], expected=expected)
        parsed = [parse_subject(subject) for subject in subjects]
        if self._streams >= STREAMS_MAX:
            raise ServerOverloaded(what="event streams", max=STREAMS_MAX)
        # Before the first await: other requests must see the reserved place. The stream frees it at its end.
        self._streams += 1
        stream = None
        try:
            name = await self._server.run_in_thread(self._universes.resolve, universe)
            streamed = []
            for subject, (operations, path) in zip(subjects, parsed, strict=True):
                read = self._reader_of(name, subject, operations, path)
                # A missing subject is a problem, and not a stream.
                first = await self._server.threads.handle(read)
                streamed.append(StreamedSubject((name, subject), read, first))
            if call.request.method != "HEAD":
                last_id = call.request.headers.get("last-event-id", "")
                stream = self._stream(streamed, last_id, call)
        finally:
            if stream is None:
                self._streams -= 1
        return HttpResponse(200, b"", (("X-Accel-Buffering", "no"),), CONTENT_TYPE, stream=stream)

    def close(self) -> None:
        self._closed = True
        for feed in self._feeds.values():
            if feed.reader is not None:
                feed.reader.cancel()
            feed.wake()

    async def _stream(
        self, subjects: Sequence[StreamedSubject], last_id: str, call: RouteCall
    ) -> AsyncGenerator[bytes, None]:
        loop, disconnect = self._server.loop, call.disconnect
        until_s = loop.time() + STREAM_S
        seen = (
            last_id.split(".") if last_id.count(".") == len(subjects) - 1 else [""] * len(subjects)
        )
        feeds = [self._feeds.setdefault(one.key, SubjectFeed()) for one in subjects]
        for feed in feeds:
            feed.members += 1
        try:
            for feed, one in zip(feeds, subjects, strict=True):
                if feed.event is None:
                    feed.publish(one.first)
                if feed.reader is None or feed.reader.done():
                    feed.reader = loop.create_task(self._read_repeatedly(feed, one.read))
            yield b"retry: %d\n\n" % RECONNECT_MS
            while not self._closed and not disconnect.is_set and loop.time() < until_s:
                is_idle = True
                for at, (feed, one) in enumerate(zip(feeds, subjects, strict=True)):
                    event = feed.event
                    if event is None or event.id == seen[at]:
                        continue
                    is_idle, seen[at] = False, event.id
                    if not self._may_read(call):
                        return
                    name = b"gone" if event.gone else one.kind.encode()
                    yield b"id: %b\nevent: %b\ndata: %b\n\n" % (
                        ".".join(seen).encode(),
                        name,
                        event.data,
                    )
                    if event.gone:
                        return
                if is_idle and not await self._changed(feeds, disconnect):
                    yield _COMMENT
        finally:
            self._streams -= 1
            for feed, one in zip(feeds, subjects, strict=True):
                feed.members -= 1
                if not feed.members:
                    self._feeds.pop(one.key, None)
                    if feed.reader is not None:
                        feed.reader.cancel()

    def _may_read(self, call: RouteCall) -> bool:
        """Whether the token or the session of the stream is still valid."""
        now_s = self._server.loop.time()
        token = self._server.guard.find_token(call.request, now_s, checks_csrf=False)
        return token is not None and token.permits(Scope.READ)

    async def _changed(self, feeds: Sequence[SubjectFeed], disconnect: ClientDisconnect) -> bool:
        """Wait for the next event, a disconnect or the stop; return False if it takes COMMENT_S."""
        future: asyncio.Future[None] = self._server.loop.create_future()
        for feed in feeds:
            feed.waiting.add(future)
        disconnect.watch(future)
        try:
            async with asyncio.timeout(COMMENT_S):
                await future
        except TimeoutError:
            return False
        finally:
            for feed in feeds:
                feed.waiting.discard(future)
        return True

    async def _read_repeatedly(self, feed: SubjectFeed, read: Callable[[], SubjectEvent]) -> None:
        while True:
            await asyncio.sleep(READ_S)
            try:
                feed.publish(await self._server.threads.handle(read))
            except NotFound:
                feed.publish(SubjectEvent("gone", b"{}", gone=True))
            except HoldfastError:
                # Such as a store that does not answer: the next read tries again.
                continue
            except Exception:
                _log.exception("reading a subject of the event streams failed")

    def _reader_of(
        self,
        universe: str,
        subject: str,
        operations: tuple[str, ...],
        path: Mapping[str, str],
    ) -> Callable[[], SubjectEvent]:
        calls = [
            ApiCall(
                endpoint=endpoint,
                store=self._store,
                universe=universe,
                app=self._universes.app_of(universe),
                path=path,
                query=decode_query(endpoint.options.query, {}),
            )
            for endpoint in map(self._endpoints.__getitem__, operations)
        ]

        def read() -> SubjectEvent:
            answers = [msgspec.to_builtins(run(call).value) for call in calls]
            document = answers[0] if len(answers) == 1 else _merged(operations, answers)
            if self._redactor is not None:
                # Before the digest, because a digest of a hidden value reveals its changes.
                document = self._redactor.document(universe, subject, document)
            stable = {name: value for name, value in document.items() if name not in VOLATILE}
            digest = codec.digest(msgspec.json.encode(stable)).hex()[:32]
            return SubjectEvent(digest, msgspec.json.encode(document))

        return read


def parse_subject(text: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the operations and path parameters of `kind/id`. The last part of an id may contain slashes."""
    kind, _, rest = text.partition("/")
    if kind not in SUBJECTS:
        raise Invalid(what="subject", found=text[:64], expected=sorted(SUBJECTS))
    operations, names = SUBJECTS[kind]
    parts = rest.split("/", len(names) - 1) if names else []
    if len(parts) != len(names) or not all(parts) or (rest and not names):
        form = "/".join((kind, *(f"{{{name}}}" for name in names)))
        raise Invalid(what="subject", found=text[:64], expected=form)
    return operations, dict(zip(names, parts, strict=True))


def parse_also(text: str) -> list[str]:
    """Return the further subjects of a stream."""
    found = text.split(",") if text else []
    if len(set(found)) != len(found) or not set(found) <= {READINESS, COUNTS}:
        raise Invalid(what="also", found=text[:64], expected=f"{READINESS},{COUNTS}")
    return found


def _merged(operations: tuple[str, ...], answers: list[Any]) -> dict[str, Any]:
    """Return one document with the items of several answers."""
    merged: dict[str, Any] = {}
    for operation, answer in zip(operations, answers, strict=True):
        with contextlib.suppress(KeyError):
            merged.setdefault(operation.partition("_")[2], answer["items"])
        if "items" not in answer:
            merged.update(answer)
    return merged
