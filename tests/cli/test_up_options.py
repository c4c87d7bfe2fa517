"""Options of `holdfast up` that are refused before a store is opened."""

import argparse

import pytest

from holdfast.cli.up import policy_of
from holdfast.clock import S
from holdfast.config import DEDUPE_RETENTION_NS
from holdfast.errors import Invalid

MODULES = ("holdfast.cli.up",)


def _options(**given: float) -> argparse.Namespace:
    usual = {"lease_s": 10.0, "stuck_s": 30.0, "stuck_max": 5, "unknown_event_s": 3600.0}
    return argparse.Namespace(**{**usual, **given})


def test_unknown_items_wait_at_most_as_long_as_keys_are_kept() -> None:
    longest = DEDUPE_RETENTION_NS / S
    assert policy_of(_options(unknown_event_s=longest)).unknown_event_s == longest
    with pytest.raises(Invalid) as refused:
        policy_of(_options(unknown_event_s=longest + 1))
    assert refused.value.fields["what"] == "--unknown-event-s"


@pytest.mark.parametrize("name", ["lease_s", "stuck_s", "stuck_max", "unknown_event_s"])
def test_a_time_of_zero_is_refused(name: str) -> None:
    with pytest.raises(Invalid):
        policy_of(_options(**{name: 0}))
