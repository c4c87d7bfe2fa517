"""Where the ledger service listens, what executors are told of it, and TLS on its lines."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from msgspec.structs import replace
from pyspark.sql import SparkSession

from holdfast.errors import Invalid
from holdfast.spark import Tls, tls, wire
from holdfast.spark.client import Client, LedgerUnreachable, ServiceLost
from holdfast.spark.errors import NotAStage
from holdfast.spark.service import Charge
from holdfast.spark.strangers import STRANGERS_MAX
from tests.spark.service_rig import Line, charge, serving
from tests.spark.test_stage import Place, double, tuples

NAME = "ledger.example"


@dataclass
class Files:
    """A certificate for a name, its key and its authority."""

    path: Path
    tls: Tls

    @classmethod
    def of(cls, path: Path, *names: str) -> Files:
        path.mkdir()
        authority = trustme.CA()
        made = authority.issue_cert(*names)
        authority.cert_pem.write_to_path(str(path / "ca.crt"))
        made.cert_chain_pems[0].write_to_path(str(path / "ledger.crt"))
        made.private_key_pem.write_to_path(str(path / "ledger.key"))
        return cls(path, Tls(path / "ledger.crt", path / "ledger.key", path / "ca.crt"))

    def charge(self, store: Path, **fields: str) -> Charge:
        return replace(
            charge(str(store)),
            host=NAME,
            bind="127.0.0.1",
            cert=str(self.tls.cert),
            key=str(self.tls.key),
            ca=tls.authority(self.tls),
            **fields,
        )


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files.of(tmp_path / "files", NAME)


def test_a_service_listens_where_bind_says_and_is_advertised_under_another_name(
    tmp_path: Path,
) -> None:
    made = replace(charge(str(tmp_path / "data")), host=NAME, bind="0.0.0.0")
    with serving(tmp_path / "data", made=made) as service:
        assert service.fill(5) == 5
        assert service.keeper.address.host == NAME
        assert service.keeper.own_address.host == "127.0.0.1"


def test_a_line_with_tls_is_made_to_the_advertised_name_and_asks_for_the_token(
    tmp_path: Path, files: Files
) -> None:
    with serving(tmp_path / "data", made=files.charge(tmp_path / "data")) as service:
        near = service.keeper.own_address
        with Client(near, "child") as client:
            assert client.connect().run_id == service.run_id
        stranger = Client(replace(near, token="other"), "child")
        with stranger, pytest.raises(Invalid, match="not of this run"):
            stranger.connect()


def test_a_line_without_tls_gets_nothing_from_a_service_with_it(
    tmp_path: Path, files: Files
) -> None:
    made = files.charge(tmp_path / "data")
    with serving(tmp_path / "data", made=made) as service, pytest.raises((OSError, EOFError)):
        Line(service.keeper.own_address)


@pytest.mark.parametrize("what", ["ca", "name"])
def test_a_certificate_that_is_not_the_expected_one_is_refused_at_once(
    tmp_path: Path, files: Files, what: str
) -> None:
    with serving(tmp_path / "data", made=files.charge(tmp_path / "data")) as service:
        near = service.keeper.own_address
        if what == "ca":
            near = replace(near, ca=tls.authority(Files.of(tmp_path / "other", NAME).tls))
        else:
            near = replace(near, name="another.example")
        client = Client(near, "child", patience_s=600)
        with client, pytest.raises(tls.LedgerUntrusted) as refused:
            client.connect()
    assert "\n" not in str(refused.value)
    assert "ca of tls=" in str(refused.value.hint)


def test_a_driver_with_the_wrong_authority_says_so(tmp_path: Path, files: Files) -> None:
    other = tls.authority(Files.of(tmp_path / "other", NAME).tls)
    made = replace(files.charge(tmp_path / "data"), ca=other)
    with serving(tmp_path / "data", made=made) as service, pytest.raises(tls.LedgerUntrusted):
        service.keeper.ask(wire.Status())


def test_silent_connections_to_a_service_with_tls_are_ended(tmp_path: Path, files: Files) -> None:
    with serving(tmp_path / "data", made=files.charge(tmp_path / "data")) as service:
        near = service.keeper.own_address
        silent = [
            socket.create_connection((near.host, near.port), timeout=20)
            for _ in range(STRANGERS_MAX + 1)
        ]
        try:
            assert silent[0].recv(1) == b""
            with Client(near, "child") as client:
                assert client.connect().run_id == service.run_id
        finally:
            for line in silent:
                line.close()


def test_files_that_cannot_be_used_are_named(tmp_path: Path, files: Files) -> None:
    with pytest.raises(Invalid) as refused:
        tls.authority(replace(files.tls, ca=tmp_path / "nowhere.crt"))
    assert "nowhere.crt" in str(refused.value)
    made = replace(files.charge(tmp_path / "data"), key=str(tmp_path / "nowhere.key"))
    with pytest.raises(Invalid) as refused, serving(tmp_path / "data", made=made):
        pass
    assert "nowhere.key" in str(refused.value)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        made = replace(charge(str(tmp_path / "data")), bind="127.0.0.1", port=port)
        with pytest.raises(Invalid) as refused, serving(tmp_path / "data", made=made):
            pass
    assert refused.value.fields["what"] == "bind"
    assert refused.value.fields["port"] == port


def test_a_service_that_was_never_reached_is_not_one_to_wait_for(tmp_path: Path) -> None:
    with serving(tmp_path / "data", 5) as service:
        address = service.keeper.address
        with Client(address, "child", patience_s=0) as client:
            client.connect()
            service.keeper.leave()
            with pytest.raises(ServiceLost) as lost:
                client.connect()
        client = Client(address, "child", patience_s=0)
        with client, pytest.raises(LedgerUnreachable) as unreachable:
            client.connect()
    assert type(lost.value) is ServiceLost
    assert "resumes" in str(lost.value.hint)
    assert unreachable.value.fields["port"] == address.port
    assert unreachable.value.fields["executor"] == socket.gethostname()
    assert "resumes" not in str(unreachable.value.hint)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_means_every_interface_is_not_advertised(tmp_path: Path, host: str) -> None:
    with pytest.raises(NotAStage, match="bind="):
        Place(tmp_path).stage(double, ledger_host=host)


def test_a_stage_runs_with_tls(spark: SparkSession, tmp_path: Path) -> None:
    files = Files.of(tmp_path / "files", "127.0.0.1")
    place = Place(tmp_path)
    stage = place.stage(double, tls=files.tls, bind="127.0.0.1")
    with stage.run(spark.range(20), output=place.output) as run:
        assert tuples(run.output()) == [(n, 2 * n) for n in range(20)]
