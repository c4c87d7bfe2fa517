"""Hidden values: no route, event stream, command or log line shows a secret of a store that has one in every payload."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

import holdfast as hf
from holdfast import cli, logs
from holdfast import store as stores
from holdfast.errors import NoReply
from holdfast.ops import log_format
from holdfast.ops.api.universes import UniverseChoice
from holdfast.ops.http.auth import RequestGuard, parse_address
from holdfast.ops.http.events import SUBJECTS
from holdfast.ops.http.openapi import documented_routes
from holdfast.ops.http.served_api import ServedApi
from holdfast.ops.http.server import HttpServer
from holdfast.ops.redacted_documents import DocumentRedactor, RedactionRules
from holdfast.redaction import REDACTED, VARIABLE, BadRedaction, Redactor
from holdfast.store.api import Store
from tests.api_server import vault
from tests.api_server.vault import MARK, NUMBER, Safe, secret
from tests.ops.http_rig import JsonClient

pytestmark = pytest.mark.timeout(240)

MODULES = (
    "holdfast.redaction",
    "holdfast.ops.redacted_documents",
    "holdfast.ops.http.redacted_responses",
    "holdfast.cli.redaction",
)

UNIVERSE = "vault"
WAIT_S = 60.0


class FilledStore:
    """A store with a secret in every payload, and the ids of its subjects."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with vault.app.open(str(path), stop_grace_s=0.0) as runtime:
            self._fill(runtime)

    def _fill(self, runtime: hf.Runtime) -> None:
        safe = runtime.world(Safe, "main")
        safe.ask(vault.CardShown(secret("event"), NUMBER))
        with contextlib.suppress(NoReply):
            safe.ask(vault.CardRefused(secret("refused")))
        safe.send(vault.PaymentWanted(secret("effect")))
        done = runtime.submit(
            vault.charge, "good", secret("argument"), note={"deep": [secret("note")]}
        )
        done.result(timeout=WAIT_S)
        failed = runtime.submit(vault.charge, "bad", card=secret("keyword"), note=NUMBER)
        with contextlib.suppress(hf.TaskFailedError):
            failed.result(timeout=WAIT_S)
        flows = [
            runtime.start(vault.order.options(key=item), item, secret("flow"))
            for item in ("good", "bad", "wait")
        ]
        flows[0].result(timeout=WAIT_S)
        with contextlib.suppress(hf.FlowFailed):
            flows[1].result(timeout=WAIT_S)
        flows[2].send(vault.Confirmation(secret("mail")))
        slow = runtime.submit(vault.slow, "good", secret("slow"))
        while slow.status().progress is None:
            pass
        # Its error quotes an argument of a task of its child flow.
        flows.append(runtime.start(vault.parcel))
        with contextlib.suppress(hf.FlowFailed):
            flows[3].result(timeout=WAIT_S)
        # A group of errors has a placeholder for its number.
        numbered = runtime.submit(vault.charge, "bad", f"{MARK} 4711")
        with contextlib.suppress(hf.TaskFailedError):
            numbered.result(timeout=WAIT_S)
        gathered = runtime.submit(vault.gather, "good", secret("rest"), secret("more"))
        self.tasks = [done.id, failed.id, slow.id, gathered.id]
        self.flows = [flow.id for flow in flows]
        self.flows += [child["id"] for child in children_of(runtime.store, flows[3].id)]


def children_of(store: Store, flow: str) -> list[dict[str, str]]:
    with serve(store, vault.open_app) as server, JsonClient(server) as client:
        found: list[dict[str, str]] = client.get(f"/v1/flows/{flow}").document["children"]
    assert [child["name"] for child in found] == ["purchase"]
    return found


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> FilledStore:
    return FilledStore(tmp_path_factory.mktemp("vault") / "data")


@pytest.fixture(scope="module")
def store(filled: FilledStore) -> Iterator[Store]:
    with stores.open(filled.path) as store:
        yield store


def serve(store: Store, app: hf.App | None, paths: tuple[str, ...] = ()) -> HttpServer:
    address = parse_address("127.0.0.1:0")
    apps = {} if app is None else {UNIVERSE: app}
    universes = UniverseChoice(store, apps, UNIVERSE, redactor=Redactor(paths))
    return HttpServer(
        lambda server: ServedApi(server, store, universes),
        address=address,
        guard=RequestGuard(address, ""),
    )


