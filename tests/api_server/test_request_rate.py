"""The rate limit of requests, for each token."""

from __future__ import annotations

import pytest

from holdfast.errors import Invalid
from holdfast.ops.http.request_rate import BUCKETS_MAX, RateExceeded, RequestRate
from tests.api_server.served_rig import ServedRig, rig, token_lines, token_of

__all__ = ["rig"]


def granted(rate: RequestRate, name: str, now_s: float, count: int) -> int:
    """The number of accepted requests among `count` requests at one time."""
    accepted = 0
    for _ in range(count):
        try:
            rate.take(name, now_s)
        except RateExceeded:
            break
        accepted += 1
    return accepted


def test_token_may_send_two_seconds_at_once_and_then_its_rate() -> None:
    rate = RequestRate(10)
    assert granted(rate, "a", 0.0, 100) == 20
    assert granted(rate, "a", 0.5, 100) == 5
    assert granted(rate, "a", 1_000.0, 100) == 20


def test_tokens_have_separate_rates() -> None:
    rate = RequestRate(1)
    assert granted(rate, "a", 0.0, 10) == 2
    assert granted(rate, "b", 0.0, 10) == 2


def test_refusal_names_the_time_of_the_next_request() -> None:
    rate = RequestRate(2)
    granted(rate, "a", 0.0, 4)
    with pytest.raises(RateExceeded) as caught:
        rate.take("a", 0.0)
    rate.take("a", caught.value.fields["retry_after_s"])


def test_buckets_of_silent_tokens_are_dropped() -> None:
    rate = RequestRate(1)
    for number in range(BUCKETS_MAX * 2):
        rate.take(str(number), number * 10.0)
    assert len(rate._buckets) <= BUCKETS_MAX


@pytest.mark.parametrize("per_s", [-1, 1e7, float("nan")])
def test_invalid_rate_is_refused(per_s: float) -> None:
    with pytest.raises(Invalid):
        RequestRate(per_s)


def test_token_above_its_rate_gets_429_and_other_tokens_do_not(rig: ServedRig) -> None:
    server = rig.serve(token_lines(loud="read", calm="read"), default="shop", rate_per_s=1)
    statuses = [rig.client(server, token_of("loud")).get("/v1/queues").status for _ in range(4)]
    assert statuses[:2] == [200, 200]
    assert 429 in statuses
    refused = rig.client(server, token_of("loud")).get("/v1/queues")
    assert (refused.document["code"], refused.document["retryable"]) == ("rate_limited", True)
    assert int(refused.headers["retry-after"]) >= 1
    assert rig.client(server, token_of("calm")).get("/v1/queues").status == 200
    assert rig.client(server, token_of("loud")).get("/healthz").status == 200
