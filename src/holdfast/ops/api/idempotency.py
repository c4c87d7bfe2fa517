"""Idempotency keys of requests: a repeated request gets the first answer and changes nothing.

- The first commit of a request claims its key together with the change. The answer is saved in a second commit.
- The same key with another request is `KeyConflict`. The commit checks this again, so it refuses the change too.
- A process that ends between the two commits loses the answer, not the change. A repeat then raises `AnswerPending`,
  or repeats an operation that recognizes the key and writes nothing.
- Keys expire by the retention of idempotency keys, and count as new after that.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from holdfast import codec
from holdfast.codec import Record
from holdfast.durable import dedupe
from holdfast.errors import Busy, Invalid
from holdfast.ops.api.endpoint import ApiAnswer
from holdfast.store.api import Txn

KEY_CHARS_MAX = 255
_CLAIM, _ANSWER = "claim:", "answer:"


class AnswerPending(Busy):
    code = "answer_pending"
    hint = (
        "the first request with this idempotency key took effect and its answer is not stored yet; retry shortly; "
        "if this does not end, the server ended before it could answer: read the subject"
    )


class RequestKey(NamedTuple):
    """An idempotency key with the digest of its request."""

    universe: str
    key: str
    digest: bytes

    @property
    def scope(self) -> str:
        return dedupe.request_scope(self.universe)


class StoredAnswer(Record, frozen=True):
    status: int
    json: bytes
    etag: str
    headers: list[tuple[str, str]]


def claim(txn: Txn, request: RequestKey) -> None:
    """Record that this request commits now. Raise AnswerPending if another one with the same key has committed."""
    _check(request)
    if is_claimed(txn, request):
        raise AnswerPending(key=request.key)
    dedupe.remember(txn, request.scope, _CLAIM + request.key, request.digest, b"")


def is_claimed(txn: Txn, request: RequestKey) -> bool:
    """Whether this request has committed. Raise KeyConflict if another request has the key."""
    _check(request)
    return dedupe.check(txn, request.scope, _CLAIM + request.key, request.digest) is not None


def find_answer(txn: Txn, request: RequestKey) -> ApiAnswer | None:
    """Return the stored answer of the first request with this key; None without one."""
    _check(request)
    row = dedupe.check(txn, request.scope, _ANSWER + request.key, request.digest)
    if row is not None:
        stored = codec.unpack_as(StoredAnswer, row)
        headers = tuple((name, value) for name, value in stored.headers)
        return ApiAnswer(msgspec.Raw(stored.json), stored.status, stored.etag, headers)
    return None


def save_answer(txn: Txn, request: RequestKey, answer: ApiAnswer) -> ApiAnswer:
    """Store the answer to a request, and return it. Return the first answer if the key has one already."""
    first = dedupe.check(txn, request.scope, _ANSWER + request.key, request.digest)
    if first is None:
        json = msgspec.json.encode(answer.value)
        row = StoredAnswer(answer.status, json, answer.etag, list(answer.headers))
        dedupe.remember(txn, request.scope, _ANSWER + request.key, request.digest, codec.pack(row))
        return answer
    found = find_answer(txn, request)
    assert found is not None
    return found


def _check(request: RequestKey) -> None:
    if not (request.key.isascii() and request.key.isprintable()):
        raise Invalid(what="Idempotency-Key", why="it is not printable ASCII")
    if len(request.key) > KEY_CHARS_MAX:
        raise Invalid(what="Idempotency-Key", why="too long", chars_max=KEY_CHARS_MAX)
