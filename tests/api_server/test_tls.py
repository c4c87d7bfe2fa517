"""TLS of the HTTP server: certificate files, their renewal, and clients that do not trust them."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import socket
import ssl
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trustme

from holdfast import store as stores
from holdfast.errors import Invalid, NotFound
from holdfast.ops.http.limits import ConnectionLimits
from holdfast.ops.http.server import HttpServer
from holdfast.ops.http.tls import CertificateFiles
from holdfast.ops.world_operations import world_create
from tests.api_server.served_rig import ServedRig, rig
from tests.process.watch import until
from tests.processes import Proc

__all__ = ["rig"]

pytestmark = pytest.mark.timeout(60)


class Certificates(NamedTuple):
    authority: trustme.CA
    certificate: Path
    key: Path

    def renew(self) -> None:
        leaf = self.authority.issue_cert("127.0.0.1")
        for path, blobs in (
            (self.key, [leaf.private_key_pem]),
            (self.certificate, leaf.cert_chain_pems),
        ):
            other = path.with_suffix(".new")
            other.write_bytes(b"".join(blob.bytes() for blob in blobs))
            os.replace(other, path)

    def client_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    made = Certificates(trustme.CA(), tmp_path / "cert.pem", tmp_path / "key.pem")
    made.renew()
    return made


def get(server: HttpServer, context: ssl.SSLContext, path: str) -> tuple[int, Any, bytes]:
    """Return status, document and the server's certificate."""
    connection = http.client.HTTPSConnection(*server.address, timeout=20, context=context)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        document = json.loads(response.read())
        assert isinstance(connection.sock, ssl.SSLSocket)
        certificate = connection.sock.getpeercert(binary_form=True)
        assert certificate is not None
        return response.status, document, certificate
    finally:
        connection.close()


def serve(
    rig: ServedRig, certificates: Certificates, limits: ConnectionLimits | None = None
) -> HttpServer:
    files = CertificateFiles(str(certificates.certificate), str(certificates.key))
    return rig.serve(tls=files, default="shop", limits=limits)


def test_server_with_a_certificate_serves_tls_only(
    rig: ServedRig, certificates: Certificates
) -> None:
    server = serve(rig, certificates)
    assert server.url.startswith("https://127.0.0.1:")
    status, document, _ = get(server, certificates.client_context(), "/v1/queues")
    assert (status, document) == (200, {"queues": []})
    raw = rig.raw(server)
    raw.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"HTTP/1.1" not in raw.read_until_closed()


def test_client_that_does_not_trust_the_certificate_fails(
    rig: ServedRig, certificates: Certificates
) -> None:
    server = serve(rig, certificates)
    with pytest.raises(ssl.SSLCertVerificationError):
        get(server, ssl.create_default_context(), "/healthz")
    assert get(server, certificates.client_context(), "/healthz")[0] == 200


def test_client_that_never_finishes_its_handshake_is_disconnected_after_head_s(
    rig: ServedRig, certificates: Certificates
) -> None:
    server = serve(rig, certificates, ConnectionLimits(head_s=0.2))
    raw = rig.raw(server)
    assert raw.read_until_closed() == b""
    assert get(server, certificates.client_context(), "/healthz")[0] == 200


def test_silent_connections_are_evicted_oldest_first_during_their_handshake(
    rig: ServedRig, certificates: Certificates
) -> None:
    server = serve(rig, certificates, ConnectionLimits(connections_max=8, rejected_max=2))
    context = certificates.client_context()
    silent = [rig.raw(server) for _ in range(20)]
    for raw in silent[:12]:
        assert raw.read_until_closed() == b""
    assert get(server, context, "/v1/queues")[0] == 200
    # The newest ones are still open.
    silent[-1].socket.settimeout(0.05)
    with pytest.raises(TimeoutError):
        silent[-1].socket.recv(1)


