"""Tokens with scopes: their file, their reload, and what each scope permits."""

from __future__ import annotations

import base64
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import Invalid, NotFound
from holdfast.ops.api.endpoint import Scope
from holdfast.ops.http.tokens import ALL_SCOPES, TokenFile, TokenSet, parse_tokens, token_line
from tests.api_server.served_rig import (
    ONE_SCOPE_EACH,
    ServedRig,
    create,
    rig,
    token_lines,
    token_of,
)
from tests.ops.app import QuotedDeposit, app
from tests.process.watch import until

__all__ = ["rig"]

pytestmark = pytest.mark.timeout(60)


# -- the file --------------------------------------------------------------------------------------


def test_one_word_is_a_bare_token_with_all_scopes() -> None:
    [token] = parse_tokens("a-bare-token-0123456789\n")
    assert token.scopes == ALL_SCOPES
    assert TokenSet([token]).find(b"a-bare-token-0123456789") == token
    assert TokenSet([token]).find(b"a-bare-token-0123456780") is None


def test_comments_and_blank_lines_around_a_bare_token_are_skipped(tmp_path: Path) -> None:
    text = "# rotated in May\n\na-bare-token-0123456789\n"
    (tmp_path / "token").write_text(text)
    for tokens in (TokenSet(parse_tokens(text)), TokenFile(str(tmp_path / "token")).tokens):
        assert tokens.find(b"a-bare-token-0123456789") is not None


@pytest.mark.parametrize(
    "text",
    [
        "#" * 20,
        "billing-service-production",
        "# name\nBILLING_SERVICE_PRODUCTION\n",
        "0123456789012345",
        "ops operate",
    ],
)
def test_token_file_of_a_comment_or_a_lone_name_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(Invalid):
        TokenFile(str(tmp_path / "token"))


def test_comment_in_the_variable_is_not_a_token() -> None:
    with pytest.raises(Invalid):
        parse_tokens("#" * 20)


def test_lines_are_tokens_with_names_and_scopes() -> None:
    first, second = parse_tokens(
        f"# clients\n\n{token_lines(press='submit,work')}\n{token_lines(ops='operate')}\n"
    )
    assert (first.name, first.scopes) == ("press", {Scope.SUBMIT, Scope.WORK})
    assert (second.name, second.scopes) == ("ops", {Scope.OPERATE})
    tokens = TokenSet([first, second])
    assert tokens.find(token_of("press").encode()) == first
    assert tokens.find(token_of("ops").encode()) == second


def test_empty_text_has_no_tokens() -> None:
    assert parse_tokens("") == []


