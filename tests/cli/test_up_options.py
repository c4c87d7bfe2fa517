"""Options of `holdfast up` that are validated before a store is opened."""

import argparse

import pytest

from holdfast.cli.up import policy_of
from holdfast.clock import S
from holdfast.config import DEDUPE_RETENTION_NS
from holdfast.errors import Invalid

MODULES = ("holdfast.cli.up",)


def _options(**overrides: float) -> argparse.Namespace:
    defaults = {"lease_s": 10.0, "stuck_s": 30.0, "stuck_max": 5, "unknown_event_s": 3600.0}
    return argparse.Namespace(**{**defaults, **overrides})


def test_up_unknown_event_s_is_at_most_the_dedupe_retention() -> None:
    longest = DEDUPE_RETENTION_NS / S
    assert policy_of(_options(unknown_event_s=longest)).unknown_event_s == longest
    with pytest.raises(Invalid) as refused:
        policy_of(_options(unknown_event_s=longest + 1))
    assert refused.value.fields["what"] == "--unknown-event-s"


@pytest.mark.parametrize("name", ["lease_s", "stuck_s", "stuck_max", "unknown_event_s"])
def test_up_duration_options_must_be_positive(name: str) -> None:
    with pytest.raises(Invalid):
        policy_of(_options(**{name: 0}))


@pytest.mark.parametrize("stuck_max", [1, 2])
def test_up_stuck_max_leaves_room_for_isolation(stuck_max: int) -> None:
    with pytest.raises(Invalid) as refused:
        policy_of(_options(stuck_max=stuck_max))
    assert refused.value.fields["what"] == "--stuck-max"
    assert policy_of(_options(stuck_max=3)).stuck_max == 3
