"""Payloads as `LMSG` frames: decode, check the addressee, call back, count the step.

A frame that cannot be decoded, or that is for another worker, will be no better next time: it is
`Refused`, which ends in a dead letter at once and leaves the loop alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.runner.faults import Refused
from holdfast.runner.frames import FrameError, Message, decode_message
from holdfast.runner.work import Work


class Undecodable(Refused):
    code = "undecodable"


class Misrouted(Refused):
    code = "misrouted"


class FrameHandler:
    def __init__(self, worker_id: int, callback: Callable[[Message], object]) -> None:
        self.worker_id = worker_id
        self._callback = callback
        self._lock = threading.Lock()
        self._steps_completed = 0

    @property
    def steps_completed(self) -> int:
        return self._steps_completed

    def __call__(self, work: Work) -> None:
        self.step(work.payload)

    def step(self, frame: bytes) -> None:
        """One frame, from bytes to a completed callback."""
        try:
            message = decode_message(frame)
        except FrameError as error:
            raise Undecodable(**error.fields) from error
        if message.to_worker != self.worker_id:
            raise Misrouted(to_worker=message.to_worker, worker=self.worker_id)
        self._callback(message)
        with self._lock:
            self._steps_completed += 1
