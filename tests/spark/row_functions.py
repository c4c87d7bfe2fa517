"""Functions that the tests of stages run in child processes. A child imports this module and not the whole test."""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

from holdfast.spark import Skip


def append_line(log: str, what: object) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{what}\n".encode())
    os.close(fd)


def double(row: Any) -> dict[str, Any]:
    return {"y": row.id * 2}


def result_text(n: int) -> str:
    """A result text. The sizes vary, so that parts are cut by their bytes."""
    return f"{n}:" + "x" * (n * 37 % 400)


class LabelOverHttp:
    """The function of the stage: one HTTP request per row. Some rows are poison, some are skipped."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, row: Any, call: Any) -> Any:
        payload = {"id": row.id, "text": row.text, "key": call.idempotency_key}
        request = urllib.request.Request(self.url, data=json.dumps(payload).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            reply = json.load(answer)
        call.cost = 0.5
        if row.text % 7 == 6:
            return Skip("seven")
        if row.text % 11 == 10 and reply["poison"]:
            raise ValueError("poison")
        return {"label": reply["label"]}
