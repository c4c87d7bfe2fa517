"""The worker loop, its policy, counters, sinks, hooks and frames.

runner = Runner(store, "mail", handler, worker="mailer-1", timers="mail.later")
with runner:        # boots, and loops in a thread; or runner.boot() and runner.tick() by hand
    ...

boot        what must hold before anything runs      policy      every knob, in one frozen value
runner      one tick                                 faults      what a handler's error means
loop        tick after tick, rest, start, end        counters    how well it does
claimer     the claiming side   claims  its commits  hooks       log and replay events
settle      the settling side                        recording   steps in a file
crew        handlers in threads                      replay      and once more
bell, gate  what wakes, what excludes                frames      LMSG and LINT    dispatch  to them
"""

from __future__ import annotations

from holdfast.runner.boot import LIFE, NotRunning, State
from holdfast.runner.counters import Counters, Metrics
from holdfast.runner.dispatch import FrameHandler, Misrouted, Undecodable
from holdfast.runner.faults import Fault, Faults, Refused
from holdfast.runner.gate import Gate, GateClosed
from holdfast.runner.hooks import LogEvent, LogKind, Step, StepKind
from holdfast.runner.policy import Policy
from holdfast.runner.recording import Damaged, Recorder, read_steps
from holdfast.runner.replay import ReplayReport, replay, replay_file
from holdfast.runner.runner import Runner
from holdfast.runner.tick import Tick
from holdfast.runner.work import Handler, Work

__all__ = [
    "LIFE",
    "Counters",
    "Damaged",
    "Fault",
    "Faults",
    "FrameHandler",
    "Gate",
    "GateClosed",
    "Handler",
    "LogEvent",
    "LogKind",
    "Metrics",
    "Misrouted",
    "NotRunning",
    "Policy",
    "Recorder",
    "Refused",
    "ReplayReport",
    "Runner",
    "State",
    "Step",
    "StepKind",
    "Tick",
    "Undecodable",
    "Work",
    "read_steps",
    "replay",
    "replay_file",
]
