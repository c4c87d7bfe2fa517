"""`holdfast flows`: lists, shows and starts flows, sends them events, cancels, forks, resumes and redrives them.

A flow is named by its id, such as `f1-17`, or by `NAME/KEY`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import msgspec

from holdfast import codec
from holdfast.app import flow_start
from holdfast.blockers.answer import Blocker
from holdfast.blockers.flows import list_blockers
from holdfast.cli import EXIT_OK, EXIT_USAGE
from holdfast.cli.app_argument import app_errors_are_usage
from holdfast.cli.attempts import error_text
from holdfast.cli.flow_selection import (
    ENDED_STATES,
    OPEN_STATES,
    PARKED_STATES,
    add_flow,
    add_selection,
    dry_run,
    for_each,
    print_result,
    usage_error,
)
from holdfast.cli.output import emit, field_lines, printable, table, time_text
from holdfast.cli.selection import check_rate
from holdfast.cli.store_option import ONE_UNIVERSE, add_options, open_existing
from holdfast.cli.why import blocker_lines, blocker_text
from holdfast.clock import S
from holdfast.errors import Invalid, NotFound
from holdfast.flows import flow_list, fork, mailbox, operations, step_list
from holdfast.flows.flow_list import STATE_FILTERS, FlowPage, FlowRow, NameCounts
from holdfast.flows.model import FlowId, MailRow, StartedFlow
from holdfast.flows.redrive import redrive
from holdfast.flows.states import ENDED, FlowState
from holdfast.flows.step_list import FlowStep, StepPage
from holdfast.ops.app_loader import load_app
from holdfast.ops.flow_documents import (
    FlowReport,
    counts_summary,
    find_flow,
    flow_details,
    flow_summary,
    json_value,
    read_report,
    step_document,
)
from holdfast.store.api import Store, Txn
from holdfast.store.prefix_scan import iter_names
from holdfast.store.schema import Space

LIST_MAX = 20
# Steps of one list, unless `--limit` is given.
STEPS_MAX = 1_000
VALUE_CHARS_MAX = 4000
CELL_CHARS_MAX = 60
SELECTED_STATES = {"cancel": OPEN_STATES, "redrive": ENDED_STATES, "resume": PARKED_STATES}


class NoFlows(NotFound):
    hint = "no flow was started here yet; check --universe and --store"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listed = actions.add_parser("list", help="count flows by name, and list them, newest first")
    listed.add_argument(
        "--state", type=str.lower, choices=STATE_FILTERS, help="only flows in this state"
    )
    listed.add_argument("--name", metavar="NAME", help="only flows with this name")
    listed.add_argument("--tag", metavar="TAG", help="only flows with this tag")
    _add_page(listed, LIST_MAX, "flows")
    _add_store(listed)

    shown = actions.add_parser(
        "show",
        help="show one flow: its state with the reason, its arguments, its result or error",
    )
    add_flow(shown)
    _add_store(shown)

    steps = actions.add_parser("steps", help="list the steps of a flow with their outcomes")
    add_flow(steps)
    steps.add_argument(
        "--run", metavar="N", type=int, help="list the steps of this run (default: the last run)"
    )
    _add_page(steps, STEPS_MAX, "steps")
    _add_store(steps)

    why = actions.add_parser("why", help="show what a flow waits for, and what to do about it")
    add_flow(why)
    _add_store(why)

    _configure_start(actions)

    sent = actions.add_parser("send", help="send an event to a flow")
    add_flow(sent)
    sent.add_argument("type", metavar="TYPE", help="event type, as the application names it")
    sent.add_argument("event", metavar="JSON", help="fields of the event, as a JSON object")
    sent.add_argument("--key", metavar="K", default="", help="idempotency key of the event")
    sent.add_argument(
        "--app", metavar="MODULE:APP", required=True, help="application that declares the event"
    )
    _add_store(sent)

    forked = actions.add_parser(
        "fork", help="start a new flow that takes over recorded steps of this one"
    )
    add_flow(forked)
    forked.add_argument("key", metavar="KEY", help="key of the new flow")
    forked.add_argument(
        "--at",
        metavar="STEP",
        default="",
        help="take over the steps before this one, such as charge, charge#3 or undo:refund (default: all steps)",
    )
    _add_store(forked)

    cancelled = actions.add_parser("cancel", help="cancel flows; their compensations run")
    add_selection(cancelled, OPEN_STATES)
    _add_store(cancelled)

    resumed = actions.add_parser(
        "resume", help="run parked flows again, after code was deployed that fits their records"
    )
    add_selection(resumed, PARKED_STATES)
    _add_store(resumed)

    redriven = actions.add_parser(
        "redrive",
        help="run failed and dead flows again: after their recorded steps, or from the top after compensations",
    )
    add_selection(redriven, ENDED_STATES)
    _add_store(redriven)


def _configure_start(actions: Any) -> None:
    started = actions.add_parser("start", help="start a flow, or find the flow of its key")
    started.add_argument("name", metavar="NAME", help="flow, as the application names it")
    started.add_argument(
        "args",
        metavar="JSON",
        nargs="?",
        default="[]",
        help="its arguments: a JSON array by position, or a JSON object by name (default: none)",
    )
    started.add_argument("--key", metavar="K", help="idempotency key of the start")
    started.add_argument("--queue", metavar="Q", help="queue of the flow (default: as declared)")
    started.add_argument("--priority", metavar="N", type=int, help="priority in the queue")
    started.add_argument(
        "--timeout-s", metavar="S", type=float, help="end the flow after this time (seconds)"
    )
    started.add_argument("--tag", metavar="T", help="text by which lists find the flow")
    started.add_argument(
        "--app", metavar="MODULE:APP", required=True, help="application that declares the flow"
    )
    _add_store(started)


@app_errors_are_usage
def run(args: argparse.Namespace) -> int:
    selects = args.action in SELECTED_STATES
    if selects:
        if usage_error(args):
            return EXIT_USAGE
        check_rate(args)
    # An application that cannot be loaded is reported before the store is opened.
    needs_app = args.action in ("start", "send")
    app = load_app(args.app) if needs_app else None
    with open_existing(args) as store:
        if selects and args.dry_run:
            return dry_run(store, _universe_of(store, args), args, SELECTED_STATES[args.action])
        act = {
            "list": _list, "show": _show, "steps": _steps, "why": _why, "fork": _fork,
            "cancel": _cancel, "resume": _resume, "redrive": _redrive,
        }  # fmt: skip
        if app is not None:
            return (_start if args.action == "start" else _send)(store, args, app)
        return act[args.action](store, args)


# -- queries ---------------------------------------------------------------------------------------


def _list(store: Store, args: argparse.Namespace) -> int:
    universe = _universe_of(store, args)
    counts: list[NameCounts] = store.read(flow_list.list_counts, universe)
    if args.name:
        counts = [row for row in counts if row.name == args.name]
    page: FlowPage = store.read(
        flow_list.list_flows,
        universe,
        args.state or "",
        args.name or "",
        args.cursor,
        args.limit,
        args.tag or "",
    )
    document = {
        "universe": universe,
        "names": [counts_summary(row) for row in counts],
        "flows": [flow_summary(row) for row in page.rows],
        "cursor": page.cursor or None,
    }
    emit(args, document, "\n\n".join(_list_text(counts, page)))
    return EXIT_OK


def _list_text(counts: list[NameCounts], page: FlowPage) -> Iterator[str]:
    if counts:
        yield table(
            ("name", *STATE_FILTERS),
            [
                (row.name, *(getattr(row.counts, state) for state in STATE_FILTERS))
                for row in counts
            ],
        )
    if page.rows:
        yield table(
            ("id", "name", "key", "state", "run", "time", "step", "why"),
            [_table_row(row) for row in page.rows],
        )
    elif not page.cursor:
        yield "no such flows"
    if page.cursor:
        yield f"there may be more: --cursor {page.cursor}"


def _table_row(row: FlowRow) -> tuple[object, ...]:
    """Format a flow as a table row. The time is the end of an ended flow, else the start."""
    head = row.head
    return (
        str(row.id),
        row.body.spec.name,
        row.body.key or None,
        row.state.name,
        head.run,
        time_text(head.ended_ns or row.body.created_ns),
        head.step or None,
        _cell_text(head.error or head.code),
    )


def _show(store: Store, args: argparse.Namespace) -> int:
    universe = _universe_of(store, args)

    def read(txn: Txn) -> FlowReport:
        return read_report(txn, universe, find_flow(txn, universe, args.flow))

    report: FlowReport = store.read(read)
    document = {"universe": universe} | flow_details(report)
    emit(args, document, _show_text(args, report, document))
    return EXIT_OK


def _show_text(args: argparse.Namespace, report: FlowReport, document: dict[str, Any]) -> str:
    row = report.row
    head, spec = row.head, row.body.spec
    times = {
        "started": row.body.created_ns,
        "run started": head.run_started_ns if head.run > 1 else 0,
        "times out": document["timeout_ns"] or 0,
        "ended": head.ended_ns,
    }
    fork_of = document["fork_of"]
    if fork_of and row.body.fork_at:
        fork_of += f" before {row.body.fork_at}"
    pairs: list[tuple[str, object]] = [
        ("flow", f"{row.id} {spec.name}"),
        ("key", row.body.key),
        ("tag", row.body.tag),
        ("queue", spec.queue + (f", priority {spec.priority}" if spec.priority else "")),
        ("state", row.state.name),
        ("why", "; ".join(blocker_text(blocker) for blocker in report.blockers)),
        *((name, time_text(time_ns)) for name, time_ns in times.items() if time_ns),
        ("run", str(head.run) if head.run > 1 else ""),
        ("failures", f"{head.failures} of {spec.attempts}"),
        ("cancelled", "yes" if head.cancelled else ""),
        ("code", head.code),
        ("step", head.step),
        ("parent", document["parent"]),
        ("fork of", fork_of),
        ("redrive of", document["redrive_of"]),
        ("redriven by", document["redriven_by"]),
        ("arguments", _shorten(_call_text(document["args"], document["kwargs"]))),
        *((f"published {name}", _shorten(_json(value))) for name, value in _published(document)),
        ("inbox", _shorten(", ".join(_event_text(event) for event in document["events"]))),
    ]
    if "result" in document:
        pairs.append(("result", _shorten(_json(document["result"]))))
    text = field_lines([pair for pair in pairs if pair[1] not in (None, "")])
    # The reason of a parked flow is in its blocker.
    if row.state is not FlowState.PARKED:
        text += error_text(_error_text(head.error_type, head.error))
    if row.state.name.lower() in ENDED_STATES and not head.redriven_by:
        store_option = f" --store {args.store}" if args.store else ""
        text += f"\nretry it: holdfast flows redrive {row.id}{store_option}"
    return text


def _published(document: dict[str, Any]) -> list[tuple[str, Any]]:
    return list(document["published"].items())


def _event_text(event: dict[str, Any]) -> str:
    return f"{event['type']} {_json(event['event'])}"


def _steps(store: Store, args: argparse.Namespace) -> int:
    universe = _universe_of(store, args)

    if args.cursor and not args.cursor.isdecimal():
        raise Invalid(what="--cursor", found=args.cursor[:64], why="malformed cursor")
    if args.limit < 1:
        raise Invalid(what="--limit", found=args.limit, min=1, max=step_list.PAGE_STEPS_MAX)

    def read(txn: Txn) -> tuple[FlowRow, StepPage]:
        row = find_flow(txn, universe, args.flow)
        if args.run is not None and not 1 <= args.run <= row.head.run:
            raise Invalid(what="--run", found=args.run, min=1, max=row.head.run)
        after = int(args.cursor or 0)
        return row, step_list.list_steps(txn, universe, row.seq, args.run, after, args.limit)

    row, page = store.read(read)
    steps = page.steps
    document = {
        "universe": universe,
        "id": str(row.id),
        "run": row.head.run if args.run is None else args.run,
        "steps": [step_document(step) for step in steps],
        "cursor": str(page.next_after) if page.next_after else None,
    }
    header = ("position", "step", "state", "attempts", "took", "outcome")
    text = table(header, [_step_cells(step) for step in steps]) if steps else "no steps yet"
    if page.next_after:
        text += f"\nthere are more: --cursor {page.next_after}"
    emit(args, document, text)
    return EXIT_OK


def _step_cells(step: FlowStep) -> tuple[object, ...]:
    took_s = (step.ended_ns - step.began_ns) / S if step.ended_ns and step.began_ns else None
    if step.state == "open":
        article = "an" if step.kind == "effect" else "a"
        outcome = f"{article} {step.kind}, since {time_text(step.began_ns)}"
    elif step.state == "failed":
        outcome = _error_text(step.error_type, step.error) or step.code
    else:
        outcome = _json(json_value(step.value))
    return (
        step.position,
        f"{step.name}#{step.occurrence}",
        step.state,
        step.attempts or None,
        None if took_s is None else f"{took_s:.3f} s",
        _cell_text(outcome),
    )


def _why(store: Store, args: argparse.Namespace) -> int:
    universe = _universe_of(store, args)

    def read(txn: Txn) -> tuple[FlowRow, list[Blocker]]:
        row = find_flow(txn, universe, args.flow)
        return row, list_blockers(txn, universe, row.seq)

    row, blockers = store.read(read)
    document = {
        "universe": universe,
        "id": str(row.id),
        "state": row.state.name,
        "blockers": blockers,
        "error": row.head.error or None,
    }
    lines = [f"{row.id} is {row.state.name}"]
    for blocker in blockers:
        lines += blocker_lines(blocker)
    if row.head.state in ENDED and row.head.code:
        lines.append(_end_text(row))
    emit(args, document, "\n".join(printable(line) for line in lines))
    return EXIT_OK


def _end_text(row: FlowRow) -> str:
    head = row.head
    at_step = f" at step {head.step}" if head.step else ""
    error = _error_text(head.error_type, head.error)
    return f"{head.code}{at_step}{': ' if error else ''}{error}".partition("\n")[0]


def _error_text(error_type: str, error: str) -> str:
    """Format an error with its type. The text of some errors begins with it."""
    if not error_type or error.startswith(error_type):
        return error
    return f"{error_type}: {error}" if error else error_type


# -- changes ---------------------------------------------------------------------------------------


def _start(store: Store, args: argparse.Namespace, app: Any) -> int:
    flow = app.flows.get(args.name)
    if flow is None:
        raise Invalid(
            what="flow", name=args.name[:64], why="unknown to the app", known=sorted(app.flows)
        )
    try:
        given = codec.new_json_decoder(list[Any] | dict[str, Any]).decode(args.args)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(what="flow arguments", flow=args.name, why=str(error)) from None
    names = ("key", "queue", "priority", "timeout_s", "tag")
    call = flow.options(**{name: getattr(args, name) for name in names})
    packed = flow.pack((), given) if isinstance(given, dict) else flow.pack(tuple(given), {})
    universe = args.universe or app.universe
    started = flow_start.start_packed(store.transact, store.read, universe, call, packed)
    id = FlowId(started.generation, started.seq)
    document = {"id": str(id), "name": args.name, "key": call.key or None}
    emit(args, document, printable(f"{id} {args.name}{'/' + call.key if call.key else ''}"))
    return EXIT_OK


def _send(store: Store, args: argparse.Namespace, app: Any) -> int:
    universe = _universe_of(store, args)
    event_type = app.events.get(args.type)
    if event_type is None:
        raise Invalid(
            what="event", type=args.type[:64], why="unknown to the app", known=sorted(app.events)
        )
    try:
        event = codec.new_json_decoder(event_type.kind).decode(args.event)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(what="event", type=args.type, why=str(error)) from None
    name, value = app.encode_event(event)
    row: FlowRow = store.read(find_flow, universe, args.flow)
    mail = MailRow(name, value, key=args.key)
    number: int = store.transact(mailbox.send, universe, row.seq, row.body.generation, mail)
    document = {"id": str(row.id), "type": name, "number": number}
    emit(args, document, f"{name} sent to {row.id}, event {number} of its inbox")
    return EXIT_OK


def _fork(store: Store, args: argparse.Namespace) -> int:
    universe = _universe_of(store, args)
    row: FlowRow = store.read(find_flow, universe, args.flow)
    started: StartedFlow = store.transact(
        fork.fork, universe, row.seq, row.body.generation, args.key, args.at
    )
    new = FlowId(started.generation, started.seq)
    document = {
        "id": str(new),
        "name": row.body.spec.name,
        "key": args.key,
        "fork_of": str(row.id),
        "fork_at": args.at or None,
    }
    steps = f"the steps before {args.at}" if args.at else "all recorded steps"
    emit(
        args, document, printable(f"{new} {row.body.spec.name}/{args.key} has {steps} of {row.id}")
    )
    return EXIT_OK


def _cancel(store: Store, args: argparse.Namespace) -> int:
    universe = _universe_of(store, args)

    def cancel(row: FlowRow) -> bool:
        caused: bool = store.transact(operations.cancel, universe, row.seq, row.body.generation)
        return caused

    result = for_each(store, universe, args, OPEN_STATES, cancel)
    lines = [
        f"{flow} {'cancelled' if cancelled else 'had ended or was cancelled already'}"
        for flow, cancelled in result.made
    ]
    document = {
        "cancelled": [
            {"id": str(flow), "cancelled": bool(cancelled)} for flow, cancelled in result.made
        ]
    }
    return print_result(args, result, document, lines)


def _resume(store: Store, args: argparse.Namespace) -> int:
    universe = _universe_of(store, args)

    def resume(row: FlowRow) -> bool:
        resumed: bool = store.transact(operations.resume, universe, row.seq)
        return resumed

    result = for_each(store, universe, args, PARKED_STATES, resume)
    lines = [
        f"{flow} {'resumed' if resumed else 'was not parked'}" for flow, resumed in result.made
    ]
    document = {
        "resumed": [{"id": str(flow), "resumed": bool(resumed)} for flow, resumed in result.made]
    }
    return print_result(args, result, document, lines)


def _redrive(store: Store, args: argparse.Namespace) -> int:
    universe = _universe_of(store, args)
    for text in args.flows:
        _check_redrivable(store.read(find_flow, universe, text))

    def redrive_one(row: FlowRow) -> FlowId:
        started: StartedFlow = store.transact(redrive, universe, row.seq)
        return FlowId(started.generation, started.seq)

    result = for_each(store, universe, args, ENDED_STATES, redrive_one)
    made = [(flow, new) for flow, new in result.made if new is not None]
    lines = [
        f"{flow} continues after its recorded steps"
        if new == flow
        else f"{flow} → {new}, from the top"
        for flow, new in made
    ]
    document = {"redriven": [{"id": str(flow), "flow": str(new)} for flow, new in made]}
    return print_result(args, result, document, lines)


def _check_redrivable(row: FlowRow) -> None:
    """Refuse a flow before any named flow is redriven."""
    if row.state.name.lower() not in ENDED_STATES:
        raise Invalid(
            what="flow",
            flow=str(row.id),
            why="only FAILED and DEAD flows are redriven",
            state=row.state.name,
        )


# -- inside ----------------------------------------------------------------------------------------


def _call_text(args: list[Any], kwargs: dict[str, Any]) -> str:
    """Format arguments in the syntax of a call."""
    positional = [_json(value) for value in args]
    return ", ".join([*positional, *(f"{name}={_json(value)}" for name, value in kwargs.items())])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _shorten(text: str, chars_max: int = VALUE_CHARS_MAX) -> str:
    return text if len(text) <= chars_max else text[: chars_max - 1] + "…"


def _cell_text(text: str) -> str | None:
    return _shorten(text.partition("\n")[0], CELL_CHARS_MAX) or None


def _add_page(parser: argparse.ArgumentParser, limit: int, what: str) -> None:
    parser.add_argument(
        "--cursor", metavar="C", default="", help="continue a list from the cursor it printed"
    )
    parser.add_argument(
        "--limit",
        metavar="N",
        type=int,
        default=limit,
        help=f"list at most N {what} (default {limit})",
    )


def _add_store(parser: argparse.ArgumentParser) -> None:
    add_options(parser, universe=ONE_UNIVERSE)


def _universe_of(store: Store, args: argparse.Namespace) -> str:
    """Return the given universe, or the only universe that has flows."""

    def names(txn: Txn) -> list[str]:
        return list(iter_names(txn, (int(Space.FLOW),)))

    universes: list[str] = store.read(names)
    if args.universe:
        if args.universe not in universes:
            raise NoFlows(what="universe", universe=args.universe)
        return str(args.universe)
    if not universes:
        raise NoFlows(what="flows", url=store.url)
    if len(universes) > 1:
        raise Invalid(
            what="flows", why="in several universes: give --universe", universes=universes
        )
    return universes[0]
