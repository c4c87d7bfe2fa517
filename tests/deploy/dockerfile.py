"""A Dockerfile as instructions, for tests that execute them without Docker."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class BuildStage:
    """The instructions of one stage in their order, as (name, text)."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def last(self, name: str) -> str:
        return [text for step, text in self.steps if step == name][-1]

    @property
    def command(self) -> list[str]:
        words: list[str] = json.loads(self.last("CMD"))
        return words

    @property
    def health_check(self) -> list[str]:
        words: list[str] = json.loads(self.last("HEALTHCHECK").partition(" CMD ")[2])
        return words

    @property
    def user(self) -> tuple[int, int]:
        uid, _, gid = self.last("USER").partition(":")
        return int(uid), int(gid)


def read_dockerfile(path: Path) -> list[BuildStage]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    stages: list[BuildStage] = []
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        name, _, text = line.strip().partition(" ")
        if name == "FROM":
            base, _, stage = text.partition(" AS ")
            stages.append(BuildStage(base, stage))
        elif name and stages:
            stages[-1].steps.append((name, text))
    return stages
