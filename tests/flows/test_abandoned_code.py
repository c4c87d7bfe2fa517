"""Flow code that catches every exception, also the end of its coroutine: it must not block its worker."""

import subprocess
import sys
from pathlib import Path
from textwrap import dedent, indent

import pytest

LOOPS = {
    "receive": """
        while True:
            try:
                return (await hf.receive(Note)).n
            except:
                continue
    """,
    "value and receive": """
        while True:
            try:
                hf.now()
                hf.publish("status", "waits")
                return (await hf.receive(Note)).n
            except:
                continue
    """,
    "step after sleep": """
        while True:
            try:
                await hf.sleep(0.01)
                return (await hf.receive(Note)).n + await hf.step(one) - 1
            except:
                continue
    """,
    "branch": """
        async def branch():
            while True:
                try:
                    return (await hf.receive(Note)).n
                except:
                    continue
        return (await asyncio.gather(branch(), hf.sleep(0.01)))[0]
    """,
}
PROGRAM = """
import asyncio
import time

import holdfast as hf


class Note(hf.Event):
    n: int


def one() -> int:
    return 1


@hf.flow
async def stubborn() -> int:
    {body}


@hf.flow
async def other() -> int:
    return await hf.step(one)


if __name__ == "__main__":
    with hf.App("flows", flows=[stubborn, other], events=[Note]).open("memory:") as rt:
        flow = rt.start(stubborn)
        while not any(one["code"] == "waits_for_event" for one in flow.why()):
            time.sleep(0.01)
        assert rt.start(other).result(timeout=30) == 1
        flow.send(Note(7))
        print(flow.result(timeout=30))
        waiting = rt.start(stubborn)
        while not any(one["code"] == "waits_for_event" for one in waiting.why()):
            time.sleep(0.01)
    print("closed")
"""


@pytest.mark.parametrize("name", LOOPS)
def test_bare_except_around_a_wait_blocks_neither_the_worker_nor_its_end(
    name: str, tmp_path: Path
) -> None:
    done = run(PROGRAM.replace("{body}", indent(dedent(LOOPS[name]), "    ").strip()), tmp_path)
    assert done.stdout.split() == ["7", "closed"], done.stderr
    assert "flow code abandoned: flow=f1-1 name=stubborn" in done.stderr
    assert "Exception ignored" not in done.stderr


ASLEEP = """
import asyncio

import holdfast as hf


def one() -> int:
    return 1


@hf.flow
async def stubborn() -> int:
    while True:
        try:
            await asyncio.sleep(1)
        except BaseException:
            pass


@hf.flow
async def other() -> int:
    return await hf.step(one)


if __name__ == "__main__":
    with hf.App("flows", flows=[stubborn, other]).open("memory:") as rt:
        rt.start(stubborn)
        assert rt.start(other).result(timeout=30) == 1
    print("closed")
"""


def test_loop_that_catches_everything_around_a_timer_is_abandoned_at_the_end(
    tmp_path: Path,
) -> None:
    done = run(ASLEEP, tmp_path)
    assert done.stdout.split() == ["closed"], done.stderr
    assert "flow code abandoned: flow=f1-1 name=stubborn" in done.stderr


def run(program: str, directory: Path) -> subprocess.CompletedProcess[str]:
    path = directory / "program.py"
    path.write_text(program, encoding="utf-8")
    return subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False
    )
