"""The request and the answer of a commit, as a client and the commit engine exchange them."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.store.api import LeaseGuard


class CommitRequest(msgspec.Struct, array_like=True, gc=False):
    """One transaction as its client sends it."""

    no: int
    client: bytes
    snapshot: int
    # True if an earlier answer may have been lost: the engine first looks up the recorded outcome.
    resent: bool = False
    reads: list[bytes] = []
    ranges: list[tuple[bytes, bytes]] = []
    guards: list[LeaseGuard] = []
    puts: dict[bytes, bytes] = {}
    deletes: list[bytes] = []
    appends: list[tuple[bytes, bytes]] = []
    adds: dict[bytes, int] = {}
    calls: list[tuple[str, msgspec.Raw]] = []
    topics: list[str] = []
    # Topics that unpark the request (see `parked_requests`).
    park_topics: list[str] = []
    # Cancels a parked request. If that was already applied, the answer is its outcome.
    cancels_parked: bool = False


class CommitAnswer(msgspec.Struct, array_like=True, gc=False):
    """The answer to a request: `error` is (code, fields), or None for a commit."""

    no: int
    error: list[Any] | None = None
    commit_no: int = 0
    seqs: list[int] = []
    results: list[msgspec.Raw] = []


# Placeholder for the answer of a parked request.
PARKED = CommitAnswer(0)
