"""Isolated tasks of a script: the child process must import them from the file of `__main__`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.processes import Proc

MODULES = ("holdfast.workers.tasks.process", "holdfast.app.app")

TASKS = """
import os
import sys
import holdfast as hf

@hf.task(isolation="process", attempts=1)
def where(n: int) -> list:
    return [n, os.getpid(), __name__]

app = hf.App("script", tasks=[where])
"""
MAIN = """
    rt = app.open("memory:", roles=("task",))
    n, pid, name = rt.submit(where, 5).result(60)
    print("ran", n, pid != os.getpid(), name, flush=True)
    rt.close()
"""


def run(tmp_path: Path, text: str) -> Proc:
    path = tmp_path / "program.py"
    path.write_text(text)
    process = Proc.spawn([sys.executable, str(path)], ready=None, cwd=tmp_path)
    process.wait()
    return process


def test_isolated_task_of_a_script_is_found_without_rerunning_main(tmp_path: Path) -> None:
    guarded = TASKS + 'print("imported", __name__, flush=True)\nif __name__ == "__main__":\n' + MAIN
    with run(tmp_path, guarded) as process:
        assert process.wait() == 0, process.errors
        assert [line for line in process.lines if line.startswith("ran")] == [
            "ran 5 True __holdfast_main__"
        ]
        assert sorted(line for line in process.lines if line.startswith("imported")) == [
            "imported __holdfast_main__",
            "imported __main__",
        ]


def test_script_without_a_main_guard_fails_with_not_importable(
    tmp_path: Path,
) -> None:
    careless = TASKS + "if True:\n" + MAIN
    with run(tmp_path, careless) as process:
        assert process.wait() == 1
        text = "\n".join(process.errors)
        assert "not_importable" in text
        assert "__main__" in text
        assert not [line for line in process.lines if line.startswith("ran")]


def test_isolated_task_of_inline_code_fails_with_not_importable(tmp_path: Path) -> None:
    """The program fails with an error instead of hanging."""
    text = TASKS + 'if __name__ == "__main__":\n' + MAIN
    with Proc.spawn([sys.executable, "-c", text], ready=None, cwd=tmp_path) as process:
        assert process.wait() == 1
        assert "not_importable" in "\n".join(process.errors)
