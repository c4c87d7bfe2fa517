"""The queue worker: claims items, runs handlers and commits their outcomes.

runner = Runner(store, "mail", handler, worker="mailer-1", timers="mail.later")
with runner:        # boots and loops in a thread; alternatively call runner.boot() and runner.tick()
    ...

runner             one tick                              policy         all settings, one frozen value
loop               repeats ticks, sleeps, start, stop    error_policy   error classification
boot               checks before the first tick          counters       metrics
demand             how many to claim, how long to sleep  tick           counts and lock of a tick
claimer            claims items                          hooks          log and replay events
claim_ops          operations of the claimer             recorder       steps in a file
executor           handlers in threads or an event loop  replay         runs recorded steps again
claim_supervisor   starts items, enforces timeouts       frames         LMSG and LINT formats
settlement         commits outcomes                      frame_handler  handler for LMSG frames
commit_handoff     outcomes in another's commit          wakeup         ends the sleep of a loop
isolation          poison suspects run alone

Shared with the task worker (`workers.tasks`), besides the executors and the wake-up:

lease_supervision  extends leases, finds lost ones
unknown_outcome    which calls to repeat, which leases are orphans
drain              phases of a stop
"""

from __future__ import annotations

from holdfast.runner.boot import RUNNER_TRANSITIONS, NotRunning, RunnerState
from holdfast.runner.counters import Metrics, RunnerCounters
from holdfast.runner.error_policy import ErrorKind, ErrorPolicy, Refused
from holdfast.runner.frame_handler import FrameHandler, Misrouted, Undecodable
from holdfast.runner.hooks import LogEvent, LogKind, RecordedStep, StepKind
from holdfast.runner.policy import RunnerPolicy
from holdfast.runner.recorder import Recorder, RecordingDamaged, read_steps
from holdfast.runner.replay import ReplayReport, replay, replay_file
from holdfast.runner.runner import Runner
from holdfast.runner.tick import TickLock, TickLockClosed, TickStats
from holdfast.runner.work import WorkHandler, WorkItem

__all__ = [
    "RUNNER_TRANSITIONS",
    "ErrorKind",
    "ErrorPolicy",
    "FrameHandler",
    "LogEvent",
    "LogKind",
    "Metrics",
    "Misrouted",
    "NotRunning",
    "RecordedStep",
    "Recorder",
    "RecordingDamaged",
    "Refused",
    "ReplayReport",
    "Runner",
    "RunnerCounters",
    "RunnerPolicy",
    "RunnerState",
    "StepKind",
    "TickLock",
    "TickLockClosed",
    "TickStats",
    "Undecodable",
    "WorkHandler",
    "WorkItem",
    "read_steps",
    "replay",
    "replay_file",
]
