"""Redirects: the HTTP client checks every hop like the first request. No connection is opened.

A redirect chain starts at a public name with scripted responses and ends at a forbidden location.
Each test asserts that the request is refused and that only the earlier hops were connected.
"""

from __future__ import annotations

import pytest

from holdfast.adapters.address_guard import Reach
from holdfast.adapters.errors import BadResponse, ForbiddenAddress, Unavailable
from holdfast.adapters.http import HttpClient
from tests.adapters.rig import FakeResolver, ScriptedConnector, redirect_bytes, run
from tests.adapters.test_address_guard import (
    FORBIDDEN_IPV4,
    FORBIDDEN_IPV6,
    FORBIDDEN_URLS,
    NUMERIC_HOSTS,
)

MODULES = ("holdfast.adapters.http", "holdfast.adapters.pinned_connection")

PUBLIC = "93.184.216.34"
STATUSES = (301, 302, 303, 307, 308)
HOPS_MAX = 4

# As a Location header, these URLs name the same server or another public one.
RELATIVE = {
    "", "/etc/passwd", "example.org", "//example.org/", "http://", "http:///path", "http://:80/",
}  # fmt: skip
FORBIDDEN_LOCATIONS = [
    *(f"http://{address}/" for address in FORBIDDEN_IPV4),
    *(f"http://[{address}]/" for address in FORBIDDEN_IPV6),
    *(f"http://{host}/" for host in NUMERIC_HOSTS),
    *(url for url in FORBIDDEN_URLS if url not in RELATIVE and url.isprintable() and url.isascii()),
]
# Hop numbers 1 to 4 and the five statuses, assigned round-robin.
REDIRECT_CASES = [
    (to, 1 + at % HOPS_MAX, STATUSES[at % len(STATUSES)])
    for at, to in enumerate(FORBIDDEN_LOCATIONS)
]


def redirect_chain(*locations: str, status: int = 302, last: bytes = b"") -> ScriptedConnector:
    """Make a connector for a public server that redirects to these locations in order."""
    answers = [redirect_bytes(to, status) for to in locations]
    return ScriptedConnector({PUBLIC: [*answers, last] if last else answers})


def follow_redirects(
    connector: ScriptedConnector, resolver: FakeResolver | None = None, reach: Reach | None = None
) -> None:
    http = HttpClient(reach or Reach(), resolve=resolver or FakeResolver(), connector=connector)
    run(http.request("GET", "http://start.test/", {"redirects_max": 9}, key="k"))


def assert_redirect_refused(
    to: str, hop: int, status: int, resolver: FakeResolver | None = None
) -> FakeResolver:
    """Assert that the client refuses the redirect and connected only to the earlier hops."""
    resolver = resolver or FakeResolver()
    connector = redirect_chain(*(f"/hop-{n}" for n in range(1, hop)), to, status=status)
    with pytest.raises((ForbiddenAddress, BadResponse)):
        follow_redirects(connector, resolver)
    assert connector.connections == [(PUBLIC, 80)] * hop
    assert resolver.lookups[:hop] == ["start.test"] * hop
    return resolver


def test_at_least_two_hundred_forbidden_redirects_are_tested() -> None:
    assert len(set(FORBIDDEN_LOCATIONS)) >= 200


@pytest.mark.parametrize(("to", "hop", "status"), REDIRECT_CASES)
def test_redirect_to_a_forbidden_address_is_refused_at_every_hop(
    to: str, hop: int, status: int
) -> None:
    resolver = assert_redirect_refused(to, hop, status)
    assert len(resolver.lookups) == hop, "what it leads to was not even looked up"


@pytest.mark.parametrize("hop", range(1, HOPS_MAX + 1))
@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "::1", "fd00:ec2::254"])
def test_redirect_to_a_name_with_a_forbidden_address_is_refused(
    address: str, status: int, hop: int
) -> None:
    resolver = assert_redirect_refused(
        "http://inside.test/", hop, status, FakeResolver(inside_test=[[address]])
    )
    assert resolver.lookups == ["start.test"] * hop + ["inside.test"]


