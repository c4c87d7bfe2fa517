"""The pages of the console with one subject each, for tests that open every page."""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.effects import budget
from holdfast.effects.budget import MONEY, Cost
from holdfast.ledger import runs
from holdfast.ledger.run_policy import ErrorClass
from holdfast.ops import pending_work, verify_report
from tests.api.rig import ApiRig
from tests.cli.stage_runs import StageRun
from tests.console.rig import UNIVERSE, ConsoleRig, wait_until
from tests.console.shop import app, order, print_page, slow, trip

LISTS = (
    "now", "work", "worlds", "effects", "errors", "dead", "schedules", "timers", "queues", "money", "workers", "stages",
    "jobs", "deploy", "audit",
)  # fmt: skip


def open_subjects(shop: ConsoleRig) -> dict[str, tuple[str, ...]]:
    """Return the parts of the address of every page, by its name. Each page has something to show."""
    return {name: (name,) for name in LISTS} | _subjects(shop)


def _subjects(shop: ConsoleRig) -> dict[str, tuple[str, ...]]:
    runtime, api = shop.runtime, ApiRig(shop.store, UNIVERSE)
    failed = runtime.submit(print_page, -61)
    running = runtime.submit(slow, 600.0)
    flow = runtime.start(trip.options(key="page-trip"), "tea")
    wait_until(lambda: runtime.why(failed)["state"] == "failed")
    wait_until(lambda: runtime.why(flow)["state"] == "waiting")
    shop.store.transact(budget.reserve, UNIVERSE, "w-pages", "k", [Cost(MONEY, 5)])
    [effect, *_] = shop.store.read(pending_work.intents_in_state, UNIVERSE, "shop.quote", "dead")
    [group, *_] = api.pages("/v1/errors", kind="task")
    api.post("/v1/jobs", {"action": "tasks.redrive", "selection": {"state": "dead"}})
    save_report(shop)
    return {
        "task failed": ("tasks", failed.id),
        "task running": ("tasks", running.id),
        "flow waiting": ("flows", flow.id),
        "flow failed": ("flows", runtime.flow(order, key="o-2").id),
        "world": ("worlds", "Customer", "ada"),
        "effect": ("effects", effect.intent.intent_hash.hex()),
        "letters": ("dead", f"{UNIVERSE}/failed-events"),
        "letter": ("dead", f"{UNIVERSE}/effects/shop.quote", str(effect.seq)),
        "group": ("errors", "task", group["group"]),
        "schedule": ("schedules", "nightly"),
        "stage": ("stages", measured_run(shop).run_id),
    }


def measured_run(shop: ConsoleRig, name: str = "labels") -> StageRun:
    """A finished run with failed rows and with the series of all plots."""
    run = StageRun(shop.store, name, 50, {3: (ErrorClass.INPUT, f"ValueError: no label of {name}")})
    run.finish()
    progress = shop.store.read(runs.get_progress, run.run_id)
    assert progress is not None
    series = [(at * 1_000, at * 9, at // 2, at // 3, 4, at / 10) for at in range(6)]
    shop.store.transact(
        runs.put_progress,
        run.run_id,
        replace(progress, series=series, latency_log2_us=[0] * 10 + [5, 7], failed_by_class=[0, 1]),
    )
    return run


def save_report(shop: ConsoleRig, *, world: str = "Customer/ada", text: str = "cents: 1") -> None:
    counted = ("worlds", "steps", "compared", "not_compared", "flows")
    document = dict.fromkeys(counted, 7) | {"sound": False, "differences": [], "parks": []}
    document["findings"] = [{"world": world, "height": 2, "code": "replay_diverged", "text": text}]
    document["flow_findings"] = [
        {"flow": "f1-1", "name": world, "key": "", "state": "RUNNING", "parks": True, "step": text,
         "code": "replay_diverged", "text": text, "removed": []}
    ]  # fmt: skip
    report = verify_report.make_report(
        document, shop.store.now_ns(), UNIVERSE, "shop:app", verify_report.build_of(app)
    )
    shop.store.transact(verify_report.save, report)
