"""The log of a process: its options, and the warning that a store runs out of space."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from holdfast import logs
from holdfast.cli.redaction import ProcessRules
from holdfast.clock import SYSTEM, S
from holdfast.ops import log_format
from holdfast.ops.store_size import StoreSpace, store_size, store_space
from holdfast.store.api import Store

# A line is logged when the used part of the disk or of the store's limit reaches one of these.
FULL_PARTS = (0.80, 0.90, 0.95)
CHECK_S = 30.0


def add_log(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log",
        choices=log_format.FORMATS,
        default="text",
        help="log lines on standard error as text or as one JSON object per line (default text)",
    )
    parser.add_argument(
        "--log-level",
        choices=log_format.LEVELS,
        default="warning",
        help="log lines from this level on (default warning)",
    )


def configure_log(args: argparse.Namespace, **process_ids: object) -> None:
    log_format.configure(args.log, args.log_level, process_ids, rules=ProcessRules(args))


class SpaceWatch:
    """Logs a line when a store fills its disk or its limit, and another one when it has room again."""

    def __init__(
        self,
        store: Store,
        interval_s: float = CHECK_S,
        read_space: Callable[[Store], StoreSpace | None] = store_space,
    ) -> None:
        self._store = store
        self._read_space = read_space
        self._interval_ns = int(interval_s * S)
        self._check_at_ns = 0
        self._reached = 0.0

    def check(self) -> None:
        now_ns = SYSTEM.mono_ns()
        if now_ns < self._check_at_ns:
            return
        self._check_at_ns = now_ns + self._interval_ns
        try:
            space = self._read_space(self._store)
        except FileNotFoundError:
            return  # the check of the store reports it
        if space is None:
            return
        disk_part = 1 - space.disk_free_bytes / space.disk_bytes
        part = max(disk_part, store_size(self._store).bytes / space.limit_bytes)
        reached = max((limit for limit in FULL_PARTS if part >= limit), default=0.0)
        if reached > self._reached:
            logs.warn("store", "store fills up", store=self._store.url, used=f"{part:.0%}",
                      disk_free_bytes=space.disk_free_bytes)  # fmt: skip
        elif reached < self._reached and not reached:
            logs.warn("store", "store has room again", store=self._store.url, used=f"{part:.0%}")
        self._reached = reached
