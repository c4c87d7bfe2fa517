"""`holdfast up module:app`: run an application's roles until told to stop.

- It prints `ready <worker>` once every role has done its first round, and where it answers HTTP.
- SIGTERM and SIGINT drain: worlds get a last snapshot, leases are given back, the process ends with
  0. A second signal ends it at once; then leases run out by themselves. So they do if the store is away: it
  is waited for while tasks have time to end, then one line says what was not given back.
- A role that failed ends the process: its error in one line, exit code 1.
- What does not go on for `--stuck-s` ends the process with 75, so that a supervisor starts it anew.
  Its leases are lost, and counted: a world on which this happens again and again is parked, and the
  others go on (`world.tenure`).
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
import threading
from typing import NamedTuple

from holdfast.app.app import App
from holdfast.app.runtime import ROLES, Runtime
from holdfast.cli import EXIT_OK
from holdfast.cli.application import app_is_usage
from holdfast.cli.http import add_http, guard_of, serving
from holdfast.cli.stopping import Told
from holdfast.cli.target import add_options, is_embedded
from holdfast.clock import SYSTEM, S
from holdfast.config import DEDUPE_RETENTION_NS, TTL_NS_MAX
from holdfast.errors import Busy, HoldfastError, Invalid
from holdfast.ops.application import load_app
from holdfast.ops.http.server import HttpServer
from holdfast.roles.adapter import AdapterPool
from holdfast.roles.orchestrator import Orchestrator
from holdfast.roles.peers import Hasty
from holdfast.roles.role import Service
from holdfast.roles.task_worker import STOP_GRACE_S, TaskWorker
from holdfast.roles.world_worker import WorkerPolicy, WorldWorker
from holdfast.store.api import Store
from holdfast.store.mapping import StoreMap, locate
from holdfast.store.urls import shown

# EX_TEMPFAIL: start it again.
EXIT_STUCK = 75
STUCK_S = 30.0
LOOK_S = 0.05
# How often a process looks whether all of its roles are still there.
WATCH_S = 0.5
LAST_RESORT_S = 5.0
# How long a server that is away is waited for at the start, and how often it is looked for.
STORE_WAIT_S = 60.0
STORE_PAUSE_S = 2.0


class RoleFailed(HoldfastError):
    code = "role_failed"
    hint = "the process has ended; its worlds go on elsewhere when their leases have run out"


def configure(parser: argparse.ArgumentParser) -> None:
    policy = WorkerPolicy()
    parser.add_argument("app", metavar="MODULE:APP", help="an hf.App, found from this directory")
    parser.add_argument(
        "--role", action="append", choices=ROLES, help="run this role; repeat for more; else all"
    )
    parser.add_argument(
        "--kinds", metavar="A,B", help="the adapter does these kinds of effects only; else all"
    )
    parser.add_argument(
        "--queues", metavar="A,B", help="the task worker serves these queues; else those of the app"
    )
    parser.add_argument(
        "--concurrency", metavar="N", type=int, help="plain tasks that run at a time (16)"
    )
    parser.add_argument(
        "--grace-s",
        metavar="S",
        type=float,
        default=STOP_GRACE_S,
        help=f"tasks that still run this long after a stop are given back ({STOP_GRACE_S:g})",
    )
    parser.add_argument(
        "--peer",
        metavar="UNIVERSE=URL",
        action="append",
        default=[],
        help="the store of another universe, for mail to its worlds: one pool that has it is enough; "
        "repeat for more",
    )
    parser.add_argument("--worker", metavar="ID", help="a name that stays the same after a restart")
    parser.add_argument(
        "--lease-s",
        metavar="S",
        type=float,
        default=policy.lease_ttl_s,
        help=f"a dead worker's worlds and effects go on after this long ({policy.lease_ttl_s:g})",
    )
    parser.add_argument(
        "--stuck-s",
        metavar="S",
        type=float,
        default=STUCK_S,
        help=f"end with {EXIT_STUCK} when nothing goes on for this long ({STUCK_S:g})",
    )
    parser.add_argument(
        "--stuck-max",
        metavar="N",
        type=int,
        default=policy.stuck_max,
        help=f"park a world that was the reason so often ({policy.stuck_max})",
    )
    parser.add_argument(
        "--unknown-event-s",
        metavar="S",
        type=float,
        default=policy.unknown_event_s,
        help="an event that no live worker knows is a dead letter after this long "
        f"({policy.unknown_event_s:g})",
    )
    add_http(parser)
    parser.add_argument("--universe", metavar="U", help="run as this one; else as the app says")
    add_options(parser)


@app_is_usage
def run(args: argparse.Namespace) -> int:
    policy = policy_of(args)
    guard = guard_of(args)
    peers = peers_of(args.peer)
    app = load_app(args.app)
    told_to_stop = Told()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _stop(told_to_stop))
    arm_last_resort(args.stuck_s)
    try:
        runtime = opened(args, app, policy, peers, told_to_stop)
        with (
            Watchdog(runtime, args.stuck_s),
            runtime,
            serving(args, runtime, guard) as http,
        ):
            if _await_first_round(runtime, told_to_stop):
                _say_ready(args, runtime, http)
                _say_others(args, runtime)
            try:
                while not told_to_stop.wait(WATCH_S):
                    require_running([*runtime.roles, *([http] if http else [])])
                    _require_store(runtime.store)
            finally:
                held = held_by(runtime.roles)
                hasten(runtime.store, args.grace_s)
        _say_not_given_back(runtime.store, held)
    finally:
        faulthandler.cancel_dump_traceback_later()
    _require_sound(runtime.roles)
    return EXIT_OK


def opened(
    args: argparse.Namespace,
    app: App,
    policy: WorkerPolicy,
    peers: dict[str, str],
    told_to_stop: Told,
) -> Runtime:
    """Open the store and start the roles. A server that is away is waited for: it may have restarted
    together with us."""
    universe = args.universe or app.universe
    url, mapped = locate(universe, args.store)
    until_ns = SYSTEM.mono_ns() + int(STORE_WAIT_S * S)
    while True:
        try:
            return app.open(
                # By what maps it, so that mail finds the stores of others.
                url if mapped is None else None,
                roles=args.role,
                universe=universe,
                worker=args.worker,
                policy=policy,
                kinds=None if args.kinds is None else args.kinds.split(","),
                queues=None if args.queues is None else args.queues.split(","),
                concurrency=args.concurrency,
                stop_grace_s=args.grace_s,
                stores=peers,
            )
        except Busy as error:
            if is_embedded(url) or told_to_stop.is_set() or SYSTEM.mono_ns() >= until_ns:
                raise
            text = " ".join(str(error).split())
            print(f"holdfast: waiting for the store: {text}", file=sys.stderr, flush=True)
            arm_last_resort(args.stuck_s)
            told_to_stop.wait(STORE_PAUSE_S)


def policy_of(args: argparse.Namespace) -> WorkerPolicy:
    bounds = dict.fromkeys(("lease_s", "stuck_s", "stuck_max"), TTL_NS_MAX)
    # A key must outlive the item that it names, or a retry delivers the item twice.
    bounds["unknown_event_s"] = DEDUPE_RETENTION_NS
    for name, max_ns in bounds.items():
        if not 0 < getattr(args, name) <= max_ns / S:
            option = f"--{name.replace('_', '-')}"
            raise Invalid(what=option, why="it is out of bounds", max=max_ns // S)
    usual = WorkerPolicy()
    return WorkerPolicy(
        lease_ttl_s=args.lease_s,
        stuck_max=args.stuck_max,
        unknown_event_s=args.unknown_event_s,
        # A worker is taken for dead after half a lease: three beats.
        heartbeat_s=min(usual.heartbeat_s, args.lease_s / 6),
    )


def peers_of(given: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in given:
        universe, _, url = one.partition("=")
        if not universe or not url:
            raise Invalid(what="--peer", found=shown(one), expected="UNIVERSE=URL")
        if universe in found:
            raise Invalid(what="--peer", universe=universe, why="given twice")
        found[universe] = url
    return found


def require_running(roles: list[Service]) -> None:
    _require_sound(roles)
    for role in roles:
        if not role.running:
            raise RoleFailed(role=role.name, why="it ended by itself")


def _require_store(store: Store) -> None:
    """A process without roles asks its store for nothing, and must not outlive it."""
    check = getattr(store, "check", None)
    if check is not None:
        check()


def _require_sound(roles: list[Service]) -> None:
    for role in roles:
        error = role.failure
        if isinstance(error, HoldfastError):
            raise error
        if error is not None:
            raise RoleFailed(role=role.name, why=f"{type(error).__name__}: {error}")


def _stop(told: Told) -> None:
    """Drain; and whoever says it twice means it."""
    told.set()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def _await_first_round(runtime: Runtime, told_to_stop: Told) -> bool:
    while not all(role.rounds for role in runtime.roles):
        require_running(runtime.roles)
        if told_to_stop.wait(LOOK_S):
            return False
    return True


def _say_ready(args: argparse.Namespace, runtime: Runtime, http: HttpServer | None) -> None:
    url = None if http is None else f"http://{http.address}"
    if args.json:
        document = {
            "ready": runtime.worker,
            "universe": runtime.universe,
            "roles": [role.name for role in runtime.roles],
            "store": runtime.store.url,
            **({"http": url} if url else {}),
        }
        print(json.dumps(document), flush=True)
    else:
        print(f"ready {runtime.worker}" + (f" {url}" if url else ""), flush=True)


def _say_others(args: argparse.Namespace, runtime: Runtime) -> None:
    """The universes that are mapped by name and run elsewhere, with the command for each."""
    mapped: StoreMap | None = locate(runtime.universe, args.store).stores
    for name, url in {} if mapped is None else mapped.named.items():
        if name != runtime.universe:
            command = f"holdfast up MODULE:APP --universe {name}"
            print(f"holdfast: not run here: {name} in {shown(url)}: {command}", file=sys.stderr)


# -- leaving while the store is away ---------------------------------------------------------------


def hasten(store: Store, seconds: float) -> None:
    """A store on a server: it is not waited for any longer than this."""
    if isinstance(store, Hasty):
        store.stop_within(seconds)


def held_by(roles: list[Service]) -> dict[str, int]:
    """What these have that others wait for, by its name."""
    held: dict[str, int] = {}
    for role in roles:
        if isinstance(role, WorldWorker):
            held["worlds"] = len(role.hosted)
        elif isinstance(role, AdapterPool):
            held["effects"] = sum(one.under_way for one in role.runners)
        elif isinstance(role, TaskWorker):
            held["tasks"] = role.held
        elif isinstance(role, Orchestrator):
            held["authority"] = int(role.leading)
    return {name: count for name, count in held.items() if count}


def _say_not_given_back(store: Store, held: dict[str, int]) -> None:
    if isinstance(store, Hasty) and store.away_since_ns:
        what = " ".join(f"{name}={count}" for name, count in held.items()) or "nothing held"
        text = (
            f"not given back: {what} (the store {store.url} is away; leases run out by themselves)"
        )
        print(f"holdfast: {text}", file=sys.stderr, flush=True)


# -- the watchdog --------------------------------------------------------------------------------


def arm_last_resort(stuck_s: float) -> None:
    """A reducer that never lets go of the interpreter stops the watchdog, too. The one that the
    interpreter has in C ends the process some time later, with 1, unless it is armed again."""
    faulthandler.dump_traceback_later(stuck_s + LAST_RESORT_S, exit=True)


class Standstill(NamedTuple):
    """Where a role is. While this stays the same, it does not go on."""

    role: str
    rounds: int
    # The world and the inbox seq that its reducer works on.
    world: str = ""
    seq: int = 0

    def __str__(self) -> str:
        where = f"world={self.world} seq={self.seq}" if self.world else "outside of reducers"
        return f"role={self.role} {where}"


def where_is(role: Service) -> Standstill:
    working_on = role.working_on if isinstance(role, WorldWorker) else None
    return Standstill(role.name, role.rounds, *(working_on or ("", 0)))


class Watchdog:
    """Ends the process when a role stands still. Nothing else would: a thread cannot be killed.

    A role that waits for a server that is away does not stand still: that comes back, and it goes on.
    """

    def __init__(self, runtime: Runtime, stuck_s: float) -> None:
        self._roles = runtime.roles
        self._clock = runtime.clock
        self._store = runtime.store
        self._stuck_s = stuck_s
        self._since: dict[str, tuple[Standstill, int]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="holdfast-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        self._thread.join()

    def stuck(self) -> Standstill | None:
        """A role that has been at the same place for too long."""
        now_ns = self._clock.mono_ns()
        away = getattr(self._store, "away_since_ns", 0) > 0
        for role in self._roles:
            here = where_is(role)
            before, since_ns = self._since.get(role.name, (None, now_ns))
            if here != before or away or not role.ticking or not role.running:
                self._since[role.name] = (here, now_ns)
            elif now_ns - since_ns >= self._stuck_s * S:
                return here
        return None

    def _watch(self) -> None:
        while not self._stopping.wait(min(1.0, self._stuck_s / 4)):
            arm_last_resort(self._stuck_s)
            found = self.stuck()
            if found is not None:
                text = f"stuck: {found} for_s={self._stuck_s:g} (start this process again)"
                print(f"holdfast: {text}", file=sys.stderr, flush=True)
                os._exit(EXIT_STUCK)
