"""Flows as tasks: the definition under which a task worker runs the activations of a flow."""

from __future__ import annotations

import datetime
import random
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from holdfast import codec
from holdfast.clock import SYSTEM, Clock
from holdfast.flows.model import TASK_PREFIX
from holdfast.store.api import Store
from holdfast.workers.flows.activation import ActivationCode, FlowEnvironment, run_activation
from holdfast.workers.tasks.attempt import TaskDefinition, current_task


class FlowTaskDefinition:
    """The definition of the activation tasks of one flow."""

    asynchronous = True
    isolation = "thread"
    report = "batch"

    def __init__(self, environment: FlowEnvironment, code: ActivationCode) -> None:
        self._environment = environment
        self._code = code
        self.name = TASK_PREFIX + code.name

    def invoke(self, args: bytes) -> Any:
        return run_activation(self._environment, self._code, current_task(), args)

    def dump(self, value: Any) -> bytes:
        return _NONE

    @property
    def home(self) -> tuple[str, str]:
        return "", ""


_NONE = codec.pack(None)


def task_definitions(
    store: Store,
    universe: str,
    codes: Mapping[str, ActivationCode],
    threads_max: int,
    clock: Clock = SYSTEM,
    worker: tuple[str, str] = ("", ""),
) -> dict[str, TaskDefinition]:
    """Return the definitions of the activation tasks of flows, by task name."""
    if not codes:
        return {}
    threads = ThreadPoolExecutor(threads_max, thread_name_prefix="holdfast-flow-step")
    environment = FlowEnvironment(store, universe, threads, RecordedValues(clock), worker=worker)
    return definitions_in(environment, codes)


def definitions_in(
    environment: FlowEnvironment, codes: Mapping[str, ActivationCode]
) -> dict[str, TaskDefinition]:
    definitions = [FlowTaskDefinition(environment, code) for code in codes.values()]
    return {definition.name: definition for definition in definitions}


class RecordedValues:
    """The sources of `hf.now`, `hf.uuid` and `hf.random`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __call__(self, name: str) -> Any:
        if name == "hf.now":
            wall_us = self._clock.wall_ns() // 1_000
            return _EPOCH + datetime.timedelta(microseconds=wall_us)
        entropy = self._clock.entropy(16)
        if name == "hf.uuid":
            return uuid.UUID(bytes=entropy, version=4)
        return random.Random(entropy).random()


_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
