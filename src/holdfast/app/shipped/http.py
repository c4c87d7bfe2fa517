"""`hf.http.request`: any HTTP request, from inside a world.

    cx.do(hf.http.request, "POST", "https://api.example.org/orders", {"json": {"id": 7}})

    @hf.on(hf.http.request)
    def answered(self, receipt: hf.Receipt[hf.http.Response], cx: hf.Context) -> None: ...

The last argument is `hf.http.Options`, or a dict with its keys. Only public addresses on ports 80 and
443 are reached, unless `HOLDFAST_HTTP_CIDRS`, `_PORTS`, `_HOSTS` say otherwise, or a `Reach` does:

    request = hf.http.declare("http.inside", hf.http.Reach(cidrs=("10.0.0.0/8",), ports=()))
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

from holdfast.adapters.guard import Reach
from holdfast.adapters.http import TIMEOUT_S_MAX, Http, Options, Response
from holdfast.app.declare import Call, Effect

__all__ = ["Options", "Reach", "Response", "declare", "request"]

KIND = "http.request"


def declare(
    kind: str = KIND, reach: Reach | None = None, **options: Any
) -> Effect[[str, str, Any], Response]:
    """The effect within this reach; without one, the environment's. Options as in `@hf.effect`."""

    @lru_cache(maxsize=1)
    def within() -> Http:
        return Http(Reach.from_env(os.environ) if reach is None else reach)

    if reach is not None:
        within()  # what is wrong with it is said here

    async def request(
        call: Call, method: str, url: str, options: Options | None = None
    ) -> Response:
        return await within().request(method, url, options, key=call.idempotency_key)

    request.__doc__ = __doc__
    # The options of a call say how long it may take: the effect leaves it that.
    return Effect(kind, request, **{"timeout_s": TIMEOUT_S_MAX + 10.0, **options})


request = declare()
