"""deploy/Dockerfile: hadolint, and its instructions executed in a new root directory as the user of the image."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.container_root import ContainerImage, build
from tests.processes import ROOT

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
TOKEN = {"HOLDFAST_TOKEN": "a-token-of-this-test"}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> ContainerImage:
    return build(DOCKERFILE, tmp_path_factory.mktemp("image", numbered=True))


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "hadolint"
    line = [program, "--failure-threshold", "style", path]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_hadolint_accepts_the_dockerfile() -> None:
    done = hadolint(DOCKERFILE)
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_rejects_a_dockerfile_with_a_mistake(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text(DOCKERFILE.read_text().replace("WORKDIR /app", "RUN cd /app"))
    assert hadolint(bad).returncode == 1


def test_image_runs_as_another_user_with_a_read_only_root(image: ContainerImage) -> None:
    with image.start(image.stage.command, TOKEN) as worker:
        assert worker.lines[0].endswith(" http://0.0.0.0:8787")
        status = Path(f"/proc/{worker.pid}/status").read_text()
        assert f"Uid:\t{image.stage.user[0]}\t" in status
        assert "CapEff:\t0000000000000000" in status
        checked = image.enter(worker, image.stage.health_check)
        assert (checked.returncode, checked.stderr) == (0, "")
        written = image.enter(worker, ["/bin/sh", "-c", "echo x > /app/written"])
        assert "Read-only file system" in written.stderr
        ready = image.enter(worker, ["holdfast", "ready", "--json"])
        assert json.loads(ready.stdout)["ready"]
        worker.terminate()
        assert worker.wait() == 0
    assert (image.host_path("/data/store/data.mdb")).stat().st_uid == image.stage.user[0]


def test_health_check_fails_without_a_server(image: ContainerImage) -> None:
    line = image.command_line(image.stage.health_check, image.stage.user)
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Connection refused" in done.stderr


def test_image_has_no_build_tools_in_its_environment(image: ContainerImage) -> None:
    packages = next(image.host_path("/opt/holdfast").glob("lib/python*/site-packages"))
    names = {path.name.partition("-")[0] for path in packages.iterdir()}
    assert "holdfast" in names
    assert names.isdisjoint({"pip", "setuptools", "hatchling", "wheel"})
    assert not image.host_path("/src").exists()


def test_worker_of_the_image_does_the_work_of_the_sample_app(image: ContainerImage) -> None:
    code = (
        "import shop; rt = shop.app.open(roles=()); order = rt.world(shop.Shipment, 'o-1'); "
        "order.send(shop.ShipmentOrdered('cup', 2)); handle = rt.submit(shop.packing_list, 'cup', 2); "
        "print(handle.result(timeout=60), order.wait_for(lambda o: o.reserved, timeout=60).reserved)"
    )
    with image.start(image.stage.command, TOKEN) as worker:
        done = image.enter(worker, ["python", "-c", code])
        assert (done.stdout, done.stderr) == ("pack 2 x cup 1\n", "")
