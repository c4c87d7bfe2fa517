"""The application of the task benchmarks, as a user would write it: `holdfast up bench.peers.task_app:app`.

A task only records its completion. The environment names the file.
"""

from __future__ import annotations

import os

import holdfast as hf
from bench.peers.tally import VARIABLE, Tally

_tally: list[Tally] = []


# Default options.
@hf.task
def run(sent_ns: int, note: str) -> None:
    if not _tally:
        _tally.append(Tally(os.environ[VARIABLE]))
    _tally[0].mark(sent_ns)


app = hf.App("bench-tasks", tasks=[run])
