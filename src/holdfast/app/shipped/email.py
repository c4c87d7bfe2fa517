"""`hf.email.send`: mail by SMTP, from inside a world.

    cx.do(hf.email.send, "ada@example.org", "Your order", "It is on its way.")

A fourth argument is `hf.email.Mail`, or a dict with its keys. The server is the operator's:
`HOLDFAST_SMTP_HOST`, `_PORT`, `_SENDER`, `_USER`, `_PASSWORD`, `_TLS`, or a `Server` in `declare`.
"""

from __future__ import annotations

import os
from typing import Any

from holdfast.adapters.email import TIMEOUT_S_MAX, Mail, Sent
from holdfast.adapters.email import send as send_mail
from holdfast.adapters.smtp import Server
from holdfast.app.declare import Call, Effect

__all__ = ["Mail", "Sent", "Server", "declare", "send"]

KIND = "email.send"


def declare(
    kind: str = KIND, server: Server | None = None, **options: Any
) -> Effect[[Any, str, str, Any], Sent]:
    """The effect by this server; without one, the environment's. Options as in `@hf.effect`."""

    def send(
        call: Call, to: str | list[str], subject: str, body: str, options: Mail | None = None
    ) -> Sent:
        by = Server.from_env(os.environ) if server is None else server
        return send_mail(by, to, subject, body, options, key=call.idempotency_key)

    send.__doc__ = __doc__
    # The options of a call say how long it may take: the effect leaves it that.
    return Effect(kind, send, **{"timeout_s": TIMEOUT_S_MAX + 10.0, **options})


send = declare()
