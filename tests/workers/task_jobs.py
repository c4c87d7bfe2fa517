"""Tasks that run in isolated processes. They report to the test through files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import holdfast as hf

POLL_S = 0.005


@hf.task(isolation="process")
def pid(n: int = 0) -> int:
    return os.getpid()


@hf.task(isolation="process")
def meet(folder: str, n: int, company: int) -> int:
    """Return after `company` tasks have started."""
    (Path(folder) / str(n)).touch()
    while len(list(Path(folder).iterdir())) < company:
        time.sleep(POLL_S)
    return os.getpid()


@hf.task(isolation="process", lease_s=1)
def obey(path: str) -> str:
    """Run until the task is cancelled."""
    Path(path).write_text(str(os.getpid()))
    while not hf.current_task().cancelled:
        time.sleep(POLL_S)
    Path(path).write_text("cancelled")
    return "in vain"


@hf.task(isolation="process")
def stubborn(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    while True:
        time.sleep(3600)


@hf.task(isolation="process")
def wait_for(path: str, at: str) -> str:
    """Write the process id to `at`, and return when `path` exists."""
    Path(at).write_text(str(os.getpid()))
    while not Path(path).exists():
        time.sleep(POLL_S)
    return "done"


@hf.task(isolation="process", expiries_max=3, backoff_s=0.001)
def die(how: str) -> str:
    if how == "exit":
        os._exit(7)
    if how == "forked":
        # The forked child inherits all open descriptors and outlives this process.
        if os.fork() == 0:
            time.sleep(2)
            os._exit(0)
        os._exit(7)
    signal.raise_signal(signal.Signals[how])
    return "alive"


@hf.task(isolation="process", expiries_max=1)
def write_to_pipe(data: bytes, path: str) -> None:
    """Write to the pipe to the parent, as native code with a wrong descriptor does."""
    Path(path).write_text(str(os.getpid()))
    [pipe] = [
        int(entry.name)
        for entry in Path("/proc/self/fd").iterdir()
        if entry.is_socket() and int(entry.name) > 2
    ]
    os.write(pipe, data)
    time.sleep(3600)


@hf.task(isolation="process", attempts=1)
def leave(how: str) -> None:
    if how == "SystemExit":
        sys.exit(3)
    raise KeyboardInterrupt


@hf.task(isolation="process", attempts=2, backoff_s=0.001)
def fail(text: str) -> None:
    raise ValueError(text)


@hf.task(isolation="process")
def report(values: list[Any]) -> None:
    """Report progress from several threads."""
    me = hf.current_task()
    threads = [threading.Thread(target=me.progress, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    me.progress(values[-1])
    while not me.cancelled:
        time.sleep(POLL_S)


@hf.task(isolation="process", attempts=1)
def returned(what: str) -> Any:
    return {"object": object(), "large": b"x" * 5_000_000, "plain": {"a": [1, 2.5, None]}}[what]


@hf.task(isolation="process", attempts=1)
def ends_what_it_starts() -> int:
    """Start a subprocess and terminate it by a signal."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as started:
        started.terminate()
        return started.wait(30)


@hf.task(isolation="process")
def asks() -> list[Any]:
    me = hf.current_task()
    return [me.id, me.attempt, me.idempotency_key, me.cancelled]
