"""The spans that a test has recorded."""

from __future__ import annotations

import time
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import DEFAULT_ON, Sampler
from opentelemetry.util._once import Once

TIMEOUT_S = 30.0


class Recorded:
    def __init__(self, sampler: Sampler = DEFAULT_ON) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def finished(self, prefix: str = "") -> list[ReadableSpan]:
        found = self._exporter.get_finished_spans()
        return sorted(
            (s for s in found if s.name.startswith(prefix)), key=lambda s: s.start_time or 0
        )

    def names(self) -> list[str]:
        return [span.name for span in self.finished()]

    def one(self, name: str) -> ReadableSpan:
        """Wait for the only span of this name: a worker ends a span after the result is committed."""
        [span] = self.wait(name, 1)
        return span

    def wait(self, prefix: str, count: int) -> list[ReadableSpan]:
        deadline = time.monotonic() + TIMEOUT_S
        while len(self.finished(prefix)) < count and time.monotonic() < deadline:
            time.sleep(0.002)
        found = self.finished(prefix)
        assert len(found) == count, (prefix, self.names())
        return found


def configure_sdk(sampler: Sampler = DEFAULT_ON) -> Recorded:
    recorded = Recorded(sampler)
    trace.set_tracer_provider(recorded.provider)
    return recorded


def remove_sdk() -> None:
    """Remove the provider of this process. The API allows only one call of `set_tracer_provider`."""
    trace._TRACER_PROVIDER = None
    trace._TRACER_PROVIDER_SET_ONCE = Once()


def trace_of(span: ReadableSpan) -> str:
    return format(_context(span).trace_id, "032x")


def span_id_of(span: ReadableSpan) -> int:
    return int(_context(span).span_id)


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else int(span.parent.span_id)


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def linked(span: ReadableSpan) -> list[int]:
    return [int(link.context.span_id) for link in span.links]


def _context(span: ReadableSpan) -> Any:
    return span.get_span_context()