def addresses(client: JsonClient, filled: FilledStore) -> dict[str, list[str]]:
    """Return the addresses of every documented GET route with the ids of real subjects."""
    [queue_of_events, *_] = [
        item["queue"] for item in client.get("/v1/dead").document["items"] if "effects" not in item["queue"]
    ]  # fmt: skip
    effect = client.get("/v1/effects?kind=bank.pay&state=dead").document["items"][0]["intent"]
    groups = [(one["kind"], one["group"]) for one in client.get("/v1/errors").document["items"]]
    queues = [queue_of_events, f"{UNIVERSE}/effects/bank.pay"]
    letters = [
        (queue, client.get(f"/v1/dead/{quote(queue, safe='')}").document["items"][0]["seq"])
        for queue in queues
    ]
    worlds = ["Safe/main"]
    whys = [("task", id) for id in filled.tasks] + [("flow", id) for id in filled.flows]
    whys += [("effect", effect), ("queue", "charges"), ("universe", UNIVERSE)]
    listed = {
        "/v1/flows": [""] + [f"?state={state}" for state in ("failed", "completed", "suspended")],
        "/v1/tasks": [""]
        + [f"?state={state}" for state in ("failed", "dead", "completed", "leased")],
        "/v1/effects": ["?kind=bank.pay&state=dead"],
    }
    parameters: dict[str, list[tuple[str, ...]]] = {
        "/console/{file}": [("main.js",)],
        "/v1/why/queue/effects/{effect_kind}": [("bank.pay",)],
        "/v1/why/world/{type}/{name}": [("Safe", "main")],
        "/v1/why/timer/{type}/{name}/{key}": [("Safe", "main", "later")],
        "/v1/dead/{queue}": [(queue,) for queue in queues],
        "/v1/dispatches/{request}": [("none",)],
        "/v1/effects/{intent}": [(effect,)],
        "/v1/flows/{id}": [(id,) for id in filled.flows],
        "/v1/jobs/{id}": [("1",)],
        "/v1/runs/{run}": [("none",)],
        "/v1/schedules/{name}": [("none",)],
        "/v1/tasks/{id}": [(id,) for id in filled.tasks],
        "/v1/queues/{queue}": [("charges",)],
        "/v1/queues/{queue}/keys": [("charges",)],
        "/v1/workers/{worker}": [("none",)],
        "/v1/flows/{id}/steps": [(id,) for id in filled.flows],
        "/v1/flows/{id}/event-types": [(filled.flows[2],)],
        "/v1/runs/{run}/failed": [("none",)],
        "/v1/runs/{run}/plots": [("none",)],
        "/v1/dead/{queue}/{seq}": [(queue, str(seq)) for queue, seq in letters],
        "/v1/errors/{kind}/{group}": groups,
        "/v1/errors/{kind}/{group}/subjects": groups,
        "/v1/why/{kind}/{id}": whys,
        "/v1/timers/{type}/{name}/{key}": [("Safe", "main", "later")],
    }
    world_id = client.get("/v1/worlds/Safe/main").document["world_id"]
    for tail in (
        "", "/state", "/journal", "/lineage", "/effects", "/timers", "/forks", "/event-types",
    ):  # fmt: skip
        parameters["/v1/worlds/{type}/{name}" + tail] = [("Safe", "main"), ("by-id", world_id)]
    assert worlds
    found: dict[str, list[str]] = {}
    for route in documented_routes():
        if route.method != "GET" or route.path == "/v1/events":
            continue
        names = [part for part in route.path.split("/") if part.startswith("{")]
        # A new route with parameters needs its subjects here.
        values = parameters[route.path] if names else [()]
        for value in values:
            address = route.path
            for name, text in zip(names, value, strict=True):
                address = address.replace(name, quote(text, safe=""), 1)
            found.setdefault(route.path, []).extend(
                address + query for query in listed.get(route.path, [""])
            )
    return found


