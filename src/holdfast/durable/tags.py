"""Tags: a short text that a client gives to a task, a flow or an effect, and the index of subjects by tag (labels).

    <prefix> <tag> <subject>    one row per subject with a tag; the value is empty

A subject is a number, or the hash of an intent. Keys are short, so a tag above `INDEXED_BYTES_MAX` bytes is indexed by
its digest.
"""

from __future__ import annotations

from functools import lru_cache

from holdfast import codec
from holdfast.store import tuples
from holdfast.store.api import Txn

INDEXED_BYTES_MAX = 64


@lru_cache(4096)
def pack_tag(tag: str) -> bytes:
    """Return the part of a key that stands for a tag. A digest is bytes, so no tag equals it."""
    raw = tag.encode(errors="surrogatepass")
    return tuples.pack((tag if len(raw) <= INDEXED_BYTES_MAX else codec.digest(raw)[:16],))


def add(txn: Txn, prefix: bytes, tag: str, packed_subject: bytes) -> None:
    """List a subject under its tag. Without a tag nothing is written."""
    if tag:
        txn.put(prefix + pack_tag(tag) + packed_subject, b"")


def remove(txn: Txn, prefix: bytes, tag: str, packed_subject: bytes) -> None:
    if tag:
        txn.delete(prefix + pack_tag(tag) + packed_subject)
