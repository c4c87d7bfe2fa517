"""The starting points of the procedures: a state that needs the procedure, and whether it still does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import trustme

from holdfast.cli import main
from tests.process.watch import until, writers_of
from tests.processes import require_programs
from tests.runbooks.alert_faults import Exists, Fault
from tests.runbooks.deploy_load import two_workers_under_load
from tests.runbooks.fault_scene import FaultScene
from tests.runbooks.postgres_login import worker_with_a_former_password
from tests.runbooks.shelf_app import Shelf, Stocked, app

DAMAGED_BYTES = 8192


def stocked_store(scene: FaultScene) -> None:
    """A store with a world whose count is 1, without processes."""
    with app.open(scene.store, roles=()) as rt:
        shelf = rt.world(Shelf, "a")
        shelf.send(Stocked(1))
        worker = scene.up("shop:app")
        shelf.wait_for(lambda state: state.count == 1)
        scene.stop(worker)
    scene.env["STORE"] = scene.store
    scene.env["BACKUP"] = str(scene.directory / "backup")


def store_without_a_backup(scene: FaultScene) -> Exists:
    stocked_store(scene)
    backup = Path(scene.env["BACKUP"])
    scene.env["RESTORED"] = str(scene.directory / "restored")
    return lambda: not (backup / "data.mdb").exists()


def damaged_store(scene: FaultScene) -> Exists:
    stocked_store(scene)
    assert main(["backup", scene.env["BACKUP"]]) == 0
    until(lambda: not writers_of(Path(scene.store)), "the exit of the writer")
    (Path(scene.store) / "data.mdb").write_bytes(b"\xff" * DAMAGED_BYTES)
    return lambda: main(["store", "info"]) != 0


def store_on_a_former_machine(scene: FaultScene) -> Exists:
    stocked_store(scene)
    scene.env["TARGET"] = str(scene.directory / "target")
    return lambda: main(["store", "info", "--store", scene.env["TARGET"]]) != 0


def server_with_a_former_certificate(scene: FaultScene) -> Exists:
    require_programs("openssl")
    authority = trustme.CA()
    served, renewed = scene.directory / "cert.pem", scene.directory / "renewed.pem"
    for path in (served, renewed):
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(path))
    scene.env |= {"CERT": str(served), "RENEWED": str(renewed), "SERIAL": serial(renewed)}
    scene.up("shop:app", "--http", f"127.0.0.1:{scene.env['PORT']}", "--http-cert", str(served))
    return renewed.exists


def serial(path: Path) -> str:
    line = ["openssl", "x509", "-in", str(path), "-noout", "-serial"]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()


PROCEDURES: dict[str, Fault] = {
    "zero-downtime-upgrade": two_workers_under_load,
    "backup-drill": store_without_a_backup,
    "restore": damaged_store,
    "move-a-store": store_on_a_former_machine,
    "postgres-password": worker_with_a_former_password,
    "certificate-renewal": server_with_a_former_certificate,
}
