"""A build with the schema version before the pause of queues: a copy of this package with the later rules removed."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import holdfast
from tests.processes import Proc

OLDER = (0, 5)

# For each module, the patterns of the later rules and what stood there. Each pattern occurs once.
EDITS: dict[str, tuple[tuple[str, str], ...]] = {
    "store/schema.py": ((r"^SCHEMA_MINOR = .*$", f"SCHEMA_MINOR = {OLDER[1]}"),),
    "store/lmdb/protocol.py": (
        (
            r"ClientHello\(PROTOCOL, os\.getpid\(\), __version__, .*\)$",
            "ClientHello(PROTOCOL, os.getpid(), __version__)",
        ),
    ),
    "store/lmdb/writer.py": (
        (r"elif hello\.schema != schema\.SCHEMA_VERSION:", "elif False:"),
        (r"^            schema=schema\.SCHEMA_VERSION,\n", ""),
    ),
    "store/lmdb/writer_connection.py": (
        (r"if welcome\.schema != schema\.SCHEMA_VERSION:", "if False:"),
    ),
    "tasks/leases.py": (
        (r"if limits\.paused_ns:", "if False:"),
        (r" and not unit\.limits\(queue\)\.paused_ns", ""),
    ),
}

APP = """
import holdfast as hf

@hf.task
def add(a: int, b: int) -> int:
    return a + b

app = hf.App("shop", tasks=[add])
"""


def make_older_build(directory: Path) -> Path:
    """Return a directory for PYTHONPATH, with the older package and the module `mixed_app`."""
    package = directory / "older" / "holdfast"
    shutil.copytree(Path(holdfast.__file__).parent, package)
    for name, edits in EDITS.items():
        module = package / name
        text = module.read_text(encoding="utf-8")
        for pattern, former in edits:
            text, count = re.subn(pattern, former, text, flags=re.MULTILINE)
            assert count == 1, (name, pattern, count)
        module.write_text(text, encoding="utf-8")
    (package.parent / "mixed_app.py").write_text(APP, encoding="utf-8")
    return package.parent


def start_worker(path: Path, url: str) -> Proc:
    """Start the worker of a build."""
    line = [sys.executable, "-m", "holdfast.cli", "up", "mixed_app:app", "--store", url]
    return Proc.spawn(line, env={"PYTHONPATH": str(path)}, cwd=path, fresh=True)


def run_python(path: Path, code: str) -> Proc:
    """Run code on a build, and return when it has ended."""
    proc = Proc.spawn(
        [sys.executable, "-c", code],
        ready=None,
        env={"PYTHONPATH": str(path)},
        cwd=path,
        fresh=True,
    )
    proc.wait()
    return proc
