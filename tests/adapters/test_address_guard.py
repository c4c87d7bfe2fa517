"""The SSRF address guard, tested with a fake resolver and a connector that opens no connection."""

import ipaddress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.adapters.address_guard import AddressGuard, Reach, is_public
from holdfast.adapters.errors import ForbiddenAddress, Unavailable
from holdfast.errors import Invalid
from tests.adapters.rig import FakeResolver, recording_client, run

MODULES = ("holdfast.adapters.address_guard", "holdfast.adapters.pinned_connection")

FORBIDDEN_IPV4 = [
    "0.0.0.0", "0.0.0.1", "0.255.255.255", "10.0.0.0", "10.0.0.1", "10.1.2.3", "10.255.255.255",
    "100.64.0.0", "100.64.0.1", "100.100.100.200", "100.127.255.255", "127.0.0.1", "127.0.0.2",
    "127.1.1.1", "127.255.255.255", "168.63.129.16", "169.254.0.0", "169.254.0.1", "169.254.169.254",
    "169.254.169.253", "169.254.170.2", "169.254.255.255", "172.16.0.0", "172.16.0.1", "172.20.1.1",
    "172.31.255.255", "192.0.0.0", "192.0.0.1", "192.0.0.170", "192.0.0.192", "192.0.2.1",
    "192.31.196.1", "192.52.193.1", "192.88.99.1", "192.168.0.0", "192.168.0.1", "192.168.1.254",
    "192.168.255.255", "192.175.48.1", "198.18.0.1", "198.19.255.255", "198.51.100.7", "203.0.113.9",
    "224.0.0.1", "224.0.0.251", "233.252.0.1", "239.255.255.250", "239.255.255.255", "240.0.0.1",
    "250.1.2.3", "255.255.255.254", "255.255.255.255",
]  # fmt: skip

FORBIDDEN_IPV6 = [
    "::", "::1", "::2", "::127.0.0.1", "::10.0.0.1", "::8.8.8.8", "::ffff:127.0.0.1",
    "::ffff:7f00:1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::ffff:a9fe:a9fe",
    "::ffff:192.168.1.1", "::ffff:8.8.8.8", "::ffff:0:127.0.0.1", "64:ff9b::127.0.0.1",
    "64:ff9b::10.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b::8.8.8.8", "64:ff9b:1::7f00:1", "100::1",
    "100:0:0:1::1", "1::1", "2001::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:2::1",
    "2001:10::1", "2001:20::1", "2001:db8::1", "2001:db8:ffff::1", "2002:7f00:1::", "2002:7f00:1::1",
    "2002:a00:1::1", "2002:a9fe:a9fe::1", "2002:c0a8:101::1", "2620:4f:8000::1", "3fff::1",
    "3fff:fff::1", "4000::1", "5f00::1", "8000::1", "fc00::1", "fd00::1", "fd00:ec2::254",
    "fd00:ec2::23", "fd20:ce::254", "fdff:ffff::1", "fe80::1", "fe80::a9fe:a9fe", "fe80:1234::1",
    "febf::1", "fec0::1", "feff::1", "ff00::1", "ff01::1", "ff02::1", "ff02::fb", "ff05::2",
    "ff0e::1", "ffff::1", "2a00:1450::5efe:7f00:1", "2a00:1450::200:5efe:a00:1",
]  # fmt: skip

# Spellings that some resolvers read as 127.0.0.1, 169.254.169.254, 10.0.0.1 or 8.8.8.8.
NUMERIC_HOSTS = [
    "2130706433", "3232235777", "2852039166", "134744072", "017700000001", "0x7f000001",
    "0X7F000001", "0x7f.1", "0x7f.0.0.1", "0x7f.0x0.0x0.0x1", "127.1", "127.0.1", "10.1", "0177.1",
    "0177.0.0.1", "0177.0.0.01", "00127.0.0.1", "127.0.0.01", "127.0.0.001", "127.0.0.0x1",
    "0251.0376.0251.0376", "0xa9.0xfe.0xa9.0xfe", "0xa9fea9fe", "169.254.43518", "169.16689662",
    "10.0.1", "012.0.0.1", "0xa.0.0.1", "8.8.2056", "0x8.0x8.0x8.0x8", "010.010.010.010", "0", "00",
    "0x0", "1", "4294967295", "4294967296", "99999999999999999999", "127.0.0.1.", "127.1.",
    "2130706433.", "256.256.256.256", "1.2.3.4.5", "0o177.0.0.1", "0x", "0x7f.1.",
]  # fmt: skip