def read_bytes(server: HttpServer, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(server.address.host, server.address.port, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, b"\n".join(
            f"{name}: {value}".encode() for name, value in answer.getheaders()
        ) + answer.read()
    finally:
        connection.close()


def shows_secret(data: bytes) -> bool:
    return any(text.encode() in data for text in (MARK, str(NUMBER), f"{NUMBER:,}"))


def leaks(server: HttpServer, filled: FilledStore) -> set[str]:
    """Return the routes whose answers have a secret."""
    with JsonClient(server) as client:
        found = addresses(client, filled)
    leaking = set()
    for path, several in found.items():
        for address in several:
            status, data = read_bytes(server, address)
            assert status != 500, (address, data)
            if shows_secret(data):
                leaking.add(path)
    return leaking


def first_event(server: HttpServer, subject: str) -> bytes:
    connection = http.client.HTTPConnection(server.address.host, server.address.port, timeout=60)
    try:
        connection.request("GET", f"/v1/events?subject={quote(subject, safe='/')}")
        answer = connection.getresponse()
        lines = []
        while answer.status == 200:
            lines.append(answer.readline())
            if lines[-1].startswith(b"data:"):
                break
        return b"".join(lines) or answer.read()
    finally:
        connection.close()


# -- everything that is shown ----------------------------------------------------------------------


def test_every_get_route_hides_the_secrets_that_it_would_show(
    store: Store, filled: FilledStore
) -> None:
    with serve(store, vault.open_app) as server:
        shown = leaks(server, filled)
    # Without redaction these routes show secrets, so this test could see them.
    assert {
        "/v1/errors", "/v1/errors/{kind}/{group}", "/v1/flows", "/v1/flows/{id}", "/v1/flows/{id}/steps",
        "/v1/tasks", "/v1/tasks/{id}", "/v1/effects/{intent}", "/v1/dead/{queue}", "/v1/dead/{queue}/{seq}",
        "/v1/why/{kind}/{id}", "/v1/worlds/{type}/{name}/state", "/v1/worlds/{type}/{name}/journal",
    } <= shown  # fmt: skip
    with serve(store, vault.app) as server:
        assert leaks(server, filled) == set()


def test_server_without_code_hides_by_its_option(store: Store, filled: FilledStore) -> None:
    with serve(store, None, vault.REDACT) as server:
        assert leaks(server, filled) == set()


def test_event_streams_hide_values(store: Store, filled: FilledStore) -> None:
    subjects = {
        "readiness": "readiness", "counts": "counts", "world": "world/Safe/main", "task": f"task/{filled.tasks[1]}",
        "flow": f"flow/{filled.flows[1]}", "timer": "timer/Safe/main/later", "queue": "queue/charges",
        "effect": "effect/", "run": "run/none", "schedule": "schedule/none", "worker": "worker/none",
    }  # fmt: skip
    assert subjects.keys() == SUBJECTS.keys()
    for app, hides in ((vault.open_app, False), (vault.app, True)):
        with serve(store, app) as server, JsonClient(server) as client:
            effects = client.get("/v1/effects?kind=bank.pay&state=dead").document["items"]
            subjects["effect"] = f"effect/{effects[0]['intent']}"
            shown = {
                kind
                for kind, subject in subjects.items()
                if shows_secret(first_event(server, subject))
            }
        assert shown == (set() if hides else {"task", "flow", "effect"})


def test_hidden_values_have_one_marker_and_others_stay(store: Store, filled: FilledStore) -> None:
    with serve(store, vault.app) as server, JsonClient(server) as client:
        state = client.get("/v1/worlds/Safe/main/state").document["state"]
        assert state == {
            "number": REDACTED, "shop": "books", "digits": REDACTED, "pins": [{"pin": REDACTED, "of": "card"}],
        }  # fmt: skip
        entry = client.get("/v1/worlds/Safe/main/journal").document["items"][0]
        assert entry["value"] == {"number": REDACTED, "digits": REDACTED, "shop": "books"}
        done = client.get(f"/v1/tasks/{filled.tasks[0]}").document
        assert done["args"] == ["good", REDACTED]
        assert (done["kwargs"], done["result"]) == (
            {"note": REDACTED},
            {"token": REDACTED, "item": "good"},
        )
        failed = client.get(f"/v1/tasks/{filled.tasks[1]}").document
        assert f"no charge of {REDACTED}" in failed["error"]
        # A list shows the same text without the arguments.
        rows = client.get("/v1/tasks?state=failed").document["tasks"]
        [row] = [row for row in rows if row["id"] == filled.tasks[1]]
        assert f"no charge of {REDACTED}" in row["error"]
        flow = client.get(f"/v1/flows/{filled.flows[0]}").document
        assert flow["args"] == ["good", REDACTED]
        assert flow["published"]["receipt"] == {"number": REDACTED, "shop": "books"}
        waiting = client.get(f"/v1/flows/{filled.flows[2]}").document
        assert waiting["events"] == [{"type": "Confirmation", "event": {"password": REDACTED}}]


def test_error_of_a_request_hides_the_text_of_the_handler(tmp_path: Path) -> None:
    with (
        vault.app.open(str(tmp_path / "data")) as runtime,
        serve(runtime.store, vault.app) as server,
        JsonClient(server) as client,
    ):
        path = "/v1/worlds/Safe/main/ask"
        replied = client.post(path, {"type": "CardShown", "event": {"number": secret("first")}})
        assert replied.document == {"reply": {"number": REDACTED, "shop": "books"}}
        refused = client.post(path, {"type": "CardRefused", "event": {"number": secret("no")}})
        assert (refused.status, refused.document["code"]) == (409, "no_reply")
        assert MARK not in json.dumps(refused.document)


def test_workers_get_the_real_arguments(tmp_path: Path) -> None:
    with (
        stores.open(tmp_path / "data") as store,
        serve(store, vault.app) as server,
        JsonClient(server) as client,
    ):
        new = {"name": "charge", "args": ["good", secret("work")], "options": {"queue": "far"}}
        assert client.post("/v1/tasks", new).status == 201
        leased = client.post("/v1/tasks/lease", {"queues": ["far"], "worker": "w"})
        assert leased.status == 200, leased.document
        assert secret("work") in json.dumps(leased.document)


# -- commands and logs -----------------------------------------------------------------------------


def commands(filled: FilledStore) -> list[list[str]]:
    app = ["--app", "tests.api_server.vault:open_app"]
    dead = [["dead", "list"], ["dead", "list", f"{UNIVERSE}/effects/bank.pay"],
            ["dead", "show", f"{UNIVERSE}/effects/bank.pay", "1"]]  # fmt: skip
    return [
        ["tasks", "list"], *(["tasks", "show", id] for id in filled.tasks),
        ["flows", "list"], *(["flows", "show", id] for id in filled.flows),
        *(["flows", "steps", id] for id in filled.flows), *(["flows", "why", id] for id in filled.flows),
        ["worlds", "list"], ["worlds", "show", "Safe/main"], ["worlds", "journal", "Safe/main"],
        ["worlds", "journal", "Safe/main", *app], ["worlds", "state", "Safe/main", *app],
        ["effects", "list"], ["errors", "list"], *dead, ["why", "world", "Safe/main"],
        *(["why", "task", id] for id in filled.tasks), *(["why", "flow", id] for id in filled.flows),
        ["timers", "list"], ["queues", "list"], ["audit"], ["doctor"], ["ready"],
    ]  # fmt: skip


@pytest.mark.deep
def test_every_command_hides_values(
    filled: FilledStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaking() -> set[str]:
        found = set()
        for command in commands(filled):
            for form in ([], ["--json"]):
                cli.main([*command, "--store", str(filled.path), *form])
                out, err = capsys.readouterr()
                assert "internal:" not in err, (command, err)
                if shows_secret((out + err).encode()):
                    found.add(" ".join(command[:2]))
        return found

    shown = leaking()
    assert {
        "tasks show",
        "flows show",
        "flows steps",
        "worlds state",
        "worlds journal",
    } <= shown
    monkeypatch.setenv(VARIABLE, ",".join(vault.REDACT))
    assert leaking() == set()


@pytest.mark.parametrize("form", log_format.FORMATS)
def test_log_lines_hide_texts_of_types_with_hidden_fields(form: str) -> None:
    named = [path for path in vault.REDACT if not path.startswith("*.")]
    rules = RedactionRules(Redactor(named), [vault.app])
    stream = StringIO()
    formatter = {"text": log_format.TextFormatter, "json": log_format.JsonFormatter}[form]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter({}, lambda: rules))
    logger = logging.getLogger("holdfast.tests-of-redaction")
    logger.addHandler(handler)
    try:
        error = f"ValueError: no charge of {secret('log')}"
        logs.warn("tests-of-redaction", "attempt failed", task="1-1", name="charge", error=error)
        logs.warn("tests-of-redaction", "reducer failed", world="Safe/main", error=error)
        logs.warn("tests-of-redaction", "dead letter", effect="bank.pay", error=error)
        logs.warn(
            "tests-of-redaction", "attempt failed", task="1-2", name="print", error="a plain text"
        )
        try:
            raise ValueError(secret("traceback"))
        except ValueError:
            logger.exception("reading failed")
    finally:
        logger.removeHandler(handler)
    lines = stream.getvalue()
    assert MARK not in lines
    assert lines.count(REDACTED) == 4
    assert "charge" in lines
    assert "ValueError" in lines


# -- paths -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["", "Safe", "Safe.", ".number", "Safe..number", "Safe. number", "a.b,c"]
)
def test_malformed_path_is_refused_at_the_start(path: str) -> None:
    with pytest.raises(BadRedaction, match=r"Account\.iban"):
        hf.App("vault", worlds=[Safe], effects=[vault.pay], redact=[path])


def test_path_of_an_unknown_type_is_refused_by_the_app_and_warned_about_for_the_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from holdfast.cli.redaction import warn_unknown_types

    with pytest.raises(BadRedaction, match="declares no such type") as refused:
        hf.App("vault", worlds=[Safe], effects=[vault.pay], redact=["Saef.number"])
    assert "Safe" in refused.value.fields["known"]
    warn_unknown_types(Redactor(["Saef.number", "Safe.number", "*.pin"]), [vault.app])
    assert capsys.readouterr().err == (
        "holdfast: --redact: no application declares the type of Saef.number\n"
    )


def test_variadic_parameters_are_named_by_paths() -> None:
    from holdfast.redaction import HiddenValues, ParameterNames

    names = [ParameterNames.of(vault.gather.signature)]
    parts = {"args": ["a", "b", "c"], "kwargs": {"other": "d", "item": "e"}}

    def shown(*paths: str) -> dict[str, Any]:
        return Redactor(paths).hide_parts("gather", parts, names, HiddenValues())

    assert shown("gather.args.cards") == parts | {"args": ["a", REDACTED, REDACTED]}
    assert shown("gather.args.notes") == parts | {"kwargs": {"other": REDACTED, "item": "e"}}


def test_functions_of_several_applications_with_one_name_hide_the_arguments_of_each() -> None:
    def moved(card: str, note: Any, item: str) -> None: ...

    other = hf.App("other", tasks=[hf.task(name="charge")(moved)])
    rules = RedactionRules(Redactor(["charge.args.card"]), [other, vault.app])
    task = {"id": "1-1", "name": "charge", "queue": "charges", "attempt": 1, "expiries_max": 1}
    shown = DocumentRedactor(rules).hide(
        task | {"args": ["first", "second", "third"], "kwargs": {}}
    )
    assert shown["args"] == [REDACTED, REDACTED, "third"]


def test_values_of_a_long_list_and_their_cut_ends_are_removed_from_a_text() -> None:
    from holdfast.redaction import HiddenValues

    hidden = HiddenValues()
    hidden.add([f"value {n} of a list" for n in range(10_000)] + ["12"])
    assert hidden.clean("no value 77 of a list, 12 at value 9999 o…") == (
        f"no {REDACTED}, {REDACTED} at {REDACTED}…"
    )
    assert hidden.clean("of a list, 3 of 4") == f"{REDACTED}, 3 of 4"


def value_of(paths: list[str], value: Any, name: str = "T") -> Any:
    from holdfast.redaction import HiddenValues

    return Redactor(paths).hide(name, value, HiddenValues())


def test_path_has_the_name_of_a_renamed_field_in_json() -> None:
    class Renamed(hf.Event, rename="camel"):
        card_number: str = ""

    value = msgspec.to_builtins(Renamed("1"))
    assert value_of(["T.cardNumber"], value) == {"cardNumber": REDACTED}


def test_paths_pass_through_lists_and_stars() -> None:
    value = {"a": [{"b": 1, "c": 2}, {"b": 3}], "d": {"x": {"b": 4}, "y": {"b": 5}}}
    assert value_of(["T.a.b"], value)["a"] == [{"b": REDACTED, "c": 2}, {"b": REDACTED}]
    assert value_of(["T.a.1.b"], value)["a"] == [{"b": 1, "c": 2}, {"b": REDACTED}]
    assert value_of(["T.d.*.b"], value)["d"] == {"x": {"b": REDACTED}, "y": {"b": REDACTED}}
    assert value_of(["*.b"], value)["d"] == {"x": {"b": REDACTED}, "y": {"b": REDACTED}}
    assert value_of(["U.a"], value) == value
