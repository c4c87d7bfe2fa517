"""`holdfast up module:app`: runs the roles of an application until a stop signal.

- It prints `ready <worker>`, and the HTTP address, when every role has completed its first round.
- SIGTERM and SIGINT drain: worlds get a final snapshot, leases are released, the exit code is 0. A second
  signal ends the process at once, and its leases expire. If the store is unreachable, the process waits for
  it during the grace period of tasks, then prints one line with the leases that it could not release.
- A failed role ends the process: its error in one line, exit code 1.
- A role without progress for `--stuck-s` ends the process with exit code 75, so that a supervisor restarts
  it. The lost leases are counted. A world that causes this repeatedly is parked, so that other worlds can
  run (`world.hosting_lease`).
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, NamedTuple

from holdfast import gc_control, traces
from holdfast.app.app import App
from holdfast.app.runtime import ROLES, Runtime
from holdfast.cli import EXIT_OK
from holdfast.cli.app_argument import app_errors_are_usage
from holdfast.cli.http import add_http, build_guard, http_server, state_processes
from holdfast.cli.parent_pipe import stop_with_parent
from holdfast.cli.process_log import SpaceWatch, add_log, configure_log
from holdfast.cli.redaction import redactor_of, warn_unknown_types
from holdfast.cli.stop_signal import StopSignal
from holdfast.cli.store_option import add_options, check_store, is_embedded
from holdfast.clock import SYSTEM, S
from holdfast.config import DEDUPE_RETENTION_NS, TTL_NS_MAX
from holdfast.errors import Busy, HoldfastError, Invalid
from holdfast.ops.api.universes import UniverseChoice
from holdfast.ops.app_loader import load_app
from holdfast.redaction import Redactor
from holdfast.store.admin.routing import StoreRouting, locate_store
from holdfast.store.api import Store
from holdfast.store.urls import redact
from holdfast.workers.held_leases import held_leases
from holdfast.workers.mail.peers import OutageAwareStore
from holdfast.workers.service import ManagedService
from holdfast.workers.tasks.worker import STOP_GRACE_S
from holdfast.workers.world.policy import WorldWorkerPolicy
from holdfast.workers.world.worker import WorldWorker
from holdfast.world.hosting_lease import SUSPECT_AFTER_LOSSES

if TYPE_CHECKING:
    from holdfast.ops.http.server import HttpServer

# EX_TEMPFAIL: a supervisor should restart the process.
EXIT_STUCK = 75
STUCK_S = 30.0
STUCK_MAX_MIN = SUSPECT_AFTER_LOSSES + 1
FIRST_ROUND_POLL_S = 0.05
# The interval of checks that all roles still run.
WATCH_S = 0.5
HARD_TIMEOUT_EXTRA_S = 5.0
# How long to wait at the start for an unreachable store, and the pause between two attempts.
STORE_WAIT_S = 60.0
STORE_PAUSE_S = 2.0


class RoleFailed(HoldfastError):
    code = "role_failed"
    hint = "the process has ended; other workers take over its worlds when their leases expire"


def configure(parser: argparse.ArgumentParser) -> None:
    policy = WorldWorkerPolicy()
    parser.add_argument(
        "app",
        metavar="MODULE:APP",
        help="the hf.App to run; the current directory is on the module path",
    )
    parser.add_argument(
        "--role",
        action="append",
        choices=ROLES,
        help="run this role; repeatable (default: all roles that the app needs)",
    )
    parser.add_argument(
        "--kinds",
        metavar="A,B",
        help="effect kinds that the adapter role performs (default: all of the app)",
    )
    parser.add_argument(
        "--queues",
        metavar="A,B",
        help="queues that the task role serves (default: all of the app)",
    )
    parser.add_argument(
        "--concurrency", metavar="N", type=int, help="run at most N tasks in threads (default 16)"
    )
    parser.add_argument(
        "--grace-s",
        metavar="S",
        type=float,
        default=STOP_GRACE_S,
        help="release tasks that still run S seconds after a stop signal "
        f"(default {STOP_GRACE_S:g})",
    )
    parser.add_argument(
        "--peer",
        metavar="UNIVERSE=URL",
        action="append",
        default=[],
        help="store URL of another universe, for mail to its worlds; needed in one adapter process "
        "only; repeatable",
    )
    parser.add_argument("--worker", metavar="ID", help="worker id; use the same id after a restart")
    parser.add_argument(
        "--lease-s",
        metavar="S",
        type=float,
        default=policy.lease_ttl_s,
        help="lease duration: other workers take over the worlds and effects of a dead worker after "
        f"S seconds (default {policy.lease_ttl_s:g})",
    )
    parser.add_argument(
        "--stuck-s",
        metavar="S",
        type=float,
        default=STUCK_S,
        help=f"exit with {EXIT_STUCK} when a role makes no progress for S seconds "
        f"(default {STUCK_S:g})",
    )
    parser.add_argument(
        "--stuck-max",
        metavar="N",
        type=int,
        default=policy.stuck_max,
        help=f"park a world that has made a worker stuck N times (default {policy.stuck_max}, "
        f"at least {STUCK_MAX_MIN})",
    )
    parser.add_argument(
        "--unknown-event-s",
        metavar="S",
        type=float,
        default=policy.unknown_event_s,
        help="move an event that no live worker can handle to the dead letters after S seconds "
        f"(default {policy.unknown_event_s:g})",
    )
    # The pipe of `holdfast dev`.
    parser.add_argument("--parent-fd", type=int, help=argparse.SUPPRESS)
    add_http(parser)
    add_log(parser)
    add_options(parser, universe="the universe to run in (default: that of the app)")


@app_errors_are_usage
def run(args: argparse.Namespace) -> int:
    if args.parent_fd is not None:
        stop_with_parent(args.parent_fd, args.grace_s)
    policy = policy_of(args)
    guard = build_guard(args)
    peers = peers_of(args.peer)
    redactor = redactor_of(args)
    configure_log(args)
    app = load_app(args.app)
    warn_unknown_types(redactor, [app])
    stop_signal = StopSignal()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _on_stop_signal(stop_signal))
    arm_hard_timeout(args.stuck_s)
    try:
        runtime = open_runtime(args, app, policy, peers, stop_signal)
        if redactor:
            traces.hide_error_texts(runtime)
        with (
            Watchdog(runtime, args.stuck_s),
            runtime,
            http_server(
                args, runtime.store, universe_choice(runtime, args.app, redactor), guard, runtime
            ) as http,
        ):
            configure_log(args, universe=runtime.universe, worker=runtime.worker)
            space = SpaceWatch(runtime.store)
            if _await_first_round(runtime, stop_signal):
                gc_control.reduce_automatic()
                _print_ready(args, runtime, http)
                _print_other_universes(args, runtime)
            try:
                while not stop_signal.wait(WATCH_S):
                    require_running([*runtime.roles, *([http] if http else [])])
                    check_store(runtime.store)
                    space.check()
            finally:
                held = held_leases(runtime.roles)
                leases = {kind: count for kind, count in held.items() if count}
                limit_stop_time(runtime.store, args.grace_s)
        _print_unreleased(runtime.store, leases)
    finally:
        faulthandler.cancel_dump_traceback_later()
    _require_no_failure(runtime.roles)
    return EXIT_OK


def universe_choice(runtime: Runtime, source: str, redactor: Redactor) -> UniverseChoice:
    """The HTTP API serves all universes of the store, and has the code of this one. `source` is its import path."""
    name, store = runtime.universe, runtime.store
    states = state_processes(store, {name: source})
    return UniverseChoice(
        store, {name: runtime.app}, default=name, states=states, redactor=redactor
    )


def open_runtime(
    args: argparse.Namespace,
    app: App,
    policy: WorldWorkerPolicy,
    peers: dict[str, str],
    stop_signal: StopSignal,
) -> Runtime:
    """Open the store and start the roles. Waits for an unreachable database server, which may be restarting
    together with this process."""
    universe = args.universe or app.universe
    url, routing = locate_store(universe, args.store)
    until_ns = SYSTEM.mono_ns() + int(STORE_WAIT_S * S)
    while True:
        try:
            return app.open(
                # None opens by the configuration, which also has the stores of other universes for mail.
                url if routing is None else None,
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
            if is_embedded(url) or stop_signal.is_set() or SYSTEM.mono_ns() >= until_ns:
                raise
            text = " ".join(str(error).split())
            print(f"holdfast: waiting for the store: {text}", file=sys.stderr, flush=True)
            arm_hard_timeout(args.stuck_s)
            stop_signal.wait(STORE_PAUSE_S)


def policy_of(args: argparse.Namespace) -> WorldWorkerPolicy:
    bounds = dict.fromkeys(("lease_s", "stuck_s", "stuck_max"), TTL_NS_MAX)
    # A dedupe key must outlive its item; otherwise a retry delivers the item twice.
    bounds["unknown_event_s"] = DEDUPE_RETENTION_NS
    for name, max_ns in bounds.items():
        if not 0 < getattr(args, name) <= max_ns / S:
            option = f"--{name.replace('_', '-')}"
            raise Invalid(what=option, why="out of range", max=max_ns // S)
    if args.stuck_max <= SUSPECT_AFTER_LOSSES:
        # These losses hit all worlds of the worker. Only later ones happen in isolation.
        why = "healthy worlds of the same worker would be parked, too"
        raise Invalid(what="--stuck-max", found=args.stuck_max, min=STUCK_MAX_MIN, why=why)
    defaults = WorldWorkerPolicy()
    return WorldWorkerPolicy(
        lease_ttl_s=args.lease_s,
        stuck_max=args.stuck_max,
        unknown_event_s=args.unknown_event_s,
        # A worker counts as dead after half a lease, which is three missed heartbeats.
        heartbeat_s=min(defaults.heartbeat_s, args.lease_s / 6),
    )


def peers_of(arguments: list[str]) -> dict[str, str]:
    peers: dict[str, str] = {}
    for argument in arguments:
        universe, _, url = argument.partition("=")
        if not universe or not url:
            raise Invalid(what="--peer", found=redact(argument), expected="UNIVERSE=URL")
        if universe in peers:
            raise Invalid(what="--peer", universe=universe, why="given twice")
        peers[universe] = url
    return peers


def require_running(roles: list[ManagedService]) -> None:
    _require_no_failure(roles)
    for role in roles:
        if not role.running:
            raise RoleFailed(role=role.name, why="the role ended without an error")


def _require_no_failure(roles: list[ManagedService]) -> None:
    for role in roles:
        error = role.failure
        if isinstance(error, HoldfastError):
            raise error
        if error is not None:
            raise RoleFailed(role=role.name, why=f"{type(error).__name__}: {error}")


def _on_stop_signal(stop_signal: StopSignal) -> None:
    """Start the drain, and restore the default handlers, so that a second signal ends the process."""
    stop_signal.set()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def _await_first_round(runtime: Runtime, stop_signal: StopSignal) -> bool:
    while not all(role.rounds for role in runtime.roles):
        require_running(runtime.roles)
        if stop_signal.wait(FIRST_ROUND_POLL_S):
            return False
    return True


def _print_ready(args: argparse.Namespace, runtime: Runtime, http: HttpServer | None) -> None:
    url = None if http is None else http.url
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


def _print_other_universes(args: argparse.Namespace, runtime: Runtime) -> None:
    """Print the configured universes that this process does not run, with the command that runs each."""
    routing: StoreRouting | None = locate_store(runtime.universe, args.store).routing
    for name, url in {} if routing is None else routing.named.items():
        if name != runtime.universe:
            command = f"holdfast up MODULE:APP --universe {name}"
            print(f"holdfast: not run here: {name} in {redact(url)}: {command}", file=sys.stderr)


# -- stop while the store is unreachable -----------------------------------------------------------


def limit_stop_time(store: Store, seconds: float) -> None:
    """Limit how long a remote store may delay the stop."""
    if isinstance(store, OutageAwareStore):
        store.stop_within(seconds)


def _print_unreleased(store: Store, leases: dict[str, int]) -> None:
    if isinstance(store, OutageAwareStore) and store.away_since_ns:
        counts_text = (
            " ".join(f"{name}={count}" for name, count in leases.items()) or "nothing held"
        )
        text = f"not released: {counts_text} (the store {store.url} is unreachable; the leases will expire)"
        print(f"holdfast: {text}", file=sys.stderr, flush=True)


# -- the watchdog --------------------------------------------------------------------------------


def arm_hard_timeout(stuck_s: float) -> None:
    """Arm the last resort: a reducer that never releases the GIL also blocks the watchdog thread. Then the
    C timer of `faulthandler` ends the process with 1, unless it is re-armed in time."""
    faulthandler.dump_traceback_later(stuck_s + HARD_TIMEOUT_EXTRA_S, exit=True)


class RolePosition(NamedTuple):
    """The position of a role. A role is stuck while its position does not change."""

    role: str
    rounds: int
    # The world and inbox seq that the reducer processes.
    world: str = ""
    seq: int = 0

    def __str__(self) -> str:
        location = f"world={self.world} seq={self.seq}" if self.world else "outside of reducers"
        return f"role={self.role} {location}"


def role_position(role: ManagedService) -> RolePosition:
    working_on = role.working_on if isinstance(role, WorldWorker) else None
    return RolePosition(role.name, role.rounds, *(working_on or ("", 0)))


class Watchdog:
    """A watchdog that ends the process when a role is stuck, because a thread cannot be killed.

    A role that waits for an unreachable store is not stuck: it continues when the store returns.
    """

    def __init__(self, runtime: Runtime, stuck_s: float) -> None:
        self._roles = runtime.roles
        self._clock = runtime.clock
        self._store = runtime.store
        self._stuck_s = stuck_s
        self._since: dict[str, tuple[RolePosition, int]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="holdfast-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        self._thread.join()

    def find_stuck(self) -> RolePosition | None:
        """Return the position of a role that has not changed for too long, if there is one."""
        now_ns = self._clock.mono_ns()
        away = getattr(self._store, "away_since_ns", 0) > 0
        for role in self._roles:
            position = role_position(role)
            last_position, since_ns = self._since.get(role.name, (None, now_ns))
            if position != last_position or away or not role.ticking or not role.running:
                self._since[role.name] = (position, now_ns)
            elif now_ns - since_ns >= self._stuck_s * S:
                return position
        return None

    def _watch(self) -> None:
        while not self._stopping.wait(min(1.0, self._stuck_s / 4)):
            arm_hard_timeout(self._stuck_s)
            position = self.find_stuck()
            if position is not None:
                text = f"stuck: {position} for_s={self._stuck_s:g} (restart this process)"
                print(f"holdfast: {text}", file=sys.stderr, flush=True)
                os._exit(EXIT_STUCK)
