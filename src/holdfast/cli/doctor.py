"""`holdfast doctor`: prints a report for a bug tracker, without secrets and payloads.

The report has versions, platform, limits and configuration of this process, and for each store: health, clocks,
queues, tasks, flows, workers, readiness with the codes of `why` and the limits of unfinished work, and of an embedded
store the writer process with its open files and the last lines of its log. The command changes nothing. A part
that cannot be read shows its error. The exit code is 1 if a store cannot be read, else 0. Without a store in the
configuration and in the default directory, the report has the parts of the process alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from holdfast import __version__
from holdfast.blockers.answer import WhyAnswer
from holdfast.blockers.explain import explain
from holdfast.cli import EXIT_FAILED, EXIT_OK
from holdfast.cli.output import bytes_text, emit, printable
from holdfast.cli.process_report import process_limits, writer_report
from holdfast.cli.report_redaction import SecretFilter, configuration, writer_log_tail
from holdfast.cli.store import queue_counts
from holdfast.cli.store_option import (
    DEFAULT_URL,
    UNIVERSE_OF_STORE,
    StoreChoice,
    add_options,
    directory_of,
    each_store,
    is_embedded,
    open_existing,
    url_of,
)
from holdfast.clock import SYSTEM, S
from holdfast.errors import HoldfastError
from holdfast.flows import flow_list
from holdfast.ops import catalog_queries
from holdfast.ops.store_size import store_size, store_space
from holdfast.store import schema
from holdfast.store.api import Store, Txn
from holdfast.store.lmdb.writer_address import LOG_FILE
from holdfast.store.urls import redact
from holdfast.tasks import queries as task_queries
from holdfast.workers.limit_settings import LimitFigure, list_figures
from holdfast.workers.readiness import ReadinessBlocker, ReadinessReason
from holdfast.workers.readiness_facts import read_readiness

# Distributions whose versions are printed if they are installed. None of them is imported.
DISTRIBUTIONS = (
    "lmdb", "msgspec", "tzdata", "psycopg", "psycopg-binary", "pyspark", "pyarrow", "deltalake", "pyiceberg", "httpx",
    "starlette", "uvicorn", "httptools", "prometheus-client", "opentelemetry-sdk",
)  # fmt: skip
# A store that does not answer within this time is reported as such.
ANSWER_S = 15.0
ROWS_MAX = 100
# Their texts are written by Holdfast and quote no user data.
_OWN_TEXTS = frozenset({
    ReadinessReason.STORE_FAILED, ReadinessReason.SCHEMA_MISMATCH, ReadinessReason.AUTHORITY_MISSING,
    ReadinessReason.AUTHORITY_STALE, ReadinessReason.AUTHORITY_EXPIRED, ReadinessReason.AUTHORITY_RESTORED,
    ReadinessReason.REPLAY_PENDING, ReadinessReason.NO_LIVE_WORKER, ReadinessReason.STORE_TIME,
})  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, universe=UNIVERSE_OF_STORE)


def run(args: argparse.Namespace) -> int:
    environment = dict(os.environ)
    stores, urls = _store_reports(args)
    document = {
        "versions": _versions(),
        "platform": _platform(),
        "limits": process_limits(),
        "configuration": configuration(environment),
        "stores": stores,
    }
    document = SecretFilter(environment, urls).clean(document)
    emit(args, document, _text(document))
    return EXIT_FAILED if any("error" in store for store in stores) else EXIT_OK


# -- this process --------------------------------------------------------------------------------


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "holdfast": __version__}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _platform() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "processors": os.cpu_count(),
        "implementation": platform.python_implementation(),
        "virtual_environment": sys.prefix != sys.base_prefix,
    }


# -- stores --------------------------------------------------------------------------------------


def _store_reports(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a report for each selected store, and their URLs with passwords."""
    try:
        choices = each_store(args)
        urls = [url_of(choice.args) for choice in choices]
    except HoldfastError as error:
        return [{"url": redact(args.store or ""), "error": _error_document(error)}], []
    if urls == [DEFAULT_URL] and not args.store and not (Path(DEFAULT_URL) / "data.mdb").exists():
        return [], urls
    return [_store_report(choice, url) for choice, url in zip(choices, urls, strict=True)], urls


def _store_report(choice: StoreChoice, url: str) -> dict[str, Any]:
    report: dict[str, Any] = {"url": redact(url)}
    parts: dict[str, Any] = {}
    # A store whose server or writer is stopped may not answer. The thread is then left behind.
    reader = threading.Thread(target=_read_parts, args=(choice.args, parts), daemon=True)
    reader.start()
    reader.join(ANSWER_S)
    if reader.is_alive():
        parts = {
            **parts,
            "error": {"code": "no_answer", "text": f"no answer within {ANSWER_S:g} s"},
        }
    report |= parts
    if _is_embedded(url):
        report["writer"] = writer_report(directory_of(url))
        report["writer_log"] = writer_log_tail(directory_of(url) / LOG_FILE)
    return report


def _read_parts(args: argparse.Namespace, parts: dict[str, Any]) -> None:
    try:
        with open_existing(args) as store:
            parts["health"] = _health(store)
            parts["clocks"] = _clocks(store)
            parts |= store.read(_work)
            parts["workers"] = _workers(store)
            parts["readiness"] = [
                _readiness(store, name) for name in store.read(catalog_queries.universes)[:ROWS_MAX]
            ]
    except HoldfastError as error:
        parts["error"] = _error_document(error)
    except OSError as error:
        parts["error"] = {"code": "io", "text": error.strerror or type(error).__name__}
    except Exception as error:
        # A damaged row. The text of a decoding error may quote it.
        parts["error"] = {"code": "internal", "text": type(error).__name__}


