"""Redirects: every hop is judged like the first request, by a connector that never connects.

The chain begins at a public name whose answers are played back; where it leads to is forbidden. What
must hold each time: the request is refused, and nothing was asked for beyond the hops before it.
"""

from __future__ import annotations

import pytest

from holdfast.adapters.errors import BadAnswer, Forbidden, Unavailable
from holdfast.adapters.guard import Reach
from holdfast.adapters.http import Http
from tests.adapters.rig import Names, Scripted, moved, run
from tests.adapters.test_guard import NUMERIC, URLS, V4, V6

MODULES = ("holdfast.adapters.http", "holdfast.adapters.connection")

PUBLIC = "93.184.216.34"
STATUSES = (301, 302, 303, 307, 308)
HOPS_MAX = 4

# Told by a Location, these are places on the same server, or another public one.
RELATIVE = {
    "", "/etc/passwd", "example.org", "//example.org/", "http://", "http:///path", "http://:80/",
}  # fmt: skip
INWARD = [
    *(f"http://{address}/" for address in V4),
    *(f"http://[{address}]/" for address in V6),
    *(f"http://{host}/" for host in NUMERIC),
    *(url for url in URLS if url not in RELATIVE and url.isprintable() and url.isascii()),
]
# A hop each of one to four, a status each of five, dealt out in turn.
DEALT = [(to, 1 + at % HOPS_MAX, STATUSES[at % len(STATUSES)]) for at, to in enumerate(INWARD)]


def chain(*locations: str, status: int = 302, last: bytes = b"") -> Scripted:
    """A public server that sends the request on, place after place."""
    answers = [moved(to, status) for to in locations]
    return Scripted({PUBLIC: [*answers, last] if last else answers})


def follow(connector: Scripted, names: Names | None = None, reach: Reach | None = None) -> None:
    http = Http(reach or Reach(), resolve=names or Names(), connector=connector)
    run(http.request("GET", "http://start.test/", {"redirects_max": 9}, key="k"))


def inward(to: str, hop: int, status: int, names: Names | None = None) -> Names:
    """The hop is refused, and nothing was connected to but the hops before it."""
    names = names or Names()
    connector = chain(*(f"/hop-{n}" for n in range(1, hop)), to, status=status)
    with pytest.raises((Forbidden, BadAnswer)):
        follow(connector, names)
    assert connector.asked == [(PUBLIC, 80)] * hop
    assert names.asked[:hop] == ["start.test"] * hop
    return names


def test_there_are_at_least_two_hundred_hops_inward() -> None:
    assert len(set(INWARD)) >= 200


@pytest.mark.parametrize(("to", "hop", "status"), DEALT)
def test_a_redirect_inward_is_refused_at_every_hop(to: str, hop: int, status: int) -> None:
    names = inward(to, hop, status)
    assert len(names.asked) == hop, "what it leads to was not even looked up"


@pytest.mark.parametrize("hop", range(1, HOPS_MAX + 1))
@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "::1", "fd00:ec2::254"])
def test_a_redirect_to_a_name_that_leads_inward_is_refused(
    address: str, status: int, hop: int
) -> None:
    names = inward("http://inside.test/", hop, status, Names(inside_test=[[address]]))
    assert names.asked == ["start.test"] * hop + ["inside.test"]


@pytest.mark.parametrize("address", [*V4, *V6])
def test_a_name_that_turns_inward_between_two_hops_is_refused(address: str) -> None:
    names = Names(start_test=[[PUBLIC], [address]])
    connector = chain("/again")
    with pytest.raises(Forbidden):
        follow(connector, names)
    assert connector.asked == [(PUBLIC, 80)]
    assert names.asked == ["start.test", "start.test"]


@pytest.mark.parametrize("mixed", [["93.184.216.35", "10.0.0.1"], ["::1", "93.184.216.35"]])
def test_a_hop_to_a_name_with_public_and_other_addresses_is_refused(mixed: list[str]) -> None:
    inward("http://mixed.test/", 1, 302, Names(mixed_test=[mixed]))


@pytest.mark.parametrize("port", [22, 25, 6379, 8080, 0, 65535])
def test_a_redirect_to_another_port_is_refused(port: int) -> None:
    inward(f"http://other.test:{port}/", 1, 307)


@pytest.mark.parametrize("to", ["https://other.test/", "http://other.test/", "//other.test/"])
def test_a_redirect_to_another_public_host_is_looked_up_and_pinned(to: str) -> None:
    names = Names(other_test=[["93.184.216.99"], ["127.0.0.1"]])
    connector = chain(to)
    with pytest.raises(Unavailable):
        follow(connector, names)
    port = 443 if to.startswith("https") else 80
    assert connector.asked == [(PUBLIC, 80), ("93.184.216.99", port)]
    assert names.asked == ["start.test", "other.test"]


def test_a_redirect_beyond_the_allowed_hosts_is_refused() -> None:
    connector = chain("http://other.test/")
    with pytest.raises(Forbidden):
        follow(connector, reach=Reach(hosts=("start.test",)))
    assert connector.asked == [(PUBLIC, 80)]


def test_a_redirect_within_the_allowed_hosts_and_networks_goes_on() -> None:
    reach = Reach(hosts=("start.test", "*.inside.test"), cidrs=("10.1.0.0/16",), ports=(80, 8080))
    connector = chain("http://a.inside.test:8080/")
    with pytest.raises(Unavailable):
        follow(connector, Names(a_inside_test=[["10.1.2.3"]]), reach)
    assert connector.asked == [(PUBLIC, 80), ("10.1.2.3", 8080)]


@pytest.mark.parametrize(
    "url",
    [
        "http://start.test#@127.0.0.1/",
        "http://start.test?@127.0.0.1/",
        "http://start.test/@10.0.0.1",
    ],
)
def test_an_address_behind_the_host_is_no_host(url: str) -> None:
    connector = Scripted({PUBLIC: [b"HTTP/1.1 204 Empty\r\n\r\n"]})
    run(Http(Reach(), resolve=Names(), connector=connector).request("GET", url, None, key="k"))
    assert connector.asked == [(PUBLIC, 80)]
    assert b"\r\nHost: start.test\r\n" in connector.sent[0]


def test_a_cookie_of_one_hop_is_not_sent_to_the_next_nor_by_the_next_call() -> None:
    cookie = (
        b"HTTP/1.1 302 Moved\r\nset-cookie: a=b\r\nlocation: /next\r\ncontent-length: 0\r\n\r\n"
    )
    last = b"HTTP/1.1 204 Empty\r\nset-cookie: c=d\r\n\r\n"
    connector = Scripted({PUBLIC: [cookie, last, last]})
    http = Http(Reach(), resolve=Names(), connector=connector)
    for _ in range(2):
        run(http.request("GET", "http://start.test/", None, key="k"))
    assert len(connector.sent) == 3
    assert not any(b"cookie" in sent.lower() for sent in connector.sent)
