"""The routes of browsers: the files of the console, and the session of a browser.

    GET  /                      the page of the console
    GET  /console/{file}        its modules and styles
    GET  /v1/session            the token of this client: its name and scopes
    POST /v1/session            exchange a token for a cookie
    POST /v1/session/end        end the session of this browser

They are open: a client without a token sees the page, which has no data, and signs in.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from holdfast import __version__
from holdfast.clock import S
from holdfast.ops.console.files import HEADERS, PAGE, console_files
from holdfast.ops.http.answer_schemas import SessionDocument
from holdfast.ops.http.json_values import decode
from holdfast.ops.http.problem import HttpResponse, NoRoute, Unauthorized, encode_json
from holdfast.ops.http.request_schemas import SessionBody
from holdfast.ops.http.routes import Route, RouteCall
from holdfast.ops.http.tokens import Token

if TYPE_CHECKING:
    from holdfast.ops.http.server import HttpServer


class ConsoleRoutes:
    def __init__(self, server: HttpServer, trace_url: str = "") -> None:
        self._server = server
        self._trace_url = trace_url

    def build(self) -> tuple[Route, ...]:
        return (
            Route("GET", ("",), self._page, open=True),
            Route("GET", ("console", "*"), self._file, open=True),
            Route("GET", ("v1", "session"), self._show, open=True),
            Route("POST", ("v1", "session"), self._start, open=True),
            Route("POST", ("v1", "session", "end"), self._end, open=True),
        )

    async def _page(self, call: RouteCall) -> HttpResponse:
        return _file_response(call, PAGE)

    async def _file(self, call: RouteCall) -> HttpResponse:
        return _file_response(call, call.path_parameters[0])

    async def _show(self, call: RouteCall) -> HttpResponse:
        return HttpResponse(200, encode_json(self._document(call, call.token)))

    async def _start(self, call: RouteCall) -> HttpResponse:
        guard = self._server.guard
        body = decode(SessionBody, call.body or b"{}")
        if not guard.has_tokens:
            return await self._show(call)
        token = guard.find_text(body.token.strip().encode("latin-1", "replace"))
        if token is None:
            raise Unauthorized(what="token", why="wrong")
        assert guard.sessions is not None
        cookie, session = guard.sessions.start(token, self._server.loop.time())
        document = self._document(call, token, session.csrf, session.until_s)
        return HttpResponse(200, encode_json(document), (("Set-Cookie", cookie),))

    async def _end(self, call: RouteCall) -> HttpResponse:
        guard = self._server.guard
        assert guard.sessions is not None
        cookie = guard.sessions.end(call.request, self._server.loop.time())
        return HttpResponse(200, encode_json(self._document(call, None)), (("Set-Cookie", cookie),))

    def _document(
        self, call: RouteCall, token: Token | None, csrf: str | None = None, until_s: float = 0.0
    ) -> SessionDocument:
        guard, now_s = self._server.guard, self._server.loop.time()
        if csrf is None and token is not None and guard.sessions is not None:
            session = guard.sessions.find(call.request, now_s)
            if session is not None:
                csrf, until_s = session.csrf, session.until_s
        return SessionDocument(
            required=guard.has_tokens,
            token=None if token is None else token.name,
            scopes=[] if token is None else sorted(scope.value for scope in token.scopes),
            csrf=csrf,
            until_ns=None if csrf is None else time.time_ns() + int((until_s - now_s) * S),
            version=__version__ if token is not None else None,
            trace_url=(self._trace_url or None) if token is not None else None,
        )


def _file_response(call: RouteCall, name: str) -> HttpResponse:
    file = console_files().get(name)
    if file is None:
        raise NoRoute(what="path", found=f"/console/{name}"[:64])
    headers = (("ETag", file.etag), ("Cache-Control", "no-cache"), *HEADERS)
    if call.request.headers.get("if-none-match") == file.etag:
        return HttpResponse(304, b"", headers)
    return HttpResponse(200, file.content, headers, file.content_type)