FORBIDDEN_URLS = [
    "file:///etc/passwd", "ftp://example.org/", "gopher://example.org:70/_x", "dict://example.org/",
    "ldap://example.org/", "unix:///var/run/docker.sock", "data:text/plain,x", "jar:http://x/!/",
    "javascript:alert(1)", "ws://example.org/", "//example.org/", "/etc/passwd", "example.org", "",
    "http://", "http:///path", "http://:80/", "http://user@example.org/",
    "http://user:secret@example.org/", "http://example.org@127.0.0.1/",
    "http://127.0.0.1@example.org/", "http://127.0.0.1:80@example.org/",
    "http://example.org:22/", "http://example.org:25/", "http://example.org:6379/",
    "http://example.org:0/", "https://example.org:8443/", "http://example.org:65536/",
    "http://example.org:-1/", "http://[::1]/", "http://[::1]:80/", "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]/", "http://[0:0:0:0:0:ffff:169.254.169.254]/", "http://[fe80::1%25eth0]/",
    "http://[fe80::1%eth0]/", "http://[::1%25lo]/", "http://[fd00:ec2::254]/latest/meta-data/",
    "http://[::]/", "http://[v1.x]/", "http://[127.0.0.1]/", "http://[::1", "http://::1/",
    "http://169.254.169.254/latest/meta-data/", "http://169.254.169.254:80/", "http://127.0.0.1/",
    "http://127.0.0.1:443/", "https://10.0.0.1/", "http://①②⑦.⓪.⓪.①/", "http://127。0。0。1/",
    "http://example.org\\@127.0.0.1/", "http://exa mple.org/", "http://example.org\r\nX: y/",
    "http://example.org\t/", "http://exam\x00ple.org/", "http://%31%32%37.0.0.1/",
    "http://127.0.0.1%2f@example.org/", "http://ex%61mple.org/", "http://-example.org/",
    "http://example.org;127.0.0.1/", "http://.example.org/", "http://ⓛocalhost/",
]  # fmt: skip


def assert_refused(url: Any, **answers: list[list[str]]) -> FakeResolver:
    """Assert that the client refuses the URL and opens no connection."""
    http, connector, resolver = recording_client(resolver=FakeResolver(**answers))
    with pytest.raises(ForbiddenAddress):
        run(http.request("GET", url, None, key="k"))
    assert connector.connections == []
    return resolver


@pytest.mark.parametrize("address", FORBIDDEN_IPV4)
def test_non_public_ipv4_literal_is_refused(address: str) -> None:
    assert assert_refused(f"http://{address}/").lookups == []


@pytest.mark.parametrize("address", FORBIDDEN_IPV6)
def test_non_public_ipv6_literal_is_refused(address: str) -> None:
    assert assert_refused(f"http://[{address}]/").lookups == []


@pytest.mark.parametrize("address", FORBIDDEN_IPV4 + FORBIDDEN_IPV6)
def test_name_that_resolves_to_a_non_public_address_is_refused(address: str) -> None:
    assert assert_refused("http://inside.test/", inside_test=[[address]]).lookups == ["inside.test"]


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "::1", "169.254.169.254", "fe80::1%eth0", "2606:4700::1%eth0", "junk", ""],
)
def test_one_forbidden_address_among_public_ones_refuses_the_name(address: str) -> None:
    assert_refused("http://mixed.test/", mixed_test=[["93.184.216.34", address]])


def test_a_name_without_an_address_is_refused() -> None:
    assert_refused("http://empty.test/", empty_test=[[]])


@pytest.mark.parametrize("host", NUMERIC_HOSTS)
def test_numeric_host_in_another_spelling_is_refused_without_lookup(host: str) -> None:
    assert assert_refused(f"http://{host}/").lookups == []


@pytest.mark.parametrize("url", FORBIDDEN_URLS)
def test_invalid_url_is_refused_without_lookup(url: str) -> None:
    assert assert_refused(url).lookups == []


def test_at_least_two_hundred_addresses_and_urls_are_tested() -> None:
    assert len({*FORBIDDEN_IPV4, *FORBIDDEN_IPV6, *NUMERIC_HOSTS, *FORBIDDEN_URLS}) >= 200


