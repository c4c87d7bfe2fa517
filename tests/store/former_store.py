"""The stores of schema 0.2 in `tests/data/store_0_2.tar.gz`, unpacked for a test."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from holdfast.store.clock_leap import TRUSTED_UNTIL_VARIABLE

DATA = Path(__file__).parents[1] / "data"
CLOSED, KILLED = "closed", "killed"


def unpack_store(target: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Unpack one of the directories. Its last commit may be years ago, which an open refuses by default."""
    monkeypatch.setenv(TRUSTED_UNTIL_VARIABLE, "2200-01-01")
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(DATA / "store_0_2.tar.gz") as tar:
        members = [member for member in tar if member.name.startswith(f"{kind}/")]
        tar.extractall(target, members, filter="data")
    return target / kind


def data_lines(name: str) -> list[str]:
    return (DATA / name).read_text(encoding="utf-8").split()