@pytest.mark.parametrize(
    "text",
    [
        "short",
        "ünïcode-0123456789",
        "two words-without-meaning",
        "press submit sha256:abc",
        "press submit md5:" + "0" * 64,
        "press lend sha256:" + "0" * 64,
        "pr/ess submit sha256:" + "0" * 64,
        token_lines(press="submit") + "\n" + token_lines(press="work"),
        "# only\n# comments",
    ],
)
def test_invalid_tokens_are_refused_without_naming_them(text: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse_tokens(text)
    assert "0123456789" not in str(caught.value)


def test_token_line_is_parsed_to_the_same_token() -> None:
    line = token_line("ops", frozenset((Scope.OPERATE, Scope.READ)), token_of("ops"))
    assert line.startswith("ops read,operate sha256:")
    assert TokenSet(parse_tokens(line)).find(token_of("ops").encode()) is not None


def test_token_file_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        TokenFile(str(tmp_path / "none"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(Invalid):
        TokenFile(str(tmp_path / "empty"))


def replace_file(path: Path, text: str) -> None:
    """Write another file in place of this one, as a deployment tool does."""
    other = path.with_suffix(".new")
    other.write_text(text)
    os.replace(other, path)


def test_changed_token_file_applies_without_a_restart(rig: ServedRig, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(token_lines(old="read"))
    server = rig.serve(TokenFile(str(path)), default="shop")
    old, new = rig.client(server, token_of("old")), rig.client(server, token_of("new"))
    assert (old.get("/v1/queues").status, new.get("/v1/queues").status) == (200, 401)
    replace_file(path, token_lines(new="read"))
    until(lambda: new.get("/v1/queues").status == 200, "the new token is accepted")
    assert old.get("/v1/queues").status == 401


@pytest.mark.parametrize(
    "text", ["", "not a token file", "#" * 20, token_of("other"), f"# other\n{token_of('other')}\n"]
)
def test_unreadable_token_file_keeps_the_former_tokens_and_warns(
    rig: ServedRig, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path = tmp_path / "tokens"
    path.write_text(token_lines(old="read"))
    client = rig.client(rig.serve(TokenFile(str(path)), default="shop"), token_of("old"))
    with caplog.at_level(logging.WARNING, "holdfast.http"):
        replace_file(path, text)
        until(lambda: bool(caplog.records), "the warning is logged")
    assert "the former tokens stay in force" in caplog.text
    assert token_of("other") not in caplog.text
    assert client.get("/v1/queues").status == 200


def test_bare_token_of_a_file_may_be_replaced_by_another(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(token_of("old"))
    file = TokenFile(str(path))
    replace_file(path, token_of("new"))
    file.refresh()
    assert file.tokens.find(token_of("old").encode()) is None
    assert file.tokens.find(token_of("new").encode()) is not None


def test_fifo_in_place_of_the_token_file_keeps_the_former_tokens(
    rig: ServedRig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens"
    path.write_text(token_lines(old="read"))
    client = rig.client(rig.serve(TokenFile(str(path)), default="shop"), token_of("old"))
    with caplog.at_level(logging.WARNING, "holdfast.http"):
        os.mkfifo(path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)
        until(lambda: bool(caplog.records), "the warning is logged")
    assert "not a regular file" in caplog.text
    assert client.get("/v1/queues").status == 200


def test_tokens_hash_prints_a_line_of_the_token_file() -> None:
    command = [sys.executable, "-m", "holdfast.cli", "tokens", "hash", "ops", "operate,read"]
    done = subprocess.run(
        command, input=token_of("ops") + "\n", capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stderr) == (0, "")
    [token] = parse_tokens(done.stdout)
    assert (token.name, token.scopes) == ("ops", {Scope.READ, Scope.OPERATE})
    assert TokenSet([token]).find(token_of("ops").encode()) == token


# -- scopes ----------------------------------------------------------------------------------------

REQUESTS = {
    Scope.READ: ("GET", "/v1/worlds"),
    Scope.SUBMIT: ("POST", "/v1/tasks"),
    Scope.WORK: ("POST", "/v1/tasks/lease"),
    Scope.OPERATE: ("POST", "/v1/worlds/QuotedAccount/ada/pause"),
}
DOCUMENTS = {
    Scope.SUBMIT: {"name": "add"},
    Scope.WORK: {"worker": "w", "queues": ["none"]},
    Scope.OPERATE: {},
}


@pytest.mark.parametrize("needed", Scope)
def test_request_needs_its_scope_and_operate_implies_read(rig: ServedRig, needed: Scope) -> None:
    server = rig.bank(ONE_SCOPE_EACH)
    create(rig.client(server, token_of("submit")), "ada")
    method, path = REQUESTS[needed]
    for held in Scope:
        client = rig.client(server, token_of(held.value))
        response = client.call(method, path, DOCUMENTS.get(needed))
        if held is needed or (held is Scope.OPERATE and needed is Scope.READ):
            assert response.status in (200, 201), response.document
        else:
            assert (response.status, response.document["code"]) == (403, "scope")
            assert f"missing='{needed.value}'" in response.document["detail"]


# The page of the console has no data. A browser without a token sees it, and signs in.
OPEN_PAGES = ("/", "/console/x", "/v1/session", "/v1/session/end")


def test_request_without_a_token_is_401_on_every_route_but_health_and_console(
    rig: ServedRig,
) -> None:
    server = rig.bank(ONE_SCOPE_EACH)
    for route in server.routes:
        path = "/" + "/".join("x" if part == "*" else part for part in route.path)
        response = rig.client(server).call(route.method, path, {})
        if path in ("/healthz", "/readyz"):
            assert response.status in (200, 503)
        elif path in OPEN_PAGES and (route.method, path) != ("POST", "/v1/session"):
            assert response.status in (200, 404)
        else:
            assert (response.status, response.document["code"]) == (401, "unauthorized"), path


def test_readyz_shows_its_reasons_only_with_the_scope_read(rig: ServedRig) -> None:
    server = rig.bank(ONE_SCOPE_EACH)
    for held, shows in (("read", True), ("operate", True), ("submit", False)):
        document = rig.client(server, token_of(held)).get("/readyz").document
        assert ("reasons" in document) is shows
    assert set(rig.client(server).get("/readyz").document) == {"ready"}


def test_readyz_without_a_token_does_not_name_the_universes(rig: ServedRig) -> None:
    for universe in ("east", "west"):
        create(rig.client(rig.serve(default=universe)), "ada")
    server = rig.serve(ONE_SCOPE_EACH)
    for token, names in (("", False), (token_of("read"), True)):
        response = rig.client(server, token).get("/readyz")
        assert (response.status, response.document["code"]) == (400, "universe_required")
        assert ("east" in response.document["detail"]) is names


def test_readyz_does_not_reveal_to_a_client_without_read_which_universes_exist(
    rig: ServedRig,
) -> None:
    create(rig.client(rig.serve(default="east")), "ada")
    server = rig.serve(ONE_SCOPE_EACH, default="west")
    for name, token, status in (("", "", 401), ("submit", token_of("submit"), 403)):
        answers = [
            rig.client(server, token).get(f"/readyz?universe={universe}")
            for universe in ("east", "west", "north")
        ]
        assert [answer.status for answer in answers] == [status] * 3, name
        assert len({str(answer.document) for answer in answers}) == 1
    reader = rig.client(server, token_of("read"))
    assert reader.get("/readyz?universe=east").document["universe"] == "east"
    assert reader.get("/readyz?universe=north").status == 404
    assert rig.client(rig.serve(default="west")).get("/readyz?universe=north").status == 404


WORLD = "/v1/worlds/QuotedAccount/ada"
EVENT_ITEM = {"kind": "event", "type": "QuotedDeposit", "value": {"amount": 1}}
PACKED = base64.b64encode(app.encode_event(QuotedDeposit(amount=1))[1]).decode()


def ingress(item: dict[str, Any]) -> dict[str, Any]:
    return {"world": "QuotedAccount/ada", "key": "k", "item": item}


def test_submit_enqueues_events_of_clients_without_an_audit_entry(rig: ServedRig) -> None:
    server = rig.bank(ONE_SCOPE_EACH)
    submitter, operator = (rig.client(server, token_of(name)) for name in ("submit", "operate"))
    create(submitter, "ada")
    sent = submitter.post("/v1/operations/enqueue_ingress", ingress(EVENT_ITEM))
    assert (sent.status, sent.document["seq"]) == (200, 1)
    refused = operator.post("/v1/operations/enqueue_ingress", ingress(EVENT_ITEM))
    assert (refused.status, refused.document["code"]) == (403, "scope")
    assert "missing='submit'" in refused.document["detail"]
    assert operator.get("/v1/audit").document["items"] == []


@pytest.mark.parametrize(
    "item",
    [
        *(
            {"kind": kind, "type": "QuotedDeposit", "value_base64": PACKED}
            for kind in ("timer", "fabric", "inbox", "receipt", "unknown")
        ),
        {**EVENT_ITEM, "intent_hash": "00"},
        {**EVENT_ITEM, "from_world": "a" * 32},
        {**EVENT_ITEM, "from_height": 1},
    ],
)
def test_input_that_only_the_runtime_produces_needs_operate(
    rig: ServedRig, item: dict[str, Any]
) -> None:
    server = rig.bank(ONE_SCOPE_EACH)
    submitter, operator = (rig.client(server, token_of(name)) for name in ("submit", "operate"))
    create(submitter, "ada")
    refused = submitter.post("/v1/operations/enqueue_ingress", ingress(item))
    assert (refused.status, refused.document["code"]) == (403, "scope")
    assert "missing='operate'" in refused.document["detail"]
    assert operator.get(WORLD).document["depth"] == 0
    sent = operator.post("/v1/operations/enqueue_ingress", ingress(item))
    entries = operator.get("/v1/audit").document["items"]
    found = [(entry["actor"], entry["action"], entry["subject"]) for entry in entries]
    accepted = sent.status == 200
    # The application has no inbox of this name.
    assert accepted is (item["kind"] not in ("receipt", "inbox", "unknown")), sent.document
    audited = [("operate", "enqueue_ingress", "world/QuotedAccount/ada")]
    assert found == (audited if accepted else [])


def test_creation_of_a_schedule_or_from_a_seed_needs_operate_and_is_audited(rig: ServedRig) -> None:
    server = rig.bank(ONE_SCOPE_EACH)
    submitter, operator = (rig.client(server, token_of(name)) for name in ("submit", "operate"))
    source = create(submitter, "ada")["world_id"]
    operator.post(f"{WORLD}/fork", {"name": "fork", "at": 0})
    fork = operator.get("/v1/worlds/QuotedAccount/fork").document["world_id"]
    seeded = {"type": "QuotedAccount", "name": "b", "seed": {"world_id": fork, "height": 0}}
    schedule = {"name": "nightly", "target": "none", "every": "0 3 * * *"}
    for path, body in (("/v1/worlds", seeded), ("/v1/schedules", schedule)):
        refused = submitter.post(path, body)
        assert (refused.status, refused.document["code"]) == (403, "scope"), path
        assert "missing='operate'" in refused.document["detail"]
    assert submitter.post("/v1/worlds", {**seeded, "seed": None}).status == 201
    seeded["name"] = "c"
    made = operator.post("/v1/worlds", seeded)
    assert made.status == 201, made.document
    newest = operator.get("/v1/audit").document["items"][0]
    assert (newest["actor"], newest["action"]) == ("operate", "create_world")
    assert (newest["subject"], newest["detail"]) == ("world/QuotedAccount/c", fork)
    assert source != fork
    # The schedule is refused for its target, not for the token.
    assert operator.post("/v1/schedules", schedule).status == 422


# -- audit -----------------------------------------------------------------------------------------


def test_operate_actions_are_audited_with_the_name_of_their_token(rig: ServedRig) -> None:
    server = rig.bank(ONE_SCOPE_EACH)
    submitter, operator = (rig.client(server, token_of(name)) for name in ("submit", "operate"))
    world = create(submitter, "ada")
    operator.post("/v1/worlds/QuotedAccount/ada/pause")
    task = submitter.submit("add")
    operator.post(f"/v1/tasks/{task}/cancel", {"reason": "no"})
    operator.post(f"/v1/tasks/{task}/redrive")
    entries = operator.get("/v1/audit").document["items"]
    assert [(entry["actor"], entry["action"], entry["subject"]) for entry in entries] == [
        ("operate", "redrive_task", f"task/{task}"),
        ("operate", "cancel_task", f"task/{task}"),
        ("operate", "pause_world", "world/QuotedAccount/ada"),
    ]
    assert entries[-1]["detail"] == world["world_id"]


def test_audit_pages_continue_at_their_cursor(rig: ServedRig) -> None:
    client = rig.client(rig.bank())
    create(client, "ada")
    for _ in range(2):
        client.post("/v1/worlds/QuotedAccount/ada/pause")
        client.post("/v1/worlds/QuotedAccount/ada/resume")
    seen, cursor = [], ""
    while cursor is not None:
        page = client.get(f"/v1/audit?limit=3&cursor={cursor}").document
        seen += [entry["action"] for entry in page["items"]]
        cursor = page["next"]
    assert seen == ["resume_world", "pause_world"] * 2
    assert {entry["actor"] for entry in page["items"]} == {"local"}