def test_connection_uses_the_checked_address() -> None:
    resolver = FakeResolver(turns_test=[["93.184.216.34"], ["127.0.0.1"]])
    http, connector, _ = recording_client(resolver=resolver)
    with pytest.raises(Unavailable):
        run(http.request("GET", "http://turns.test/", None, key="k"))
    assert connector.connections == [("93.184.216.34", 80)]
    assert resolver.lookups == ["turns.test"]


def test_name_that_becomes_forbidden_at_the_next_lookup_is_refused() -> None:
    http, connector, _ = recording_client(
        resolver=FakeResolver(turns_test=[["93.184.216.34"], ["127.0.0.1"]])
    )
    with pytest.raises(Unavailable):
        run(http.request("GET", "http://turns.test/", None, key="k"))
    with pytest.raises(ForbiddenAddress):
        run(http.request("GET", "http://turns.test/", None, key="k"))
    assert connector.connections == [("93.184.216.34", 80)]


def test_addresses_of_a_name_are_tried_in_order_up_to_a_limit() -> None:
    many = [f"93.184.216.{n}" for n in range(10)]
    http, connector, resolver = recording_client(resolver=FakeResolver(many_test=[many]))
    with pytest.raises(Unavailable):
        run(http.request("GET", "https://many.test/", None, key="k"))
    assert connector.connections == [(address, 443) for address in many[:4]]
    assert resolver.lookups == ["many.test"]


@given(st.integers(0, 2**32 - 1))
def test_public_ipv4_address_is_global_in_the_registry(number: int) -> None:
    address = ipaddress.IPv4Address(number)
    assert not is_public(address) or (address.is_global and not address.is_multicast)


@given(st.integers(0, 2**128 - 1) | st.integers(0x2000 << 112, (0x4000 << 112) - 1))
def test_public_ipv6_address_is_global_and_embeds_no_ipv4(number: int) -> None:
    address = ipaddress.IPv6Address(number)
    embedded = (address.ipv4_mapped, address.sixtofour, address.teredo)
    assert not is_public(address) or (address.is_global and embedded == (None, None, None))


@given(st.integers(0, 2**32 - 1), st.sampled_from(["{:d}", "{:#x}", "0{:o}", "0{:011o}", "{:#X}"]))
def test_number_in_any_base_is_refused_as_host(number: int, spelling: str) -> None:
    with pytest.raises(ForbiddenAddress):
        AddressGuard(Reach(ports=())).admit("http", spelling.format(number), None)


