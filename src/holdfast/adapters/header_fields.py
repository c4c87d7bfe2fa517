"""Header fields of a mail: encoded words, folding, and the comparison of the finished bytes.

    field        one header field as bytes
    check_mail   parse a finished mail and compare it with the fields and texts it was built from

- The standard library decodes encoded words (RFC 2047) in a header that it is given, and some of its
  releases write the decoded line breaks into the mail. So this module writes header fields itself.
- Text that is not plain ASCII, or that holds `=?`, becomes encoded words of this module. A reader of
  the mail sees the exact text of the caller, and an encoded word in it has no effect.
- `check_mail` does not trust the encoder: names, number and order of header fields, the parts and
  their texts are those that went in, or the mail is refused.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from email import message_from_bytes
from email.header import decode_header
from email.message import Message
from email.policy import compat32

from holdfast.errors import Invalid

# RFC 5322 asks for lines of at most 78 characters, RFC 2047 for encoded words of at most 75.
LINE_CHARS = 78
WORD_CHARS = 75
_BEGIN, _END = "=?utf-8?b?", "?="

Field = tuple[str, str]


def field(name: str, text: str) -> bytes:
    """`Name: text` with its line end. The caller has checked the name and the absence of controls."""
    plain = text.isascii() and "=?" not in text and text == text.strip()
    lines = _folded(name, text) if plain else _encoded(name, text)
    return f"{name}: {lines}\r\n".encode("ascii")


def check_mail(mail: bytes, fields: Sequence[Field], texts: Sequence[str]) -> None:
    """Refuse a mail whose parsed form differs from the fields and texts of the caller.

    `fields` are names and texts in their order. The fields of MIME follow them.
    """
    if b"\n" in mail.replace(b"\r\n", b"") or b"\r" in mail.replace(b"\r\n", b""):
        raise Invalid(what="mail", why="a line break that is not CRLF")
    parsed = message_from_bytes(mail, policy=compat32)
    found = [(name, _decoded(str(value))) for name, value in parsed.items()]
    rest = sorted(name for name, _ in found[len(fields) :])
    if found[: len(fields)] != list(fields) or rest not in (_MIME_PLAIN, _MIME_PARTS):
        raise Invalid(what="header", why="the finished mail has other header fields")
    if [_lines(_payload(part)) for part in _leaves(parsed)] != [_lines(t.encode()) for t in texts]:
        raise Invalid(what="body", why="the finished mail has another text")


# -- inside --------------------------------------------------------------------------------------

_MIME_PARTS = ["Content-Type", "MIME-Version"]
_MIME_PLAIN = ["Content-Transfer-Encoding", "Content-Type", "MIME-Version"]


def _folded(name: str, text: str) -> str:
    """ASCII text, folded at single spaces so that no line consists of white space."""
    lines = [""]
    room = LINE_CHARS - len(name) - 2
    for word in text.split(" "):
        line = lines[-1]
        fits = len(line) + len(word) + 1 <= room
        if line == "" and len(lines) == 1:
            lines[-1] = word
        elif fits or not word or not line.strip():
            lines[-1] = f"{line} {word}"
        else:
            lines.append(word)
            room = LINE_CHARS - 1
    return "\r\n ".join(lines)


def _encoded(name: str, text: str) -> str:
    return "\r\n ".join(_words(text, WORD_CHARS - len(name) - 2))


def _words(text: str, first_chars: int) -> Iterator[str]:
    """Encoded words. Each holds whole characters, as RFC 2047 asks."""
    room = _bytes_within(first_chars)
    chunk = b""
    for character in text:
        code = character.encode()
        if len(chunk) + len(code) > room:
            yield f"{_BEGIN}{base64.b64encode(chunk).decode()}{_END}"
            chunk, room = b"", _bytes_within(WORD_CHARS)
        chunk += code
    yield f"{_BEGIN}{base64.b64encode(chunk).decode()}{_END}"


def _bytes_within(chars: int) -> int:
    """How many bytes fit into an encoded word. At least one character of UTF-8 always does."""
    return max((chars - len(_BEGIN) - len(_END)) // 4 * 3, 4)


def _decoded(value: str) -> str:
    unfolded = value.replace("\r\n", "").strip(" ")
    if "=?" not in unfolded:
        return unfolded
    parts = [part for part, _ in decode_header(unfolded)]
    return b"".join(part if isinstance(part, bytes) else part.encode() for part in parts).decode()


def _leaves(parsed: Message) -> list[Message]:
    return [part for part in parsed.walk() if not part.is_multipart()]


def _payload(part: Message) -> bytes:
    payload = part.get_payload(decode=True)
    assert isinstance(payload, bytes), "a part that is no multipart has bytes"
    return payload


def _lines(text: bytes) -> list[bytes]:
    """The lines, without empty ones at the end: MIME gives and takes those."""
    return text.rstrip(b"\r\n").splitlines()
