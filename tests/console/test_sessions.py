"""Sessions of browsers: a token becomes a cookie with its scopes, and a change needs the header against forged requests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.ops.console.files import POLICY, console_files
from holdfast.ops.http.request_head import HttpRequest
from holdfast.ops.http.server import HttpServer
from holdfast.ops.http.sessions import SESSION_S, SESSIONS_MAX, TOKEN_SESSIONS_MAX, BrowserSessions
from holdfast.ops.http.tokens import Token, TokenFile, parse_tokens
from tests.api_server.served_rig import ONE_SCOPE_EACH, ServedRig, rig, token_lines, token_of
from tests.ops.http_rig import JsonClient, JsonResponse

__all__ = ["rig"]

pytestmark = pytest.mark.timeout(60)

MODULES = (
    "holdfast.ops.http.sessions",
    "holdfast.ops.http.console_routes",
    "holdfast.ops.console.files",
)


def cookie_of(response: JsonResponse) -> str:
    return response.headers["set-cookie"].partition(";")[0]


def sign_in(client: JsonClient, scope: str) -> dict[str, str]:
    """Return the headers of a browser that has signed in."""
    response = client.post("/v1/session", {"token": token_of(scope)})
    assert response.status == 200, response.document
    return {"Cookie": cookie_of(response), "X-Holdfast-CSRF": response.document["csrf"]}


@pytest.fixture
def server(rig: ServedRig) -> HttpServer:
    return rig.bank(ONE_SCOPE_EACH)


@pytest.fixture
def client(rig: ServedRig, server: HttpServer) -> JsonClient:
    return rig.client(server)


@pytest.mark.spec("DESIGN", "15", "a session of a browser has the scopes of its token")
def test_session_has_the_scopes_of_its_token(client: JsonClient) -> None:
    browser = sign_in(client, "read")
    assert client.get("/v1/worlds", headers=browser).status == 200
    shown = client.get("/v1/session", headers=browser).document
    assert (shown["required"], shown["token"], shown["scopes"]) == (True, "read", ["read"])
    refused = client.post("/v1/authority/mark-stale", {}, headers=browser)
    assert (refused.status, refused.document["code"]) == (403, "scope")


def test_wrong_token_gets_no_cookie(client: JsonClient) -> None:
    response = client.post("/v1/session", {"token": "no-such-token-0123456789"})
    assert (response.status, response.document["code"]) == (401, "unauthorized")
    assert "set-cookie" not in response.headers
    assert client.get("/v1/session").document["token"] is None


def test_cookie_is_out_of_reach_of_scripts_and_of_other_sites(
    client: JsonClient, server: HttpServer
) -> None:
    response = client.post("/v1/session", {"token": token_of("read")})
    name, *attributes = response.headers["set-cookie"].split("; ")
    assert set(attributes) == {"Path=/", f"Max-Age={SESSION_S}", "HttpOnly", "SameSite=Strict"}
    # Another server on this host has another cookie.
    assert name.startswith(f"holdfast_session_{server.address.port}=")
    assert token_of("read") not in str(response.headers)


@pytest.mark.spec("DESIGN", "15", "with TLS no other host can set the cookie of a session")
def test_cookie_of_a_server_with_tls_is_secure_and_bound_to_its_host() -> None:
    sessions = BrowserSessions(1, is_secure=True)
    header, session = sessions.start(read_token(), 0.0)
    cookie, *attributes = header.split("; ")
    assert cookie.startswith("__Host-holdfast_session_1=")
    # Browsers refuse this prefix without these two, and with Domain.
    assert {"Secure", "Path=/"} <= set(attributes)
    assert not [one for one in attributes if one.startswith("Domain")]
    assert sessions.find(request_with(cookie), 1.0) == session
    # A sibling domain or a server without TLS can set this one.
    assert sessions.find(request_with(cookie.removeprefix("__Host-")), 1.0) is None


@pytest.mark.parametrize("sent", [None, "wrong", ""])
def test_change_under_a_cookie_needs_the_csrf_header(client: JsonClient, sent: str | None) -> None:
    browser = sign_in(client, "operate")
    headers = {"Cookie": browser["Cookie"], **({} if sent is None else {"X-Holdfast-CSRF": sent})}
    refused = client.post("/v1/limits", {"limits": {"tasks": 5}}, headers=headers)
    assert (refused.status, refused.document["code"]) == (403, "csrf")
    assert client.get("/v1/limits", headers=browser).document["limits"] == []
    assert client.post("/v1/limits", {"limits": {"tasks": 5}}, headers=browser).status == 200


def test_csrf_value_of_another_session_is_refused(client: JsonClient) -> None:
    mine, other = sign_in(client, "operate"), sign_in(client, "operate")
    mixed = {**mine, "X-Holdfast-CSRF": other["X-Holdfast-CSRF"]}
    assert client.post("/v1/limits", {"limits": {}}, headers=mixed).document["code"] == "csrf"


def test_request_of_another_site_is_refused_also_with_a_cookie(client: JsonClient) -> None:
    browser = sign_in(client, "operate")
    for forged in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        refused = client.get("/v1/worlds", headers={**browser, **forged})
        assert (refused.status, refused.document["code"]) == (403, "forbidden")


@pytest.mark.parametrize(
    ("path", "mode", "dest", "status"),
    [
        ("/", "navigate", "document", 200),
        ("/", "navigate", "iframe", 403),
        ("/", "cors", "empty", 403),
        ("/v1/session", "navigate", "document", 403),
        ("/console/main.js", "no-cors", "script", 403),
    ],
)
def test_link_on_another_site_opens_only_the_page(
    client: JsonClient, path: str, mode: str, dest: str, status: int
) -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": dest}
    assert client.get(path, headers=headers).status == status


def test_sign_out_ends_the_session(client: JsonClient) -> None:
    browser = sign_in(client, "read")
    ended = client.post("/v1/session/end", {}, headers=browser)
    assert "Max-Age=0" in ended.headers["set-cookie"]
    assert client.get("/v1/worlds", headers=browser).status == 401


@pytest.mark.spec("DESIGN", "15", "a forged request ends no session of a browser")
@pytest.mark.parametrize("sent", [None, "wrong"])
def test_sign_out_needs_the_csrf_header(client: JsonClient, sent: str | None) -> None:
    browser = sign_in(client, "read")
    headers = {"Cookie": browser["Cookie"], **({} if sent is None else {"X-Holdfast-CSRF": sent})}
    refused = client.post("/v1/session/end", {}, headers=headers)
    assert (refused.status, refused.document["code"]) == (403, "csrf")
    assert "set-cookie" not in refused.headers
    assert client.get("/v1/worlds", headers=browser).status == 200


def test_sign_out_without_a_session_removes_the_cookie(client: JsonClient) -> None:
    browser = sign_in(client, "read")
    client.post("/v1/session/end", {}, headers=browser)
    again = client.post("/v1/session/end", {}, headers={"Cookie": browser["Cookie"]})
    assert (again.status, "Max-Age=0" in again.headers["set-cookie"]) == (200, True)


def test_session_ends_when_its_token_is_rotated(rig: ServedRig, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(token_lines(read="read", other="read"))
    server = rig.serve(TokenFile(str(file)), default="bank")
    client = rig.client(server)
    browser = sign_in(client, "read")
    file.write_text(token_lines(other="read"))
    server.guard.refresh()
    assert client.get("/v1/worlds", headers=browser).status == 401


def test_session_gets_the_changed_scopes_of_its_token(rig: ServedRig, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(token_lines(operate="operate", other="read"))
    server = rig.serve(TokenFile(str(file)), default="bank")
    client = rig.client(server)
    browser = sign_in(client, "operate")
    file.write_text(token_lines(operate="read", other="read"))
    server.guard.refresh()
    assert client.post("/v1/limits", {"limits": {}}, headers=browser).document["code"] == "scope"


def read_token() -> Token:
    [token] = parse_tokens(token_lines(read="read"))
    return token


def request_with(cookie: str) -> HttpRequest:
    return HttpRequest("GET", ("",), {}, {"cookie": cookie}, 0, True)


def test_session_ends_after_twelve_hours() -> None:
    sessions = BrowserSessions(80, is_secure=False)
    header, _ = sessions.start(read_token(), 100.0)
    request = request_with(header.partition(";")[0])
    assert sessions.find(request, 100.0 + SESSION_S - 1) is not None
    assert sessions.find(request, 100.0 + SESSION_S) is None


def test_oldest_session_ends_above_the_limit() -> None:
    sessions = BrowserSessions(80, is_secure=False)
    token = read_token()
    first = request_with(sessions.start(token, 0.0)[0].partition(";")[0])
    for number in range(SESSIONS_MAX - 1):
        sessions.start(token._replace(digest=b"%d" % number), 0.0)
    assert sessions.find(first, 1.0) is not None
    sessions.start(token._replace(digest=b"another"), 0.0)
    assert sessions.find(first, 1.0) is None


def test_sign_ins_with_one_token_end_no_session_of_another() -> None:
    sessions = BrowserSessions(80, is_secure=False)
    token = read_token()
    other = request_with(sessions.start(token._replace(digest=b"other"), 0.0)[0].partition(";")[0])
    first = request_with(sessions.start(token, 0.0)[0].partition(";")[0])
    for _ in range(TOKEN_SESSIONS_MAX):
        sessions.start(token, 0.0)
    assert sessions.find(other, 1.0) is not None
    assert sessions.find(first, 1.0) is None


def test_cookie_of_the_same_name_does_not_hide_the_session() -> None:
    sessions = BrowserSessions(80, is_secure=False)
    cookie = sessions.start(read_token(), 0.0)[0].partition(";")[0]
    name = cookie.partition("=")[0]
    assert sessions.find(request_with(f"{name}=x; {cookie}"), 1.0) is not None


def test_server_without_tokens_needs_no_session(rig: ServedRig) -> None:
    client = rig.client(rig.bank())
    shown = client.get("/v1/session").document
    assert (shown["required"], shown["csrf"]) == (False, None)
    assert "operate" in shown["scopes"]
    assert client.post("/v1/limits", {"limits": {"tasks": 5}}).status == 200


# -- files -----------------------------------------------------------------------------------------


def test_every_file_has_its_type_and_the_policy(client: JsonClient) -> None:
    for name in console_files():
        path = "/" if name == "index.html" else f"/console/{name}"
        response = client.get(path)
        assert response.status == 200
        assert response.headers["content-security-policy"] == POLICY
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-cache"
        repeat = client.get(path, headers={"If-None-Match": response.headers["etag"]})
        assert (repeat.status, repeat.headers["cache-control"]) == (304, "no-cache")
    assert "unsafe" not in POLICY


@pytest.mark.parametrize("name", ["files.py", "..", "%2e%2e%2ffiles.py", "main.js%00", "MAIN.JS"])
def test_other_names_are_not_found(client: JsonClient, name: str) -> None:
    assert client.get(f"/console/{name}").status == 404


def test_files_load_nothing_from_other_hosts_and_write_no_html() -> None:
    for name, file in console_files().items():
        text = file.content.decode()
        if name.endswith(".svg"):
            continue
        # The name of the namespace is no address: nothing is loaded from it.
        text = text.replace('"http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?://|@import", text), name
        assert name.endswith(".js") or "url(" not in text, name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text
        ), name
        assert not re.search(r'\sstyle="|<script>|\son[a-z]+="', text), name
