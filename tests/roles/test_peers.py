"""The stores of other universes when several lanes share them: who drops what, and who vouches for whom."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast import store as stores
from holdfast.errors import Invalid, StoreClosed
from holdfast.roles.peers import Peers
from holdfast.store.api import Store

PLACE = "memory:peers"
GONE = StoreClosed()


class Opened(list[Store]):
    """Every store that was opened, in order."""

    def __call__(self, url: str) -> Store:
        self.append(stores.open("memory:"))
        return self[-1]


@pytest.fixture
def opened() -> Iterator[Opened]:
    made = Opened()
    yield made
    for one in made:
        one.close()


@pytest.fixture
def peers(opened: Opened) -> Peers:
    return Peers({"east": PLACE, "west": PLACE}, opened)


def test_what_others_have_opened_meanwhile_is_left_to_them(peers: Peers, opened: Opened) -> None:
    first = peers.store("east")
    peers.drop("east", first, GONE)
    second = peers.store("east")
    peers.drop("west", first, GONE)
    assert peers.store("west") is second


def test_a_message_that_was_refused_closes_nothing(peers: Peers, opened: Opened) -> None:
    first = peers.store("east")
    peers.drop("east", first, Invalid(what="mail"))
    assert peers.store("west") is first


def test_a_universe_is_vouched_for_until_it_is_and_then_no_more(opened: Opened) -> None:
    asked: list[str] = []

    def vouch(universe: str, store: Store) -> None:
        asked.append(universe)
        if len(asked) == 1:
            raise Invalid(what="universe", why="it lives elsewhere")

    peers = Peers({"east": PLACE, "west": PLACE}, opened, vouch)
    with pytest.raises(Invalid):
        peers.store("east")
    for universe in ("east", "east", "west"):
        peers.store(universe)
    assert asked == ["east", "east", "west"]
