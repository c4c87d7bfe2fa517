"""One mail by SMTP.

- The Message-ID is derived from the intent's idempotency key, so receivers that drop duplicates see
  the copies of a repeated attempt as one message. SMTP has no idempotency: a connection that breaks
  after the text was sent is retried, as the docs state.
- Header text must not contain a line break or another control character. It is refused, never
  sanitized. A reader sees exactly the given text: an encoded word in it (`=?utf-8?q?…?=`) is text,
  not an instruction (`header_fields`). Addresses are plain addresses and are checked.
- The finished mail is parsed again before it is sent. It is refused if its header fields or texts
  differ from the input.

The session with the server is in `smtp`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import formatdate
from typing import Any

import msgspec

from holdfast import codec
from holdfast.adapters import header_fields, smtp
from holdfast.adapters.smtp import Server
from holdfast.clock import SYSTEM, S
from holdfast.errors import Invalid, ValueTooLarge

RECIPIENTS_MAX = 100
MAIL_BYTES_MAX = 3 * 1024 * 1024
HEADER_CHARS_MAX = 900
TIMEOUT_S_MAX = 600.0

_ADDRESS = re.compile(
    r"(?=.{3,254}\Z)[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}"
    r"@[A-Za-z0-9]([A-Za-z0-9-]{0,62})?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,62})?)*"
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_HEADER_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,75}")
# Headers that the adapter sets, or that would change the recipients or the decoding of the mail.
_RESERVED_HEADERS = frozenset(
    {"from", "to", "cc", "bcc", "subject", "date", "message-id", "sender", "reply-to", "return-path",
     "received", "mime-version", "content-type", "content-transfer-encoding", "content-disposition"}
)  # fmt: skip


class Mail(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The options of a mail besides recipients, subject and text."""

    sender: str = ""
    cc: tuple[str, ...] = ()
    bcc: tuple[str, ...] = ()
    reply_to: str = ""
    html: str | None = None
    headers: dict[str, str] = {}
    timeout_s: float = 30.0


class Sent(msgspec.Struct, frozen=True):
    """The server accepted the mail. `refused` has the rejected recipients with the server's
    responses."""

    message_id: str
    refused: dict[str, str] = {}


def send(
    server: Server,
    to: str | list[str],
    subject: str,
    body: str,
    options: Mail | Mapping[str, Any] | None,
    *,
    key: str,
) -> Sent:
    """Compose a mail and submit it to the server."""
    mail = _parse_options(options)
    sender = mail.sender or server.sender
    recipients = [*_as_list(to), *mail.cc, *mail.bcc]
    text = compose(sender, _as_list(to), subject, body, mail, key=key)
    if len(text) > MAIL_BYTES_MAX:
        raise ValueTooLarge(what="mail", bytes=len(text), bytes_max=MAIL_BYTES_MAX)
    refused = smtp.submit_mail(server, sender, recipients, text, mail.timeout_s)
    return Sent(message_id(key, sender), refused)


def compose(sender: str, to: list[str], subject: str, body: str, mail: Mail, *, key: str) -> bytes:
    """Compose and check the message. Bcc recipients are only in the envelope."""
    _check_addresses([sender], "sender")
    _check_addresses([*to, *mail.cc, *mail.bcc], "to")
    if not to or len(to) + len(mail.cc) + len(mail.bcc) > RECIPIENTS_MAX:
        raise Invalid(what="to", found=len(to), min=1, max=RECIPIENTS_MAX)
    fields = [("From", sender), ("To", ", ".join(to))]
    if mail.cc:
        fields.append(("Cc", ", ".join(mail.cc)))
    if mail.reply_to:
        _check_addresses([mail.reply_to], "reply_to")
        fields.append(("Reply-To", mail.reply_to))
    fields.append(("Subject", _header_text("subject", subject)))
    fields.append(("Date", formatdate(SYSTEM.wall_ns() / S)))
    fields.append(("Message-ID", message_id(key, sender)))
    taken = set(_RESERVED_HEADERS)
    for name, value in mail.headers.items():
        if not _HEADER_NAME.fullmatch(name) or name.lower() in taken:
            raise Invalid(
                what="header",
                name=name[:100],
                why="an invalid name, or a header that the adapter sets",
            )
        taken.add(name.lower())
        fields.append((name, _header_text(name, value)))
    texts = [_text("body", body)] + ([] if mail.html is None else [_text("html", mail.html)])
    message = b"".join(header_fields.encode_field(*field) for field in fields) + _content(texts)
    header_fields.check_mail(message, fields, texts)
    return message


def message_id(key: str, sender: str) -> str:
    """Return the Message-ID of an intent, the same for all attempts. It is a hash, because keys may
    contain any character."""
    return f"<{hashlib.sha256(key.encode()).hexdigest()[:40]}@{sender.rpartition('@')[2]}>"


# -- inside --------------------------------------------------------------------------------------


def _parse_options(options: Mail | Mapping[str, Any] | None) -> Mail:
    try:
        mail = (
            options
            if isinstance(options, Mail)
            else codec.convert({} if options is None else options, Mail)
        )
    except msgspec.ValidationError as error:
        raise Invalid(what="options of email.send", why=str(error)) from None
    if not 0 < mail.timeout_s <= TIMEOUT_S_MAX:
        raise Invalid(what="timeout_s", found=mail.timeout_s, max=TIMEOUT_S_MAX)
    return mail


def _as_list(to: str | list[str]) -> list[str]:
    return [to] if isinstance(to, str) else list(to)


def _check_addresses(addresses: list[str], what: str) -> None:
    for address in addresses:
        # `=?` in a mailbox name is legal, but a reader may take it as the start of an encoded word.
        if not isinstance(address, str) or not _ADDRESS.fullmatch(address) or "=?" in address:
            raise Invalid(what=what, found=str(address)[:100], expected="name@host")


def _content(texts: list[str]) -> bytes:
    """Encode the MIME fields, the empty line, the text and its HTML. No header text is passed to
    this function."""
    content = EmailMessage(policy=SMTP)
    content.set_content(texts[0])
    for html in texts[1:]:
        content.add_alternative(html, subtype="html")
    return content.as_bytes(policy=SMTP)


def _text(what: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Invalid(what=what, why=str(error)[:200]) from None
    return text


def _header_text(name: str, text: str) -> str:
    _text(name, text)
    if _CONTROL.search(text) or len(text) > HEADER_CHARS_MAX:
        raise Invalid(
            what="header", name=name, why="a line break, a control character, or too long"
        )
    return text
