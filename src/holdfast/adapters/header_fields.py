"""Header fields of a mail: encoded words, folding, and a check of the finished bytes.

    field        encode one header field as bytes
    check_mail   parse a finished mail and compare it with the fields and texts it was built from

- The standard library decodes encoded words (RFC 2047) in header values, and some of its releases
  write the decoded line breaks into the mail. So this module encodes header fields itself.
- Text that is not plain ASCII, or that contains `=?`, becomes encoded words of this module. A
  reader of the mail sees the exact text of the caller, and an encoded word in that text has no
  effect.
- `check_mail` does not trust the encoder: names, number and order of header fields, and the texts
  of the parts must match the input, or the mail is refused.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from email import message_from_bytes
from email.header import decode_header
from email.message import Message
from email.policy import compat32

from holdfast.errors import Invalid

# RFC 5322 recommends lines of at most 78 characters, RFC 2047 limits encoded words to 75.
LINE_CHARS = 78
WORD_CHARS = 75
_BEGIN, _END = "=?utf-8?b?", "?="

HeaderField = tuple[str, str]


def encode_field(name: str, text: str) -> bytes:
    """Encode `Name: text` with its line end. The caller has checked the name and the absence of
    controls."""
    plain = text.isascii() and "=?" not in text and text == text.strip()
    lines = _fold(name, text) if plain else _encode_words(name, text)
    return f"{name}: {lines}\r\n".encode("ascii")


def check_mail(mail: bytes, fields: Sequence[HeaderField], texts: Sequence[str]) -> None:
    """Raise Invalid if the parsed mail differs from the fields and texts of the caller.

    `fields` are names and texts in order. The MIME fields follow them.
    """
    if b"\n" in mail.replace(b"\r\n", b"") or b"\r" in mail.replace(b"\r\n", b""):
        raise Invalid(what="mail", why="the mail contains a line break that is not CRLF")
    parsed = message_from_bytes(mail, policy=compat32)
    found = [(name, _decode_value(str(value))) for name, value in parsed.items()]
    rest = sorted(name for name, _ in found[len(fields) :])
    if found[: len(fields)] != list(fields) or rest not in (_MIME_PLAIN, _MIME_PARTS):
        raise Invalid(
            what="header",
            why="the composed mail changed a header field; check it for invalid characters",
        )
    if [_lines(_payload(part)) for part in _leaf_parts(parsed)] != [
        _lines(t.encode()) for t in texts
    ]:
        raise Invalid(what="body", why="the text of the composed mail differs from the given text")


# -- inside --------------------------------------------------------------------------------------

_MIME_PARTS = ["Content-Type", "MIME-Version"]
_MIME_PLAIN = ["Content-Transfer-Encoding", "Content-Type", "MIME-Version"]


def _fold(name: str, text: str) -> str:
    """Fold ASCII text at single spaces, so that no line consists of white space."""
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


def _encode_words(name: str, text: str) -> str:
    return "\r\n ".join(_iter_encoded_words(text, WORD_CHARS - len(name) - 2))


def _iter_encoded_words(text: str, first_chars: int) -> Iterator[str]:
    """Yield encoded words. Each contains whole characters, as RFC 2047 requires."""
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
    """Return the number of bytes that fit into an encoded word: at least one UTF-8 character."""
    return max((chars - len(_BEGIN) - len(_END)) // 4 * 3, 4)


def _decode_value(value: str) -> str:
    unfolded = value.replace("\r\n", "").strip(" ")
    if "=?" not in unfolded:
        return unfolded
    parts = [part for part, _ in decode_header(unfolded)]
    return b"".join(part if isinstance(part, bytes) else part.encode() for part in parts).decode()


def _leaf_parts(parsed: Message) -> list[Message]:
    return [part for part in parsed.walk() if not part.is_multipart()]


def _payload(part: Message) -> bytes:
    payload = part.get_payload(decode=True)
    assert isinstance(payload, bytes), "a part that is no multipart has bytes"
    return payload


def _lines(text: bytes) -> list[bytes]:
    """Return the lines without empty ones at the end, because MIME may add or remove those."""
    return text.rstrip(b"\r\n").splitlines()
