"""A server with small limits in another process, so that a test can read its memory: `python -m tests.api_server.attack_server`."""

from __future__ import annotations

import sys

from holdfast import store as stores
from holdfast.ops.api.universes import UniverseChoice
from holdfast.ops.http.auth import RequestGuard, parse_address
from holdfast.ops.http.limits import ConnectionLimits
from holdfast.ops.http.served_api import ServedApi
from holdfast.ops.http.server import HttpServer

BODIES_BYTES_MAX = 32 * 1024 * 1024


def main() -> None:
    address = parse_address("127.0.0.1:0")
    with stores.open("memory:") as store:
        universes = UniverseChoice(store, {}, "shop")
        with HttpServer(
            lambda server: ServedApi(server, store, universes),
            address=address,
            guard=RequestGuard(address, ""),
            limits=ConnectionLimits(bodies_bytes_max=BODIES_BYTES_MAX),
        ) as server:
            print(f"ready {server.address.port}", flush=True)
            sys.stdin.read()


if __name__ == "__main__":
    main()
