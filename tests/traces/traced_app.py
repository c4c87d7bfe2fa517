"""An application whose processes write their spans as JSON lines, one file for each process."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

import holdfast as hf
from holdfast import traces


class LineExporter(SpanExporter):
    def __init__(self, directory: Path) -> None:
        self._path = directory / f"{os.getpid()}.spans"

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(_document(span)) + "\n" for span in spans)
        return SpanExportResult.SUCCESS


def _document(span: ReadableSpan) -> dict[str, Any]:
    context: Any = span.get_span_context()
    return {
        "name": span.name,
        "trace": format(context.trace_id, "032x"),
        "span": format(context.span_id, "016x"),
        "parent": None if span.parent is None else format(span.parent.span_id, "016x"),
        "attributes": dict(span.attributes or {}),
    }


def read_spans(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """The spans of each process, by the name of its file."""
    return {
        path.name: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in sorted(directory.glob("*.spans"))
    }


class TeaBought(hf.Event):
    what: str


@hf.effect("charge", attempts=3)
def charge(call: hf.Call, what: str) -> int:
    return len(what)


class Shelf(hf.World):
    charged: int = 0

    @hf.on(TeaBought)
    def bought(self, event: TeaBought, cx: hf.Context) -> None:
        cx.do(charge, event.what)

    @hf.on(charge)
    def paid(self, receipt: Any, cx: hf.Context) -> None:
        self.charged += 1


@hf.task(isolation="process")
def weigh(what: str) -> str:
    with trace.get_tracer("user").start_as_current_span("user process"):
        return traces.trace_id(traces.current())


def reserve(what: str) -> str:
    return what


def die_once(marker: str) -> str:
    """End the process the first time."""
    path = Path(marker)
    if not path.exists():
        path.touch()
        os._exit(9)
    return "survived"


@hf.flow(lease_s=2.0)
async def order(what: str, marker: str = "") -> int:
    await hf.step(reserve, what)
    if marker:
        await hf.step(die_once, marker)
    return await hf.step(charge, what)


app = hf.App("shop", worlds=[Shelf], flows=[order], effects=[charge], tasks=[weigh])

if "HOLDFAST_TEST_SPANS" in os.environ:
    provider = TracerProvider()
    provider.add_span_processor(
        SimpleSpanProcessor(LineExporter(Path(os.environ["HOLDFAST_TEST_SPANS"])))
    )
    trace.set_tracer_provider(provider)