@given(
    st.lists(st.integers(0, 255), min_size=4, max_size=4),
    st.lists(st.sampled_from(["{:#x}", "0{:o}", "{:#04X}", "00{:d}"]), min_size=4, max_size=4),
    st.integers(1, 4),
)
def test_dotted_number_in_another_base_is_refused_as_host(
    parts: list[int], spellings: list[str], kept: int
) -> None:
    host = ".".join(how.format(part) for how, part in zip(spellings, parts, strict=True))
    shorter = ".".join(host.split(".")[:kept])
    for wrong in (host, shorter, host + "."):
        with pytest.raises(ForbiddenAddress):
            AddressGuard(Reach(ports=())).admit("http", wrong, None)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.216.34", "1.1.1.1", "172.32.0.1", "11.0.0.1"]
)
def test_public_ipv4_addresses_pass(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["2606:4700::1111", "2a00:1450:4001::200e", "2001:4860::8888"])
def test_public_ipv6_addresses_pass(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


def test_allowed_network_does_not_allow_other_networks() -> None:
    guard = AddressGuard(Reach(cidrs=("10.1.0.0/16",)))
    assert guard.addresses("a.test", 80, ["10.1.2.3"]) == ["10.1.2.3"]
    for other in ("10.2.0.1", "127.0.0.1", "::ffff:10.1.2.3"):
        with pytest.raises(ForbiddenAddress):
            guard.addresses("a.test", 80, [other])


@pytest.mark.parametrize(
    ("reach", "url", "asked"),
    [
        (Reach(), "http://93.184.216.34/", ("93.184.216.34", 80)),
        (Reach(), "https://[2606:4700::1111]/", ("2606:4700::1111", 443)),
        (Reach(), "http://public.test./", ("93.184.216.34", 80)),
        (Reach(), "HTTPS://PUBLIC.test/", ("93.184.216.34", 443)),
        (Reach(cidrs=("10.0.0.0/8",)), "http://10.1.2.3/", ("10.1.2.3", 80)),
        (Reach(cidrs=("10.0.0.0/8",)), "http://inside.test/", ("10.0.0.9", 80)),
        (Reach(cidrs=("127.0.0.1/32",), ports=(8080,)), "http://127.0.0.1:8080/", ("127.0.0.1", 8080)),
        (Reach(cidrs=("fd00::/8",)), "http://[fd00::7]/", ("fd00::7", 80)),
        (Reach(cidrs=("::1/128",), ports=()), "http://[::1]:9/", ("::1", 9)),
        (Reach(hosts=("*.test",)), "https://a.b.test/", ("93.184.216.34", 443)),
        (Reach(hosts=("93.184.216.34",)), "http://93.184.216.34/", ("93.184.216.34", 80)),
        (Reach(ports=(8443,)), "https://public.test:8443/", ("93.184.216.34", 8443)),
    ],
)  # fmt: skip
def test_allowed_address_is_connected_as_resolved(
    reach: Reach, url: str, asked: tuple[str, int]
) -> None:
    http, connector, _ = recording_client(reach, FakeResolver(inside_test=[["10.0.0.9"]]))
    with pytest.raises(Unavailable):
        run(http.request("GET", url, None, key="k"))
    assert connector.connections == [asked]


@pytest.mark.parametrize(
    ("reach", "url"),
    [
        (Reach(cidrs=("10.0.0.0/8",)), "http://11.0.0.1:81/"),
        (Reach(cidrs=("10.0.0.0/8",)), "http://10.1.2.3:8080/"),
        (Reach(cidrs=("10.0.0.0/8",)), "http://[::ffff:10.1.2.3]/"),
        (Reach(cidrs=("10.0.0.0/8",)), "http://0xa.1/"),
        (Reach(cidrs=("10.0.0.0/8",)), "http://167772161/"),
        (Reach(cidrs=("127.0.0.1/32",)), "http://127.0.0.2/"),
        (Reach(cidrs=("fd00::/8",)), "http://[fe80::1]/"),
        (Reach(hosts=("api.test",)), "http://api.test.evil.test/"),
        (Reach(hosts=("api.test",)), "http://evil.test/api.test"),
        (Reach(hosts=("api.test",)), "http://api.test@evil.test/"),
        (Reach(hosts=("*.api.test",)), "http://evilapi.test/"),
        (Reach(schemes=("https",)), "http://public.test/"),
    ],
)
def test_allowed_reach_does_not_allow_similar_urls(reach: Reach, url: str) -> None:
    http, connector, _ = recording_client(reach)
    with pytest.raises(ForbiddenAddress):
        run(http.request("GET", url, None, key="k"))
    assert connector.connections == []


def test_allowed_hosts_refuse_all_other_hosts() -> None:
    guard = AddressGuard(Reach(hosts=("api.test", "*.inside.test")))
    for host in ("api.test", "API.test.", "a.inside.test", "a.b.inside.test"):
        guard.admit("https", host, None)
    for host in ("inside.test", "xapi.test", "api.test.evil.test", "xinside.test", "93.184.216.34"):
        with pytest.raises(ForbiddenAddress):
            guard.admit("https", host, None)


def test_allowed_host_does_not_allow_a_forbidden_address() -> None:
    with pytest.raises(ForbiddenAddress):
        AddressGuard(Reach(hosts=("api.test",))).addresses("api.test", 443, ["127.0.0.1"])


def test_default_ports_are_http_and_https_only() -> None:
    with pytest.raises(ForbiddenAddress):
        AddressGuard(Reach()).admit("http", "api.test", 8080)
    AddressGuard(Reach(ports=(8080,))).admit("http", "api.test", 8080)
    AddressGuard(Reach(ports=())).admit("http", "api.test", 9999)


def test_reach_is_configured_from_the_environment() -> None:
    env = {
        "HOLDFAST_HTTP_HOSTS": "api.test, *.b.test",
        "HOLDFAST_HTTP_PORTS": "80,8080",
        "HOLDFAST_HTTP_CIDRS": "127.0.0.0/8",
    }
    assert Reach.from_env(env) == Reach(
        hosts=("api.test", "*.b.test"), ports=(80, 8080), cidrs=("127.0.0.0/8",)
    )
    assert Reach.from_env({}) == Reach()


@pytest.mark.parametrize("reach", [Reach(cidrs=("127.0.0.1/8",)), Reach(schemes=("file",))])
def test_invalid_reach_is_refused_at_construction(reach: Reach) -> None:
    with pytest.raises(Invalid):
        AddressGuard(reach)
