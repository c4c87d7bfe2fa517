"""`hf.email.send`: an effect that sends email by SMTP.

    cx.do(hf.email.send, "ada@example.org", "Your order", "It is on its way.")

The optional fourth argument is `hf.email.Mail`, or a dict with its keys. The operator configures the
server with `HOLDFAST_SMTP_HOST`, `_PORT`, `_SENDER`, `_USER`, `_PASSWORD`, `_TLS`, or a `Server` in
`declare`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from holdfast.adapters.email import TIMEOUT_S_MAX, Mail, Sent
from holdfast.adapters.email import send as send_mail
from holdfast.adapters.smtp import Server
from holdfast.app.definitions import Call, Effect, typed_as

__all__ = ["Mail", "Sent", "Server", "declare", "send"]

KIND = "email.send"


def declare(kind: str = KIND, server: Server | None = None, **options: Any) -> Effect[..., Sent]:
    """Create the effect for an SMTP server; by default from the environment. Options as in `@hf.effect`."""

    def send(
        call: Call, to: str | list[str], subject: str, body: str, options: Mail | None = None
    ) -> Sent:
        smtp_server = Server.from_env(os.environ) if server is None else server
        return send_mail(smtp_server, to, subject, body, options, key=call.idempotency_key)

    send.__doc__ = __doc__
    # The call options set the timeout; the effect's own timeout must exceed their maximum.
    return Effect(kind, send, **{"timeout_s": TIMEOUT_S_MAX + 10.0, **options})


def _arguments(
    to: str | list[str], subject: str, body: str, options: Mail | Mapping[str, Any] | None = None
) -> Sent:
    raise NotImplementedError("it only declares types")


send = typed_as(_arguments, declare())
