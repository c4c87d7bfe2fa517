"""The outcomes that are kept beside an engine on PostgreSQL: those that an embedded store keeps, no more, no
fewer, so that whoever asks again is answered alike on both."""

from random import Random

import msgspec
import pytest

from holdfast.clock import SimClock
from holdfast.sim.outcomes import Outcomes
from holdfast.store import engine as embedded
from holdfast.store.engine import Answer, Engine, Request
from holdfast.store.memory import MemoryBackend

KEPT = 5
STEPS = 200


class Both:
    """An embedded store, and the outcomes that are kept beside another."""

    def __init__(self) -> None:
        self.rows = MemoryBackend()
        self.clock = SimClock()
        self.engine = Engine(self.rows, self.clock)
        self.outcomes = Outcomes()
        self.requests = 0

    def request(self) -> Request:
        self.requests += 1
        key = b"k%d" % self.requests
        return Request(self.requests, b"client", self.rows.last_id(), puts={key: b""})

    def send(self, request: Request) -> Answer:
        """As both do: looked up if it was sent before, else applied and kept."""
        [answer] = self.engine.commit([request])
        told = self.outcomes.of(request)
        if told is None:
            name = (request.client, request.no)
            self.outcomes.keep(self.rows.last_id(), {name: answer})
            assert answer.commit_no == self.engine.commit_no
        else:
            assert (told.error, told.commit_no) == (answer.error, answer.commit_no)
        return answer

    def send_again(self, request: Request) -> Answer:
        return self.send(msgspec.structs.replace(request, resent=True))

    def take_over(self) -> None:
        self.engine = Engine(self.rows, self.clock, bootstrap=False)
        self.outcomes.take_over()


@pytest.fixture(autouse=True)
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "OUTCOMES_KEPT", KEPT)


@pytest.mark.parametrize("seed", range(20))
def test_whoever_asks_again_is_answered_as_by_an_embedded_store(seed: int) -> None:
    both, random = Both(), Random(seed)
    sent: list[Request] = []
    lost: list[Request] = []
    codes: set[str] = set()
    for _ in range(STEPS):
        choice = random.randrange(10)
        if choice < 4:
            request = both.request()
            both.send(request)
            sent.append(request)
        elif choice < 6:
            lost.append(both.request())
        elif choice == 6:
            both.take_over()
        else:
            from_these = lost if choice == 7 else sent
            if from_these:
                again = from_these[-1 - random.randrange(min(len(from_these), 2 * KEPT))]
                answer = both.send_again(again)
                codes.add("" if answer.error is None else answer.error[0])
    assert codes == {"", "commit_unknown"}


def test_one_that_never_came_is_new_while_its_outcome_would_be_known() -> None:
    both = Both()
    lost = both.request()
    for _ in range(KEPT - 1):
        both.send(both.request())
    assert both.send_again(lost).error is None


def test_one_that_never_came_is_in_doubt_once_its_outcome_would_be_forgotten() -> None:
    both = Both()
    lost = both.request()
    for _ in range(KEPT + 1):
        both.send(both.request())
    answer = both.send_again(lost)
    assert answer.error is not None
    assert answer.error[0] == "commit_unknown"
