"""New traces: the decision of a sampler by the trace id alone is made before anything else."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    ParentBased,
    ParentBasedTraceIdRatio,
    Sampler,
    TraceIdRatioBased,
)

from holdfast import traces
from holdfast.traces import RootDraw, find_root_draw
from tests.traces.recorded import Recorded, configure_sdk, remove_sdk

DRAWS = 400


class CountedSampler(TraceIdRatioBased):
    """A sampler of the application, which may look at names and attributes."""

    asked = 0

    def should_sample(self, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        return super().should_sample(*args, **kwargs)


class CountedIds(RandomIdGenerator):
    def __init__(self) -> None:
        self.spans = 0

    def generate_span_id(self) -> int:
        self.spans += 1
        return super().generate_span_id()


def draw_of(sampler: Sampler) -> RootDraw | None:
    return find_root_draw(TracerProvider(sampler=sampler).get_tracer("holdfast"))


@pytest.fixture(params=[TraceIdRatioBased(0.5), ParentBasedTraceIdRatio(0.5)])
def halves(request: pytest.FixtureRequest) -> RootDraw:
    found = draw_of(request.param)
    assert found is not None
    return found


def test_each_draw_is_the_decision_of_the_sampler(halves: RootDraw) -> None:
    sampler = TraceIdRatioBased(0.5)
    dropped = 0
    for _ in range(DRAWS):
        drawn = halves.draw()
        if isinstance(drawn, bytes):
            dropped += 1
            trace_id = int.from_bytes(drawn[:16], "big")
            assert not traces.is_sampled(drawn)
        else:
            span = drawn.start_span("root").get_span_context()
            assert span.trace_flags.sampled
            assert drawn.start_span("root").get_span_context().trace_id == span.trace_id
            trace_id = span.trace_id
        result = sampler.should_sample(None, trace_id, "root")
        assert result.decision.is_sampled() is not isinstance(drawn, bytes)
    # 0.5 within six standard deviations.
    assert abs(dropped - DRAWS / 2) < 3 * DRAWS**0.5


def test_dropped_context_is_one_that_the_sdk_would_make() -> None:
    draw = draw_of(ParentBased(ALWAYS_OFF))
    assert draw is not None
    context = draw.draw()
    [made] = {len(context), len(traces.parse(traces.headers(context)["traceparent"]))}
    assert made == 25
    tracer = TracerProvider(sampler=ALWAYS_OFF).get_tracer("user")
    flags = tracer.start_span("root").get_span_context().trace_flags
    assert context[24] == flags
    assert draw.draw()[:24] != context[:24]


@pytest.mark.parametrize(
    "sampler", [CountedSampler(0.5), ParentBased(CountedSampler(0.5)), ALWAYS_ON]
)
def test_only_the_sdk_asks_another_sampler(sampler: Sampler) -> None:
    assert draw_of(sampler) is None


def test_sampler_of_the_application_is_asked_for_each_new_trace() -> None:
    sampler = CountedSampler(0.0)
    recorded = configure_sdk(sampler)
    try:
        for _ in range(3):
            with traces.sending("submit", "resize", "images") as sending:
                assert not traces.is_sampled(sending.context)
        assert sampler.asked == 3
        assert recorded.names() == []
    finally:
        remove_sdk()


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_message_of_a_new_trace_has_its_span_if_it_is_sampled(rate: float) -> None:
    recorded: Recorded = configure_sdk(ParentBasedTraceIdRatio(rate))
    try:
        with traces.sending("submit", "resize", "images") as sending:
            context = sending.context
            assert sending.context == context
            sending.sent(7)
        assert traces.is_sampled(context) == (rate == 1.0)
        if rate == 0.0:
            assert recorded.names() == []
        else:
            span = recorded.one("submit resize").get_span_context()
            assert span is not None
            assert context[:24] == (span.trace_id << 64 | span.span_id).to_bytes(24, "big")
    finally:
        remove_sdk()


def test_id_generator_of_the_application_makes_the_ids() -> None:
    ids = CountedIds()
    provider = TracerProvider(sampler=TraceIdRatioBased(0.5), id_generator=ids)
    draw = find_root_draw(provider.get_tracer("holdfast"))
    assert draw is not None
    for _ in range(10):
        drawn = draw.draw()
        if not isinstance(drawn, bytes):
            drawn.start_span("root")
    assert ids.spans == 10
