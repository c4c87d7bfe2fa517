"""Peer stores shared by several peer queues: discard, reopen and verification."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast import store as stores
from holdfast.errors import Invalid, StoreClosed
from holdfast.store.api import Store
from holdfast.workers.mail.peers import PeerStores

PEER_URL = "memory:peers"
STORE_CLOSED = StoreClosed()


class RecordingOpener(list[Store]):
    """An opener that records the opened stores in order."""

    def __call__(self, url: str) -> Store:
        self.append(stores.open("memory:"))
        return self[-1]


@pytest.fixture
def opened() -> Iterator[RecordingOpener]:
    made = RecordingOpener()
    yield made
    for one in made:
        one.close()


@pytest.fixture
def peers(opened: RecordingOpener) -> PeerStores:
    return PeerStores({"east": PEER_URL, "west": PEER_URL}, opened)


def test_discard_of_a_stale_peer_store_keeps_the_reopened_one(
    peers: PeerStores, opened: RecordingOpener
) -> None:
    first = peers.store("east")
    peers.discard("east", first, STORE_CLOSED)
    second = peers.store("east")
    peers.discard("west", first, STORE_CLOSED)
    assert peers.store("west") is second


def test_discard_after_an_invalid_message_keeps_the_peer_store(
    peers: PeerStores, opened: RecordingOpener
) -> None:
    first = peers.store("east")
    peers.discard("east", first, Invalid(what="mail"))
    assert peers.store("west") is first


def test_peer_is_verified_until_it_succeeds_once(opened: RecordingOpener) -> None:
    verified: list[str] = []

    def vouch(universe: str, store: Store) -> None:
        verified.append(universe)
        if len(verified) == 1:
            raise Invalid(what="universe", why="it lives elsewhere")

    peers = PeerStores({"east": PEER_URL, "west": PEER_URL}, opened, vouch)
    with pytest.raises(Invalid):
        peers.store("east")
    for universe in ("east", "east", "west"):
        peers.store(universe)
    assert verified == ["east", "east", "west"]
