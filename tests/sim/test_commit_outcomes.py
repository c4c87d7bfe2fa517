"""Commit outcomes kept beside the PostgreSQL engine. They equal the outcomes of an embedded store, so that a
resent request gets the same answer on both."""

from random import Random

import msgspec
import pytest

from holdfast.clock import SimClock
from holdfast.sim.commit_outcomes import CommitOutcomes
from holdfast.store import engine as embedded
from holdfast.store.engine import StoreEngine
from holdfast.store.memory_backend import MemoryBackend
from holdfast.store.requests import CommitAnswer, CommitRequest

OUTCOMES_KEPT = 5
STEPS = 200


class OutcomesRig:
    """An embedded engine and the commit outcomes under test. `send` compares both."""

    def __init__(self) -> None:
        self.rows = MemoryBackend()
        self.clock = SimClock()
        self.engine = StoreEngine(self.rows, self.clock)
        self.outcomes = CommitOutcomes()
        self.requests = 0

    def request(self) -> CommitRequest:
        self.requests += 1
        key = b"k%d" % self.requests
        return CommitRequest(self.requests, b"client", self.rows.last_id(), puts={key: b""})

    def send(self, request: CommitRequest) -> CommitAnswer:
        """Commit a request and compare its outcome: looked up for a resent request, else added."""
        [answer] = self.engine.commit([request])
        kept = self.outcomes.lookup(request)
        if kept is None:
            request_id = (request.client, request.no)
            self.outcomes.add(self.rows.last_id(), {request_id: answer})
            assert answer.commit_no == self.engine.commit_no
        else:
            assert (kept.error, kept.commit_no) == (answer.error, answer.commit_no)
        return answer

    def resend(self, request: CommitRequest) -> CommitAnswer:
        return self.send(msgspec.structs.replace(request, resent=True))

    def take_over(self) -> None:
        self.engine = StoreEngine(self.rows, self.clock, bootstrap=False)
        self.outcomes.on_takeover()


@pytest.fixture(autouse=True)
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "OUTCOMES_KEPT", OUTCOMES_KEPT)


@pytest.mark.parametrize("seed", range(20))
def test_resent_request_gets_the_outcome_of_the_embedded_store(seed: int) -> None:
    rig, random = OutcomesRig(), Random(seed)
    sent: list[CommitRequest] = []
    unsent: list[CommitRequest] = []
    codes: set[str] = set()
    for _ in range(STEPS):
        choice = random.randrange(10)
        if choice < 4:
            request = rig.request()
            rig.send(request)
            sent.append(request)
        elif choice < 6:
            unsent.append(rig.request())
        elif choice == 6:
            rig.take_over()
        else:
            candidates = unsent if choice == 7 else sent
            if candidates:
                candidate = candidates[
                    -1 - random.randrange(min(len(candidates), 2 * OUTCOMES_KEPT))
                ]
                answer = rig.resend(candidate)
                codes.add("" if answer.error is None else answer.error[0])
    assert codes == {"", "commit_unknown"}


def test_unsent_request_is_applied_while_its_outcome_would_be_kept() -> None:
    rig = OutcomesRig()
    unsent = rig.request()
    for _ in range(OUTCOMES_KEPT - 1):
        rig.send(rig.request())
    assert rig.resend(unsent).error is None


def test_unsent_request_is_commit_unknown_after_its_outcome_would_be_dropped() -> None:
    rig = OutcomesRig()
    unsent = rig.request()
    for _ in range(OUTCOMES_KEPT + 1):
        rig.send(rig.request())
    answer = rig.resend(unsent)
    assert answer.error is not None
    assert answer.error[0] == "commit_unknown"
