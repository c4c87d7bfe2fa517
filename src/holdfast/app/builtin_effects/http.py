"""`hf.http.request`: an effect that sends an HTTP request.

    cx.do(hf.http.request, "POST", "https://api.example.org/orders", {"json": {"id": 7}})

    @hf.on(hf.http.request)
    def answered(self, receipt: hf.Receipt[hf.http.Response], cx: hf.Context) -> None: ...

The last argument is `hf.http.Options`, or a dict with its keys. Requests are allowed only to public
addresses on ports 80 and 443, unless `HOLDFAST_HTTP_CIDRS`, `_PORTS`, `_HOSTS` or a `Reach` allow others:

    request = hf.http.declare("http.inside", hf.http.Reach(cidrs=("10.0.0.0/8",), ports=()))
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from holdfast.adapters.address_guard import Reach
from holdfast.adapters.http import TIMEOUT_S_MAX, HttpClient, Options, Response
from holdfast.app.definitions import Call, Effect, typed_as

__all__ = ["Options", "Reach", "Response", "declare", "request"]

KIND = "http.request"


def declare(kind: str = KIND, reach: Reach | None = None, **options: Any) -> Effect[..., Response]:
    """Create the effect with an allow-list; by default from the environment. Options as in `@hf.effect`."""

    @lru_cache(maxsize=1)
    def within() -> HttpClient:
        return HttpClient(Reach.from_env(os.environ) if reach is None else reach)

    if reach is not None:
        within()  # validates the allow-list at declaration

    async def request(
        call: Call, method: str, url: str, options: Options | None = None
    ) -> Response:
        return await within().request(method, url, options, key=call.idempotency_key)

    request.__doc__ = __doc__
    # The call options set the timeout; the effect's own timeout must exceed their maximum.
    return Effect(kind, request, **{"timeout_s": TIMEOUT_S_MAX + 10.0, **options})


def _arguments(
    method: str, url: str, options: Options | Mapping[str, Any] | None = None
) -> Response:
    raise NotImplementedError("it only declares types")


request = typed_as(_arguments, declare())
