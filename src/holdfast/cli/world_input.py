"""`holdfast worlds create` and `holdfast worlds send`: a new world, and an event for a world."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from holdfast import codec, traces
from holdfast.cli.output import emit, printable
from holdfast.cli.store_option import ONE_UNIVERSE, add_options
from holdfast.cli.why import universe_of
from holdfast.errors import Invalid
from holdfast.messages import event_ingress
from holdfast.ops import catalog_queries, world_documents, world_operations
from holdfast.ops.api.worlds import sent_event
from holdfast.ops.app_loader import load_app
from holdfast.store.api import Store
from holdfast.world import catalog, ingress
from holdfast.world.ingress import WorldAddress


def configure(actions: Any) -> None:
    made = actions.add_parser("create", help="create a world, or find the world of this name")
    sent = actions.add_parser("send", help="send an event to a world; a missing world is created")
    for action in (made, sent):
        action.add_argument("world", metavar="TYPE/NAME", help="type and name of the world")
        add_options(action, universe=ONE_UNIVERSE)
    sent.add_argument("type", metavar="EVENT", help="event type, as the application names it")
    sent.add_argument("event", metavar="JSON", help="fields of the event, as a JSON object")
    sent.add_argument("--key", metavar="K", help="idempotency key of the event")
    sent.add_argument(
        "--app", metavar="MODULE:APP", required=True, help="application that declares the event"
    )


def create_world(store: Store, args: argparse.Namespace) -> None:
    universe, (type, name) = universe_of(store, args, "worlds"), _address(args.world)
    record = world_operations.world_create(store, universe, type, name)
    document = world_documents.world_document(store.read(catalog_queries.world, record))
    emit(args, msgspec.to_builtins(document), printable(f"{type}/{name} is {record.world_id}"))


def send_event(store: Store, args: argparse.Namespace) -> None:
    app, universe = load_app(args.app), universe_of(store, args, "worlds")
    type, name = _address(args.world)
    event_type = app.events.get(args.type)
    if event_type is None:
        known = sorted(app.events)
        raise Invalid(what="event", type=args.type[:64], why="unknown to the app", known=known)
    try:
        event = codec.new_json_decoder(event_type.kind).decode(args.event)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(what="event", type=args.type, why=str(error)) from None
    event_name, value = app.check_event(type, event)
    catalog.check_address(universe, type, name)
    if args.key is not None:
        catalog.check_text("key", args.key)
    to = WorldAddress(universe, type, name, world_operations.new_world_id())
    message = event_ingress(event_name, value, correlation_id=None)
    delivered = store.transact(
        ingress.deliver, to, ingress.user_key(args.key), message, traces.current()
    )
    document = sent_event(delivered)
    text = printable(f"{event_name} sent to {type}/{name}, message {document.seq} of its inbox")
    emit(args, msgspec.to_builtins(document), text)


def _address(text: str) -> tuple[str, str]:
    type, slash, name = text.partition("/")
    if not (type and slash and name):
        raise Invalid(what="world", found=text[:64], expected="TYPE/NAME")
    return type, name