def test_established_connections_are_not_evicted_for_handshakes(
    rig: ServedRig, certificates: Certificates
) -> None:
    server = serve(rig, certificates, ConnectionLimits(connections_max=4, rejected_max=2))
    context = certificates.client_context()
    clients = [
        http.client.HTTPSConnection(*server.address, timeout=20, context=context) for _ in range(4)
    ]
    for client in clients:
        client.request("GET", "/healthz")
        assert client.getresponse().read()
    silent = [rig.raw(server) for _ in range(20)]
    for raw in silent[:18]:
        assert raw.read_until_closed() == b""
    for client in clients:
        client.request("GET", "/v1/queues")
        assert client.getresponse().status == 200
        client.close()


def test_stop_of_the_server_ends_unfinished_handshakes(
    rig: ServedRig, certificates: Certificates
) -> None:
    server = serve(rig, certificates)
    raw = rig.raw(server)
    assert get(server, certificates.client_context(), "/healthz")[0] == 200
    server.request_stop()
    assert raw.read_until_closed() == b""
    server.join(5)
    assert not server.running


def test_tls_server_with_few_open_files_serves_beside_silent_connections(
    certificates: Certificates, tmp_path: Path
) -> None:
    with stores.open(tmp_path / "data") as store:
        world_create(store, "bank", "Account", "ada")
    options = "--http 127.0.0.1:0 --http-cert cert.pem --http-key key.pem --store data"
    command = f"ulimit -n 128; exec {sys.executable} -m holdfast.cli serve {options}"
    with Proc.spawn(["sh", "-c", command], ready="ready", cwd=tmp_path) as proc:
        port = int(proc.lines[0].rpartition(":")[2])
        with contextlib.ExitStack() as opened:
            for _ in range(140):
                opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            for _ in range(3):
                client = http.client.HTTPSConnection(
                    "127.0.0.1", port, timeout=5, context=certificates.client_context()
                )
                client.request("GET", "/v1/worlds")
                assert client.getresponse().status == 200
                client.close()
        assert proc.errors == []


def test_renewed_certificate_applies_without_a_restart(
    rig: ServedRig, certificates: Certificates
) -> None:
    server, context = serve(rig, certificates), certificates.client_context()
    *_, former = get(server, context, "/healthz")
    certificates.renew()
    until(lambda: get(server, context, "/healthz")[2] != former, "the new certificate is served")


def test_fifo_in_place_of_a_certificate_file_keeps_the_former_certificate(
    rig: ServedRig, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    server, context = serve(rig, certificates), certificates.client_context()
    with caplog.at_level(logging.WARNING, "holdfast.http"):
        other = certificates.key.with_suffix(".new")
        os.mkfifo(other)
        os.replace(other, certificates.key)
        until(lambda: bool(caplog.records), "the warning is logged")
    assert "the former certificate stays in force" in caplog.text
    assert get(server, context, "/healthz")[0] == 200


def test_broken_renewal_keeps_the_former_certificate_and_warns(
    rig: ServedRig, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    server, context = serve(rig, certificates), certificates.client_context()
    *_, former = get(server, context, "/healthz")
    with caplog.at_level(logging.WARNING, "holdfast.http"):
        certificates.key.write_bytes(
            certificates.authority.issue_cert("127.0.0.1").private_key_pem.bytes()
        )
        until(lambda: bool(caplog.records), "the warning is logged")
    assert "the former certificate stays in force" in caplog.text
    assert get(server, context, "/healthz")[2] == former


def test_certificate_files_that_cannot_be_used_are_refused(
    certificates: Certificates, tmp_path: Path
) -> None:
    with pytest.raises(NotFound):
        CertificateFiles(str(tmp_path / "none"))
    with pytest.raises(Invalid):
        CertificateFiles(str(certificates.certificate))  # without its key
    certificates.key.write_text("no key")
    with pytest.raises(Invalid):
        CertificateFiles(str(certificates.certificate), str(certificates.key))
