"""Two machines: `holdfast up --http` with TLS and tokens on one, a client and a worker that use curl on the other.

Machines are network namespaces; see `tests.chaos.network_namespaces`.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.api_server.served_rig import token_lines, token_of
from tests.chaos.network_namespaces import Machine, Switch
from tests.process.watch import assert_no_client_left, until
from tests.processes import ROOT, Proc, require_programs

APP = """
import holdfast as hf

@hf.task(queue="shell")
def double(n: int) -> int:
    raise AssertionError("only the remote worker runs it")

app = hf.App("shop", tasks=[double])
"""
PORT = 8787
RUN_S = 60.0

pytestmark = [pytest.mark.deep, pytest.mark.timeout(180)]


class TwoMachines:
    """The machine of the server with its certificate and tokens, and the machine of its clients."""

    def __init__(self, switch: Switch, directory: Path) -> None:
        self.directory = directory
        self.server, self.other = switch.machine("server"), switch.machine("other")
        self.url = f"https://{self.server.address}:{PORT}"
        self.authority = trustme.CA()
        self.authority.cert_pem.write_to_path(directory / "ca.pem")
        (directory / "shop.py").write_text(APP, encoding="utf-8")
        tokens = token_lines(client="submit,read", worker="work")
        (directory / "tokens").write_text(tokens, encoding="utf-8")
        (directory / "tokens").chmod(0o600)
        self.write_certificate()

    def write_certificate(self, **validity: datetime.datetime) -> None:
        leaf = self.authority.issue_cert(self.server.address, **validity)
        path = self.directory / "new"
        path.write_bytes(leaf.private_key_and_cert_chain_pem.bytes())
        path.chmod(0o600)
        os.replace(path, self.directory / "server.pem")

    def start(self) -> Proc:
        options = ["--role", "timer", "--worker", "one", "--store", "data", "--http"]
        options += [f"{self.server.address}:{PORT}", "--http-cert", "server.pem"]
        command = [sys.executable, "-m", "holdfast.cli", "up", "shop:app", *options]
        return Proc.spawn(
            self.server.command([*command, "--http-token-file", "tokens"]),
            ready="ready one",
            cwd=self.directory,
        )

    def start_worker(self) -> Proc:
        jobs = self.directory / "jobs"
        jobs.mkdir()
        (jobs / "double").write_text(
            "#!/bin/sh\nread task\necho $(($(echo \"$task\" | jq '.args[0]') * 2))\n",
            encoding="utf-8",
        )
        (jobs / "double").chmod(0o755)
        script = str(ROOT / "examples" / "shell-worker" / "worker.sh")
        return Proc.spawn(
            self.other.command(["sh", script, str(jobs)]),
            ready=None,
            cwd=self.directory,
            env={
                "HOLDFAST_URL": self.url,
                "HOLDFAST_TOKEN": token_of("worker"),
                "CURL_CA_BUNDLE": str(self.directory / "ca.pem"),
            },
        )

    def curl(self, path: str, *options: str, token: str = "") -> subprocess.CompletedProcess[str]:
        """Send a request from the other machine."""
        command = ["curl", "--silent", "--show-error", "--cacert", "ca.pem", *options]
        if token:
            command += ["--header", f"Authorization: Bearer {token_of(token)}"]
        return subprocess.run(
            self.other.command([*command, self.url + path]),
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=RUN_S,
        )

    def post(self, path: str, document: Any, token: str = "") -> Any:
        done = self.curl(path, "--json", json.dumps(document), token=token)
        assert (done.returncode, done.stderr) == (0, "")
        assert "\n" not in done.stdout
        return json.loads(done.stdout)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[TwoMachines]:
    require_programs("ip", "curl", "jq")
    with Switch() as switch:
        yield TwoMachines(switch, tmp_path)
    assert_no_client_left(tmp_path / "data")


def test_client_and_worker_on_another_machine_use_tls_and_tokens(machines: TwoMachines) -> None:
    task = {"name": "double", "args": [21]}
    with machines.start() as server, machines.start_worker() as worker:
        id = machines.post("/v1/tasks", task, "client")["id"]
        shown = machines.curl(f"/v1/tasks/{id}?wait_s=30", token="client")
        assert json.loads(shown.stdout)["result"] == 42
        worker.terminate()
        assert worker.wait() == 0
        # Each refusal is one line that names its cause.
        refused = machines.post("/v1/tasks", task, "worker")
        assert (refused["status"], refused["code"]) == (403, "scope")
        assert "missing='submit'" in refused["detail"]
        refused = machines.post("/v1/tasks", task)
        assert (refused["status"], refused["code"]) == (401, "unauthorized")
        assert "missing" in refused["detail"]
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=1)
        machines.write_certificate(not_before=now - 2 * day, not_after=now - day)
        error = until(lambda: machines.curl("/healthz").stderr, "the server uses the certificate")
        # curl explains its first line in further ones.
        assert error.splitlines()[0].endswith("certificate has expired")
        machines.write_certificate()
        until(lambda: machines.curl("/healthz").returncode == 0, "a valid certificate")
        server.terminate()
        assert server.wait() == 0
        assert server.errors == []


def test_up_on_a_network_address_without_a_token_is_one_line(machines: TwoMachines) -> None:
    (machines.directory / "tokens").write_text("", encoding="utf-8")
    refused = _run_up(machines.server, machines.directory)
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert refused.stderr.startswith("holdfast: ")


def _run_up(machine: Machine, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast.cli", "up", "shop:app", "--store", "data", "--http"]
    command += [f"{machine.address}:{PORT}", "--http-token-file", "tokens"]
    return subprocess.run(
        machine.command(command), cwd=directory, capture_output=True, text=True, timeout=RUN_S
    )