def _health(store: Store) -> dict[str, Any]:
    size, space = store_size(store), store_space(store)
    marker = store.read(_schema_version)
    return {
        "generation": store.generation,
        "commits": size.commit_no,
        "bytes": size.bytes,
        "disk_bytes": size.disk_bytes,
        "space": None if space is None else space._asdict(),
        "schema_version": marker,
    }


def _schema_version(txn: Txn) -> str:
    row = txn.get(schema.MARKER_KEY)
    return "" if row is None else ".".join(map(str, schema.decode_marker(row)))


def _clocks(store: Store) -> dict[str, Any]:
    store_ns, wall_ns = store.now_ns(), SYSTEM.wall_ns()
    return {
        "store_ns": store_ns,
        "wall_ns": wall_ns,
        "store_ahead_s": round((store_ns - wall_ns) / S, 3),
    }


def _work(txn: Txn) -> dict[str, Any]:
    """Return the counters of queues, tasks and flows. Dead letters are the counter `dead`."""
    queues = queue_counts(txn, ROWS_MAX + 1)
    tasks: list[dict[str, Any]] = []
    flows: list[dict[str, Any]] = []
    for universe in catalog_queries.universes(txn)[:ROWS_MAX]:
        for row in task_queries.list_queues(txn, universe)[:ROWS_MAX]:
            counts = _counts(row.counts)
            tasks.append({"universe": universe, "queue": row.queue, **counts})
        for flow in flow_list.list_counts(txn, universe)[:ROWS_MAX]:
            counts = _counts(flow.counts)
            flows.append({"universe": universe, "flow": flow.name, **counts})
    return {
        "queues": [{"queue": name, **_counts(counts)} for name, counts in queues[:ROWS_MAX]],
        "more_queues": len(queues) > ROWS_MAX,
        "tasks": tasks,
        "flows": flows,
    }


def _counts(counts: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(counts, name) for name in counts.__struct_fields__}


def _workers(store: Store) -> list[dict[str, Any]]:
    rows, now_ns = store.read(catalog_queries.worker_rows), store.now_ns()
    return [
        {
            "worker": row.record.worker,
            "universe": row.universe,
            "roles": list(row.record.roles),
            "live": row.live,
            "draining": row.record.draining,
            "assigned": row.assigned,
            "hosts": row.record.worlds,
            "heard_s": round(max(now_ns - row.record.heartbeat_ns, 0) / S, 1),
        }
        for row in rows[:ROWS_MAX]
    ]


def _readiness(store: Store, universe: str) -> dict[str, Any]:
    """Return the readiness of a universe. A world shows its id, because its name may be personal data."""
    snapshot = read_readiness(store, universe)
    answer: WhyAnswer = store.read(explain, universe, "universe", universe, SYSTEM.wall_ns())
    figures: list[LimitFigure] = store.read(list_figures, universe)
    return {
        "universe": universe,
        "ready": snapshot.ready,
        "blockers": [_blocker(blocker) for blocker in snapshot.reasons],
        "warnings": [_blocker(blocker) for blocker in snapshot.warnings],
        "why": sorted({one["code"] for one in answer["blockers"]}),
        "limits": [figure._asdict() for figure in figures[:ROWS_MAX]],
        "subjects": [
            {
                "type": subject.name.partition("/")[0],
                "subject": subject.subject,
                "blockers": [_blocker(blocker) for blocker in subject.reasons],
            }
            for subject in snapshot.subjects[:ROWS_MAX]
        ],
        "more_subjects": snapshot.subjects_omitted + max(len(snapshot.subjects) - ROWS_MAX, 0),
        "worlds": dict(snapshot.worlds),
    }


def _blocker(blocker: ReadinessBlocker) -> dict[str, Any]:
    return {
        "reason": blocker.reason.value,
        "code": blocker.code,
        "height": blocker.height,
        "since_ns": blocker.since_ns,
        "text": blocker.text if blocker.reason in _OWN_TEXTS else "",
    }


def _error_document(error: HoldfastError) -> dict[str, Any]:
    return {"code": error.code, "text": str(error)}


def _is_embedded(url: str) -> bool:
    try:
        return is_embedded(url)
    except HoldfastError:
        return False


# -- text ----------------------------------------------------------------------------------------


def _text(document: dict[str, Any]) -> str:
    lines: list[str] = []
    for name in ("versions", "platform", "limits", "configuration"):
        lines += [name, *_value_lines(document[name])]
    if not document["stores"]:
        lines.append("no store")
    for store in document["stores"]:
        lines.append(f"store {store['url']}")
        if "error" in store:
            lines.append(f"  cannot be read: {store['error']['text']}")
        for name, part in store.items():
            if name not in ("url", "error", "more_queues"):
                lines += [f"  {name}", *_value_lines(part, "    ")]
    return "\n".join(printable(line) for line in lines)


def _value_lines(value: Any, indent: str = "  ") -> list[str]:
    """Format a part of the report: one line for each entry, empty parts as `none`."""
    if isinstance(value, dict) and value:
        return [f"{indent}{name}: {_one_line(name, item)}" for name, item in value.items()]
    if isinstance(value, list) and value:
        return [f"{indent}{_one_line('', item)}" for item in value]
    return [f"{indent}none"]


def _one_line(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={_one_line(key, item)}" for key, item in value.items()) or "none"
    if name.endswith("bytes") and isinstance(value, int):
        return bytes_text(value)
    if value is None:
        return "none"
    if isinstance(value, str):
        return value or '""'
    return json.dumps(value, ensure_ascii=False)
