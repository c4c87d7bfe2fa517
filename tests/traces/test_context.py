"""Trace contexts: parsing of the W3C headers, their limits, and processes without OpenTelemetry."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from holdfast import traces

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def test_headers_survive_a_stored_context() -> None:
    context = traces.parse(PARENT, "congo=t61rcWkgMzE, rojo=00f067aa0ba902b7")
    assert traces.headers(context) == {
        "traceparent": PARENT,
        "tracestate": "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7",
    }
    assert traces.trace_id(context) == TRACE
    assert traces.is_sampled(context)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "garbage",
        PARENT[:-1],
        PARENT + "0",
        PARENT + "-extra",
        PARENT.upper(),
        "ff" + PARENT[2:],
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-{TRACE}-{'0' * 16}-01",
        "0" * 100_000,
        PARENT.replace("4", "４", 1),
    ],
)
def test_malformed_traceparent_is_ignored(header: str | None) -> None:
    assert traces.parse(header, "congo=1") == b""


def test_later_version_with_more_fields_is_read_as_version_0() -> None:
    context = traces.parse(f"01-{TRACE}-00f067aa0ba902b7-01-more")
    assert traces.headers(context)["traceparent"] == PARENT


def test_unknown_flags_are_cleared() -> None:
    context = traces.parse(f"00-{TRACE}-00f067aa0ba902b7-ff")
    assert traces.headers(context)["traceparent"].endswith("-03")


def test_tracestate_of_10_000_characters_is_bounded_by_whole_members() -> None:
    state = ",".join(f"vendor{n}=" + "x" * 90 for n in range(101))
    assert len(state) > 10_000
    stored = traces.headers(traces.parse(PARENT, state))["tracestate"]
    assert len(stored) <= traces.TRACESTATE_BYTES_MAX
    assert stored == ",".join(state.split(",")[:5])


@pytest.mark.parametrize("state", ["=", "a", "A=1", "a=1,a=2", "a=ü", "a= ", "a=1,b", "a=\x00"])
def test_malformed_tracestate_is_dropped_and_its_traceparent_kept(state: str) -> None:
    assert traces.headers(traces.parse(PARENT, state)) == {"traceparent": PARENT}


def test_short_stored_context_is_none() -> None:
    assert traces.headers(b"damaged") == {}
    assert traces.trace_id(b"damaged") == ""
    assert not traces.is_sampled(b"damaged")


def run(script: str, tmp_path: Path) -> str:
    """Run a program in a new interpreter and return its output."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_process_without_opentelemetry_passes_the_context_on(tmp_path: Path) -> None:
    output = run(
        """
        import sys
        sys.modules["opentelemetry"] = None  # an import raises ImportError
        import logging, holdfast as hf
        from holdfast import traces
        from holdfast.ops import log_format
        log_format.configure("json", "info", {})

        @hf.task
        def outer() -> str:
            logging.getLogger("user").info("outer runs")
            return traces.trace_id(traces.current())

        app = hf.App("jobs", tasks=[outer])
        with app.open("memory:", roles=("task",)) as rt:
            logging.getLogger("user").info("no trace here")
            assert rt.submit(outer).result(30) == ""
            token = traces.receive(traces.parse("PARENT"))
            assert rt.submit(outer).result(30) == "TRACE"
            traces.forget(token)
        assert not [name for name in sys.modules if name.startswith("opentelemetry.")]
        """.replace("PARENT", PARENT).replace("TRACE", TRACE),
        tmp_path,
    )
    lines = output.splitlines()
    assert ["trace_id" in line for line in lines] == [False, False, True]


def test_process_that_does_not_use_opentelemetry_never_imports_it(tmp_path: Path) -> None:
    run(
        """
        import sys
        import holdfast as hf

        @hf.task
        def work() -> int:
            return 1

        with hf.App("jobs", tasks=[work]).open("memory:", roles=("task",)) as rt:
            assert rt.submit(work).result(30) == 1
        assert "opentelemetry" not in sys.modules
        """,
        tmp_path,
    )


def test_error_of_the_sdk_is_logged_once_and_does_not_affect_the_work(tmp_path: Path) -> None:
    output = run(
        """
        import holdfast as hf
        from opentelemetry import trace
        from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

        class Failing(SpanProcessor):
            def on_start(self, span, parent_context=None):
                raise RuntimeError("no disk")

        provider = TracerProvider()
        provider.add_span_processor(Failing())
        trace.set_tracer_provider(provider)

        @hf.task
        def work(n: int) -> int:
            return n

        with hf.App("jobs", tasks=[work]).open("memory:", roles=("task",)) as rt:
            assert [rt.submit(work, n).result(30) for n in range(3)] == [0, 1, 2]
        """,
        tmp_path,
    )
    assert output.count("tracing failed") == 1
    assert "RuntimeError: no disk" in output
