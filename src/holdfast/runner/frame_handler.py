"""A handler for `LMSG` frames: decodes the payload, checks the addressee, runs a callback, counts steps.

A frame that cannot be decoded, or that names another worker, raises `Refused`: the item becomes a dead letter
without a retry. The loop continues.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.runner.error_policy import Refused
from holdfast.runner.frames import FrameError, FrameMessage, decode_message
from holdfast.runner.work import WorkItem


class Undecodable(Refused):
    code = "undecodable"


class Misrouted(Refused):
    code = "misrouted"


class FrameHandler:
    def __init__(self, worker_id: int, callback: Callable[[FrameMessage], object]) -> None:
        self.worker_id = worker_id
        self._callback = callback
        self._lock = threading.Lock()
        self._steps_completed = 0

    @property
    def steps_completed(self) -> int:
        return self._steps_completed

    def __call__(self, work: WorkItem) -> None:
        self.step(work.payload)

    def step(self, frame: bytes) -> None:
        """Decode one frame and run the callback."""
        try:
            message = decode_message(frame)
        except FrameError as error:
            raise Undecodable(**error.fields) from error
        if message.to_worker != self.worker_id:
            raise Misrouted(to_worker=message.to_worker, worker=self.worker_id)
        self._callback(message)
        with self._lock:
            self._steps_completed += 1
