"""HTTP/1.1 as far as we speak it, without any IO: the head of a request in, the bytes of an answer out.

- A body has a length that is told beforehand. Chunks are refused, and so is whatever could be read in
  two ways (two lengths, two hosts, a folded line, a bare line feed): nobody gets to slip a second
  request into the first.
- What goes wrong is told as a problem (`problem`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote

from holdfast.ops.http.problem import (
    BadRequest,
    BodyTooLarge,
    HeadTooLarge,
    LengthRequired,
    Response,
    phrase_of,
)

HEAD_BYTES_MAX = 16 * 1024
HEADERS_MAX = 64
TARGET_BYTES_MAX = 4096
# A batch of tasks, as text. What is stored of each is bounded on its own.
BODY_BYTES_MAX = 16 * 1024 * 1024

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_FIELD = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_VERSION = re.compile(r"HTTP/1\.[01]")
_LENGTH = re.compile(r"[0-9]{1,12}")


class Request(NamedTuple):
    """The head of a request. Header names are in lower case; each is there once."""

    method: str
    path: tuple[str, ...]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    length: int
    keep_alive: bool


# -- requests ------------------------------------------------------------------------------------


def parse(head: bytes) -> Request:
    """The head, up to and including its empty line."""
    text = head.decode("latin-1")
    if not text.endswith("\r\n\r\n"):
        raise BadRequest(what="head", why="it does not end")
    first, *lines = text[:-4].split("\r\n")
    method, path, query, version = _request_line(first)
    headers = _headers(lines)
    if version == "HTTP/1.1" and "host" not in headers:
        raise BadRequest(what="host", why="missing")
    if "transfer-encoding" in headers:
        raise LengthRequired(what="body", found=headers["transfer-encoding"][:64])
    words = {word.strip().lower() for word in headers.get("connection", "").split(",")}
    keep_alive = "keep-alive" in words if version == "HTTP/1.0" else "close" not in words
    return Request(method, path, query, headers, _length(method, headers), keep_alive)


def _request_line(line: str) -> tuple[str, tuple[str, ...], dict[str, str], str]:
    parts = line.split(" ")
    if len(parts) != 3 or not _TOKEN.fullmatch(parts[0]) or not _VERSION.fullmatch(parts[2]):
        raise BadRequest(what="request line", found=line[:64])
    method, target, version = parts
    if len(target) > TARGET_BYTES_MAX:
        raise BadRequest(what="target", why="too long", bytes_max=TARGET_BYTES_MAX)
    if not target.startswith("/") or not target.isascii() or not target.isprintable():
        raise BadRequest(what="target", found=target[:64])
    # A path that begins with two slashes is no address of another host, and nobody sends a fragment.
    if "#" in target:
        raise BadRequest(what="target", why="a fragment", found=target[:64])
    whole, _, asked = target.partition("?")
    query: dict[str, str] = {}
    try:
        path = tuple(unquote(part, errors="strict") for part in whole[1:].split("/"))
        pairs = parse_qsl(
            asked, keep_blank_values=True, errors="strict", max_num_fields=HEADERS_MAX
        )
    except ValueError:
        raise BadRequest(what="target", why="badly escaped", found=target[:64]) from None
    for name, value in pairs:
        if name in query:
            raise BadRequest(what="query", why="given twice", found=name[:64])
        query[name] = value
    return method, path, query, version


def _headers(lines: list[str]) -> dict[str, str]:
    if len(lines) > HEADERS_MAX:
        raise HeadTooLarge(what="headers", found=len(lines), max=HEADERS_MAX)
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        value = value.strip(" \t")
        if not colon or not _TOKEN.fullmatch(name) or not _FIELD.fullmatch(value):
            raise BadRequest(what="header", found=line[:64])
        name = name.lower()
        if name in found:
            if name in ("host", "content-length", "authorization", "origin", "content-type"):
                raise BadRequest(what="header", why="given twice", found=name)
            value = f"{found[name]}, {value}"
        found[name] = value
    return found


def _length(method: str, headers: Mapping[str, str]) -> int:
    told = headers.get("content-length")
    if told is None:
        if method in ("POST", "PUT", "PATCH"):
            raise LengthRequired(what="body")
        return 0
    if not _LENGTH.fullmatch(told):
        raise BadRequest(what="content-length", found=told[:64])
    if int(told) > BODY_BYTES_MAX:
        raise BodyTooLarge(what="body", bytes=int(told), bytes_max=BODY_BYTES_MAX)
    return int(told)


# -- answers -------------------------------------------------------------------------------------


def bytes_of(response: Response, *, keep_alive: bool, head_only: bool = False) -> bytes:
    lines = [
        f"HTTP/1.1 {response.status} {phrase_of(HTTPStatus(response.status))}",
        f"Content-Type: {response.kind}",
        f"Content-Length: {len(response.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        *(f"{name}: {value}" for name, value in response.headers),
        # Said both ways: a client of HTTP/1.0 that is told nothing waits for the end.
        f"Connection: {'keep-alive' if keep_alive else 'close'}",
        "\r\n",
    ]
    head = "\r\n".join(lines).encode("latin-1")
    return head if head_only else head + response.body