@pytest.mark.parametrize("address", [*FORBIDDEN_IPV4, *FORBIDDEN_IPV6])
def test_name_that_becomes_forbidden_between_redirects_is_refused(address: str) -> None:
    resolver = FakeResolver(start_test=[[PUBLIC], [address]])
    connector = redirect_chain("/again")
    with pytest.raises(ForbiddenAddress):
        follow_redirects(connector, resolver)
    assert connector.connections == [(PUBLIC, 80)]
    assert resolver.lookups == ["start.test", "start.test"]


@pytest.mark.parametrize("mixed", [["93.184.216.35", "10.0.0.1"], ["::1", "93.184.216.35"]])
def test_redirect_to_a_name_with_any_forbidden_address_is_refused(mixed: list[str]) -> None:
    assert_redirect_refused("http://mixed.test/", 1, 302, FakeResolver(mixed_test=[mixed]))


@pytest.mark.parametrize("port", [22, 25, 6379, 8080, 0, 65535])
def test_a_redirect_to_another_port_is_refused(port: int) -> None:
    assert_redirect_refused(f"http://other.test:{port}/", 1, 307)


@pytest.mark.parametrize("to", ["https://other.test/", "http://other.test/", "//other.test/"])
def test_redirect_to_another_public_host_is_resolved_and_pinned(to: str) -> None:
    resolver = FakeResolver(other_test=[["93.184.216.99"], ["127.0.0.1"]])
    connector = redirect_chain(to)
    with pytest.raises(Unavailable):
        follow_redirects(connector, resolver)
    port = 443 if to.startswith("https") else 80
    assert connector.connections == [(PUBLIC, 80), ("93.184.216.99", port)]
    assert resolver.lookups == ["start.test", "other.test"]


def test_a_redirect_beyond_the_allowed_hosts_is_refused() -> None:
    connector = redirect_chain("http://other.test/")
    with pytest.raises(ForbiddenAddress):
        follow_redirects(connector, reach=Reach(hosts=("start.test",)))
    assert connector.connections == [(PUBLIC, 80)]


def test_redirect_within_the_allowed_hosts_and_networks_is_followed() -> None:
    reach = Reach(hosts=("start.test", "*.inside.test"), cidrs=("10.1.0.0/16",), ports=(80, 8080))
    connector = redirect_chain("http://a.inside.test:8080/")
    with pytest.raises(Unavailable):
        follow_redirects(connector, FakeResolver(a_inside_test=[["10.1.2.3"]]), reach)
    assert connector.connections == [(PUBLIC, 80), ("10.1.2.3", 8080)]


@pytest.mark.parametrize(
    "url",
    [
        "http://start.test#@127.0.0.1/",
        "http://start.test?@127.0.0.1/",
        "http://start.test/@10.0.0.1",
    ],
)
def test_address_after_the_host_is_not_taken_as_host(url: str) -> None:
    connector = ScriptedConnector({PUBLIC: [b"HTTP/1.1 204 Empty\r\n\r\n"]})
    run(
        HttpClient(Reach(), resolve=FakeResolver(), connector=connector).request(
            "GET", url, None, key="k"
        )
    )
    assert connector.connections == [(PUBLIC, 80)]
    assert b"\r\nHost: start.test\r\n" in connector.sent[0]


def test_cookies_are_not_sent_after_redirects_or_in_later_calls() -> None:
    cookie = (
        b"HTTP/1.1 302 Moved\r\nset-cookie: a=b\r\nlocation: /next\r\ncontent-length: 0\r\n\r\n"
    )
    last = b"HTTP/1.1 204 Empty\r\nset-cookie: c=d\r\n\r\n"
    connector = ScriptedConnector({PUBLIC: [cookie, last, last]})
    http = HttpClient(Reach(), resolve=FakeResolver(), connector=connector)
    for _ in range(2):
        run(http.request("GET", "http://start.test/", None, key="k"))
    assert len(connector.sent) == 3
    assert not any(b"cookie" in sent.lower() for sent in connector.sent)
