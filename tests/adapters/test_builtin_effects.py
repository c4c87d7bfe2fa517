"""Built-in effects through the public API: emitted by worlds and run by the effect worker pool."""

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast import store as stores
from holdfast.errors import Invalid
from holdfast.store.api import Store
from holdfast.world.catalog import subject_of
from holdfast.world.cycle import entries_topic
from tests.adapters.rig import (
    LOOPBACK,
    FakeHttpServer,
    ReceivedRequest,
    respond_with,
    run_http_server,
)
from tests.adapters.test_llm import HELLO

MODULES = (
    "holdfast.app.builtin_effects.http",
    "holdfast.app.builtin_effects.llm",
    "holdfast.app.builtin_effects.email",
)

request = hf.http.declare("http.request", LOOPBACK, attempts=2)


class Fetch(hf.Event):
    url: str
    options: dict[str, Any] = msgspec.field(default_factory=dict)


class Fetcher(hf.World):
    told: list[str] = msgspec.field(default_factory=list)

    @hf.on(Fetch)
    def fetch(self, event: Fetch, cx: hf.Context) -> None:
        cx.do(request, "POST", event.url, event.options)

    @hf.on(request)
    def fetched(self, receipt: hf.Receipt[hf.http.Response], cx: hf.Context) -> None:
        said = receipt.value.text if receipt.ok else receipt.code
        self.told = [*self.told, f"{receipt.status} {said}"]


app = hf.App("fetching", worlds=[Fetcher])


@pytest.fixture
def server() -> Iterator[FakeHttpServer]:
    with run_http_server() as server:
        yield server


@pytest.fixture
def store() -> Iterator[Store]:
    with stores.open("memory:") as store:
        yield store


def fetch(runtime: hf.Runtime, url: str) -> str:
    """Send a request from a world and return the recorded receipt."""
    world = runtime.world(Fetcher, "ada")
    world.send(Fetch(url))
    return str(state_after(runtime, world, 2).told[-1])


def state_after(runtime: hf.Runtime, world: Any, height: int) -> Any:
    """Wait until the journal has this height and return the state at it."""
    topic = entries_topic(subject_of(runtime.universe, world.record().world_id))
    since = runtime.store.wait(topic, 0, 0.0)
    deadline = time.monotonic() + 30
    while world.height() < height:
        assert time.monotonic() < deadline, "no receipt came"
        since = runtime.store.wait(topic, since, 1.0)
    return world.state(at=height)


def test_world_receives_the_http_response_as_receipt(server: FakeHttpServer) -> None:
    server.routes["/"] = respond_with(200, b"hello")
    with app.open("memory:") as runtime:
        assert fetch(runtime, server.url()) == "ok hello"
    [seen] = server.requests
    assert seen.headers["idempotency-key"]


def test_forbidden_address_is_one_error_without_retry() -> None:
    with app.open("memory:") as runtime:
        assert fetch(runtime, "http://169.254.169.254/") == "error forbidden_address"


def test_retried_request_has_the_same_idempotency_key(server: FakeHttpServer) -> None:
    def second_time_lucky(handler: Any, seen: ReceivedRequest) -> None:
        respond_with(503 if len(server.requests) == 1 else 200, b"at last")(handler, seen)

    server.routes["/"] = second_time_lucky
    with app.open("memory:") as runtime:
        assert fetch(runtime, server.url()) == "ok at last"
    first, second = server.requests
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]


def test_options_may_be_a_struct_or_plain_data() -> None:
    plain = request.call(("GET", "http://x.test/", {"timeout_s": 5.0}), {})
    typed = request.call(("GET", "http://x.test/", hf.http.Options(timeout_s=5.0)), {})
    assert plain.params == typed.params


@pytest.mark.parametrize(
    ("effect", "args"),
    [
        (hf.http.request, ("GET",)),
        (hf.http.request, ("GET", "http://x.test/", {"unknown": 1})),
        (hf.http.request, ("GET", 7)),
        (hf.llm.chat, ("Hello", "m")),
        (hf.llm.chat, (HELLO, "m", {"max_tokens": "many"})),
        (hf.email.send, ("a@x.org", "subject")),
        (hf.email.send, ("a@x.org", "subject", "body", {"unknown": 1})),
    ],
)
def test_invalid_effect_arguments_are_refused_at_the_call(
    effect: Any, args: tuple[Any, ...]
) -> None:
    with pytest.raises(Invalid):
        effect.call(args, {})


def test_builtin_effects_have_their_kinds() -> None:
    assert (hf.http.request.kind, hf.llm.chat.kind, hf.email.send.kind) == (
        "http.request", "llm.chat", "email.send",
    )  # fmt: skip
    hf.App("all", effects=[hf.http.request, hf.llm.chat, hf.email.send])


def test_importing_builtin_effects_loads_no_extra() -> None:
    code = (
        "import sys, holdfast as hf; hf.http.request, hf.llm.chat, hf.email.send;"
        "sys.exit(any(name in sys.modules for name in ('httpx', 'httpcore', 'anyio')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_extra_error_names_the_install_command() -> None:
    code = (
        "import sys, asyncio; sys.modules['httpx'] = None\n"
        "from holdfast.adapters.http import HttpClient\n"
        "from holdfast.adapters.address_guard import Reach\n"
        "try: asyncio.run(HttpClient(Reach()).request('GET', 'http://x.test/', None, key='k'))\n"
        "except Exception as error: print(error.code, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "not_installed" in done.stdout
    assert "pip install 'holdfast[ops]'" in done.stdout
