"""The addresses of the ledger service (bind, advertised host), and TLS on its connections."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from msgspec.structs import replace

from holdfast.errors import Invalid
from holdfast.spark import Stage, Tls, ledger_protocol, tls
from holdfast.spark.errors import NotAStage
from holdfast.spark.ledger_client import LedgerClient, LedgerUnreachable, ServiceLost
from holdfast.spark.service import ServiceConfig
from holdfast.spark.unauthenticated import UNAUTHENTICATED_MAX
from tests.ledger_service.service_rig import (
    RawConnection,
    running_service,
    service_config,
    service_thread,
)

NAME = "ledger.example"


@dataclass
class TlsFiles:
    """A certificate, its key and its certificate authority, as files."""

    path: Path
    tls: Tls

    @classmethod
    def issue(cls, path: Path, *names: str) -> TlsFiles:
        path.mkdir()
        authority = trustme.CA()
        made = authority.issue_cert(*names)
        authority.cert_pem.write_to_path(str(path / "ca.crt"))
        made.cert_chain_pems[0].write_to_path(str(path / "ledger.crt"))
        made.private_key_pem.write_to_path(str(path / "ledger.key"))
        return cls(path, Tls(path / "ledger.crt", path / "ledger.key", path / "ca.crt"))

    def service_config(self, store: Path, **fields: str) -> ServiceConfig:
        return replace(
            service_config(str(store)),
            host=NAME,
            bind="127.0.0.1",
            cert=str(self.tls.cert),
            key=str(self.tls.key),
            ca=tls.read_authority(self.tls),
            **fields,
        )


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return TlsFiles.issue(tmp_path / "files", NAME)


def test_service_listens_on_bind_and_advertises_ledger_host(
    tmp_path: Path,
) -> None:
    made = replace(service_config(str(tmp_path / "data")), host=NAME, bind="0.0.0.0")
    with service_thread(config=made) as service:
        assert service.put_input(5) == 5
        assert service.supervisor.address.host == NAME
        assert service.supervisor.local_address.host == "127.0.0.1"


def test_tls_client_verifies_the_advertised_name_and_needs_the_token(
    tmp_path: Path, files: TlsFiles
) -> None:
    with service_thread(config=files.service_config(tmp_path / "data")) as service:
        near = service.supervisor.local_address
        with LedgerClient(near, "child") as client:
            assert client.connect().run_id == service.run_id
        stranger = LedgerClient(replace(near, token="other"), "child")
        with stranger, pytest.raises(Invalid, match="not of this run"):
            stranger.connect()


def test_plain_connection_to_a_tls_service_fails(tmp_path: Path, files: TlsFiles) -> None:
    made = files.service_config(tmp_path / "data")
    with (
        service_thread(config=made) as service,
        pytest.raises((OSError, EOFError)),
    ):
        RawConnection(service.supervisor.local_address)


@pytest.mark.parametrize("what", ["ca", "name"])
def test_unexpected_tls_certificate_is_refused_immediately(
    tmp_path: Path, files: TlsFiles, what: str
) -> None:
    with service_thread(config=files.service_config(tmp_path / "data")) as service:
        near = service.supervisor.local_address
        if what == "ca":
            near = replace(
                near, ca=tls.read_authority(TlsFiles.issue(tmp_path / "other", NAME).tls)
            )
        else:
            near = replace(near, name="another.example")
        client = LedgerClient(near, "child", reconnect_s=600)
        with client, pytest.raises(tls.LedgerUntrusted) as refused:
            client.connect()
    assert "\n" not in str(refused.value)
    assert "ca of tls=" in str(refused.value.hint)


def test_driver_with_the_wrong_tls_authority_raises_ledger_untrusted(
    tmp_path: Path, files: TlsFiles
) -> None:
    other = tls.read_authority(TlsFiles.issue(tmp_path / "other", NAME).tls)
    made = replace(files.service_config(tmp_path / "data"), ca=other)
    with (
        running_service(tmp_path / "data", config=made) as service,
        pytest.raises(tls.LedgerUntrusted),
    ):
        service.supervisor.request(ledger_protocol.GetRunStatus())


def test_silent_connections_to_a_tls_service_are_closed(tmp_path: Path, files: TlsFiles) -> None:
    with service_thread(config=files.service_config(tmp_path / "data")) as service:
        near = service.supervisor.local_address
        silent = [
            socket.create_connection((near.host, near.port), timeout=20)
            for _ in range(UNAUTHENTICATED_MAX + 1)
        ]
        try:
            assert silent[0].recv(1) == b""
            with LedgerClient(near, "child") as client:
                assert client.connect().run_id == service.run_id
        finally:
            for line in silent:
                line.close()


def test_tls_error_names_unusable_files(tmp_path: Path, files: TlsFiles) -> None:
    with pytest.raises(Invalid) as refused:
        tls.read_authority(replace(files.tls, ca=tmp_path / "nowhere.crt"))
    assert "nowhere.crt" in str(refused.value)
    made = replace(files.service_config(tmp_path / "data"), key=str(tmp_path / "nowhere.key"))
    with pytest.raises(Invalid) as refused, running_service(tmp_path / "data", config=made):
        pass
    assert "nowhere.key" in str(refused.value)


def test_bind_error_names_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        made = replace(service_config(str(tmp_path / "data")), bind="127.0.0.1", port=port)
        with pytest.raises(Invalid) as refused, running_service(tmp_path / "data", config=made):
            pass
    assert refused.value.fields["what"] == "bind"
    assert refused.value.fields["port"] == port


def test_client_distinguishes_unreachable_from_lost_service() -> None:
    with service_thread(5) as service:
        address = service.supervisor.address
        with LedgerClient(address, "child", reconnect_s=0) as client:
            client.connect()
            service.supervisor.stop()
            with pytest.raises(ServiceLost) as lost:
                client.connect()
        client = LedgerClient(address, "child", reconnect_s=0)
        with client, pytest.raises(LedgerUnreachable) as unreachable:
            client.connect()
    assert type(lost.value) is ServiceLost
    assert "resumes" in str(lost.value.hint)
    assert unreachable.value.fields["port"] == address.port
    assert unreachable.value.fields["executor"] == socket.gethostname()
    assert "resumes" not in str(unreachable.value.hint)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_wildcard_ledger_host_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(NotAStage, match="bind="):
        Stage(
            "job", str, key="id", schema="y bigint", store=str(tmp_path / "data"), ledger_host=host
        )
