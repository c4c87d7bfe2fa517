"""Parts of `holdfast doctor` about operating system processes: the limits of this one, and the writer of a store."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

from holdfast.child_process import is_stopped
from holdfast.store.lmdb.writer_process import lock_holder

_LIMITS = {
    "open_files": resource.RLIMIT_NOFILE,
    "file_bytes": resource.RLIMIT_FSIZE,
    "address_space_bytes": resource.RLIMIT_AS,
}


def process_limits() -> dict[str, Any]:
    """Return the limits of this process."""
    return {name: _limits_of(0, number) for name, number in _LIMITS.items()}


def writer_report(directory: Path) -> dict[str, Any] | None:
    """Return the writer process of an embedded store with its open files; None if no writer runs."""
    pid, _ = lock_holder(directory.resolve())
    if not pid:
        return None
    report: dict[str, Any] = {"pid": pid, "stopped": is_stopped(pid)}
    try:
        report["open_files"] = len(os.listdir(f"/proc/{pid}/fd"))
        report["open_files_limit"] = _limits_of(pid, resource.RLIMIT_NOFILE)["soft"]
    except OSError as error:
        # The process of another account, or one that ended meanwhile.
        report["open_files"] = error.strerror
    return report


def _limits_of(pid: int, number: int) -> dict[str, int | None]:
    """Return the soft and hard limit of a process; None without a limit."""
    soft, hard = resource.prlimit(pid, number)
    return {"soft": _limit(soft), "hard": _limit(hard)}


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value
