"""`GET /v1/why/{kind}/{id}`: why a subject does not move. A world has two segments, a timer three."""

from __future__ import annotations

from holdfast.blockers.answer import WhyAnswer
from holdfast.blockers.explain import explain
from holdfast.clock import SYSTEM
from holdfast.ops.api.call import ApiCall
from holdfast.ops.api.endpoint import Endpoint, Scope


def why(call: ApiCall) -> WhyAnswer:
    return _explain(call, call.path["kind"], call.path["id"])


def why_world(call: ApiCall) -> WhyAnswer:
    return _explain(call, "world", f"{call.path['type']}/{call.path['name']}")


def why_effect_queue(call: ApiCall) -> WhyAnswer:
    return _explain(call, "queue", f"effects/{call.path['effect_kind']}")


def why_timer(call: ApiCall) -> WhyAnswer:
    return _explain(call, "timer", "/".join(call.path[part] for part in ("type", "name", "key")))


def _explain(call: ApiCall, kind: str, id: str) -> WhyAnswer:
    universe = id if kind == "universe" else call.universe
    answer: WhyAnswer = call.read(explain, universe, kind, id, SYSTEM.wall_ns())
    return answer


ENDPOINTS = (
    Endpoint("GET", "/v1/why/{kind}/{id}", Scope.READ, why, WhyAnswer, "Why a subject does not move"),
    Endpoint("GET", "/v1/why/world/{type}/{name}", Scope.READ, why_world, WhyAnswer, "Why a world does not move"),
    Endpoint("GET", "/v1/why/queue/effects/{effect_kind}", Scope.READ, why_effect_queue, WhyAnswer, "Why a queue of effects does not move"),
    Endpoint("GET", "/v1/why/timer/{type}/{name}/{key}", Scope.READ, why_timer, WhyAnswer, "Why a timer has not fired"),
)  # fmt: skip
