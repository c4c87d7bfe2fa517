"""The reference loop: overwrite 4 KiB in place and `fdatasync`. It is the lower bound of a durable commit."""

from __future__ import annotations

import os
import time
from pathlib import Path

BLOCK_BYTES = 4096
BLOCKS = 256


def raw_per_s(directory: Path, seconds: float) -> float:
    """Sequential durable overwrites per second, in a preallocated file."""
    block = b"x" * BLOCK_BYTES
    path = directory / "raw.bin"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        for at in range(BLOCKS):
            os.pwrite(fd, block, at * BLOCK_BYTES)
        os.fsync(fd)
        count = 0
        began = time.perf_counter()
        until = began + seconds
        while (now := time.perf_counter()) < until:
            os.pwrite(fd, block, count % BLOCKS * BLOCK_BYTES)
            os.fdatasync(fd)
            count += 1
        return count / (now - began)
    finally:
        os.close(fd)
        path.unlink()
