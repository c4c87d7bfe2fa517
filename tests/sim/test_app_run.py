"""A simulated run of any application: mail without a route, and the results of stubbed effects."""

import holdfast as hf
from holdfast.sim.app_run import run_app


class QuestionAsked(hf.Event):
    question: str


outcomes: dict[str, set[str]] = {}


@hf.effect("outside.answer", attempts=3, timeout_s=5)
def answer(call: hf.Call, question: str) -> int:
    raise AssertionError("the simulation replaces this effect")


class Questioner(hf.World):
    answers: int = 0

    @hf.on(QuestionAsked)
    def asked(self, event: QuestionAsked, cx: hf.Context) -> None:
        cx.do(answer, event.question)
        cx.post("Ledger", "main", "notes", event.question, universe="elsewhere")

    @hf.on(answer)
    def answered(self, receipt: hf.Receipt[int], cx: hf.Context) -> None:
        self.answers += 1
        key, outcome = receipt.intent_hash.hex(), f"{receipt.status} {receipt.value}"
        outcomes.setdefault(key, set()).add(outcome)


app = hf.App("askers", worlds=[Questioner])


def test_run_ends_with_mail_to_a_universe_that_is_not_in_the_store() -> None:
    assert run_app(app, 2).violation is None


def test_stub_returns_one_outcome_per_idempotency_key() -> None:
    outcomes.clear()
    results = [run_app(app, 5) for _ in range(2)]
    assert results[0] == results[1]
    assert results[0].crashes > 0
    assert outcomes
    assert all(len(found) == 1 for found in outcomes.values())
    statuses = {outcome.split()[0] for found in outcomes.values() for outcome in found}
    assert statuses == {"ok", "error"}
