"""The address guard: the allow-list of outgoing requests (SSRF protection). Pure: it checks names,
ports and addresses, and makes no connection.

    admit       checks scheme, host and port of a URL, before any lookup
    addresses   checks the resolved addresses: the connection may use exactly these

- Only public addresses pass, unless a network of the operator's `cidrs` contains them. IPv6 is
  checked against an allow-list (2000::/3), so mapped, translated and local forms fail without an
  extra rule.
- One forbidden address refuses the whole name: a name with public and private addresses is an
  attack or a mistake.
- A numeric host in any other notation than dotted decimal is refused without a lookup, because
  resolvers interpret `0177.1` and `2130706433` differently.

One surprising entry: 168.63.129.16 is a public address, and the Azure host agent inside every Azure
machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

import msgspec

from holdfast.adapters.errors import ForbiddenAddress
from holdfast.errors import Invalid

Address = IPv4Address | IPv6Address

DEFAULT_PORTS = {"http": 80, "https": 443}


class Reach(msgspec.Struct, frozen=True):
    """The allow-list of an operator. `cidrs` adds networks. `hosts`, if not empty, restricts
    names."""

    # Names, with `*.example.org` for all subdomains. Empty: any name.
    hosts: tuple[str, ...] = ()
    # Empty: any port.
    ports: tuple[int, ...] = (80, 443)
    # Networks that are allowed although they are not public: `127.0.0.0/8`, `::1/128`.
    cidrs: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ("http", "https")
    # A file with additional certificate authorities.
    ca_file: str | None = None

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Reach:
        """Read `HOLDFAST_HTTP_HOSTS`, `_PORTS`, `_CIDRS` (comma-separated lists) and `_CA_FILE` (a
        path)."""

        def listed(name: str) -> tuple[str, ...]:
            parts = env.get(f"HOLDFAST_HTTP_{name}", "").split(",")
            return tuple(part.strip() for part in parts if part.strip())

        ports = listed("PORTS")
        if not all(port.isdecimal() for port in ports):
            raise Invalid(what="HOLDFAST_HTTP_PORTS", found=ports, expected="numbers")
        return cls(
            hosts=listed("HOSTS"),
            ports=tuple(map(int, ports)) or cls().ports,
            cidrs=listed("CIDRS"),
            ca_file=env.get("HOLDFAST_HTTP_CA_FILE") or None,
        )


class AddressGuard:
    """The checks of one allow-list."""

    def __init__(self, reach: Reach) -> None:
        self.reach = reach
        try:
            self._allowed_networks = tuple(ip_network(cidr) for cidr in reach.cidrs)
        except ValueError as error:
            raise Invalid(what="cidrs", why=str(error)) from None
        if not set(reach.schemes) <= DEFAULT_PORTS.keys():
            raise Invalid(what="schemes", found=reach.schemes, expected=sorted(DEFAULT_PORTS))
        self._hosts = tuple(host.lower().rstrip(".") for host in reach.hosts)

    def admit(self, scheme: str, host: str, port: int | None, *, userinfo: bool = False) -> None:
        """Check scheme, host and port of a URL. Call it for every redirect."""
        if scheme not in self.reach.schemes:
            raise ForbiddenAddress(scheme=scheme, expected=self.reach.schemes)
        if userinfo:
            raise ForbiddenAddress(host=host, why="the URL contains a user name or a password")
        self.admit_host(host, DEFAULT_PORTS[scheme] if port is None else port)

    def admit_host(self, host: str, port: int) -> None:
        self._check_port(host, port)
        self._check_name(host)

    def addresses(self, host: str, port: int, resolved: Sequence[str]) -> list[str]:
        """Check resolved addresses and return them in order. They are not resolved again."""
        self.admit_host(host, port)
        if not resolved:
            raise ForbiddenAddress(host=host, why="the host name resolves to no address")
        return [self._check_address(host, text) for text in dict.fromkeys(resolved)]

    def _check_port(self, host: str, port: int) -> None:
        if self.reach.ports and port not in self.reach.ports:
            raise ForbiddenAddress(host=host, port=port, expected=self.reach.ports)
        if not 0 < port < 65536:
            raise ForbiddenAddress(host=host, port=port, why="not a port number")

    def _check_name(self, host: str) -> None:
        literal = parse_literal(host)
        if literal is None and not _NAME.fullmatch(host):
            raise ForbiddenAddress(host=host[:100], why="not a valid host name or address")
        if literal is None and _NUMERIC.fullmatch(host.rstrip(".").rpartition(".")[2]):
            raise ForbiddenAddress(
                host=host, why="a numeric host that is not in dotted decimal notation"
            )
        name = host.lower().rstrip(".")
        if self._hosts and not any(_matches(name, pattern) for pattern in self._hosts):
            raise ForbiddenAddress(host=host, why="not among the allowed hosts")

    def _check_address(self, host: str, text: str) -> str:
        try:
            address = ip_address(text)
        except ValueError:
            raise ForbiddenAddress(host=host, address=text[:100], why="not an address") from None
        if getattr(address, "scope_id", None):
            raise ForbiddenAddress(host=host, address=text, why="the address has a zone id")
        if not any(address in network for network in self._allowed_networks) and not is_public(
            address
        ):
            raise ForbiddenAddress(host=host, address=text, why="not a public address")
        return str(address)


def parse_literal(host: str) -> Address | None:
    """Parse a host that is an IP address in canonical notation; None for names."""
    try:
        return ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _V4_FORBIDDEN)
    if address not in _V6_PUBLIC or any(address in network for network in _V6_FORBIDDEN):
        return False
    # ISATAP: the last four bytes are the IPv4 address of a tunnel endpoint.
    return (int(address) >> 32) & 0xFFFF_FFFF not in (0x0000_5EFE, 0x0200_5EFE)


def _matches(name: str, pattern: str) -> bool:
    if pattern.startswith("*."):
        return name.endswith(pattern[1:]) and name != pattern[1:]
    return name == pattern


_NAME = re.compile(r"(?=.{1,254}\Z)[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
# Decimal, octal (with a leading 0 or 0o) or hexadecimal: forms that some resolvers accept as a
# number.
_NUMERIC = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*|0[oO][0-7]*")

_V4_FORBIDDEN = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",          # this host
        "10.0.0.0/8",         # private
        "100.64.0.0/10",      # carrier-grade NAT; 100.100.100.200 is Alibaba's metadata
        "127.0.0.0/8",        # loopback
        "168.63.129.16/32",   # Azure's host agent
        "169.254.0.0/16",     # link-local; 169.254.169.254 is metadata nearly everywhere
        "172.16.0.0/12",      # private
        "192.0.0.0/24",       # protocol assignments; 192.0.0.192 is Oracle's metadata
        "192.0.2.0/24",       # documentation
        "192.31.196.0/24",    # AS112
        "192.52.193.0/24",    # AMT
        "192.88.99.0/24",     # 6to4 relays
        "192.168.0.0/16",     # private
        "192.175.48.0/24",    # AS112
        "198.18.0.0/15",      # benchmarks
        "198.51.100.0/24",    # documentation
        "203.0.113.0/24",     # documentation
        "224.0.0.0/4",        # multicast
        "240.0.0.0/4",        # reserved, and broadcast
    )
)  # fmt: skip
_V6_PUBLIC = IPv6Network("2000::/3")
_V6_FORBIDDEN = tuple(
    IPv6Network(text)
    for text in (
        "2001::/23",          # Teredo, ORCHID and other assignments
        "2001:db8::/32",      # documentation
        "2002::/16",          # 6to4: holds an IPv4 address
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",          # documentation
    )
)  # fmt: skip
