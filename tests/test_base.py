"""The lowest layer: errors, clock, codec, transitions, retry."""

from __future__ import annotations

from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import codec, errors, retry
from holdfast.clock import ClockAnchor, S, SimClock, SystemClock, anchor_at_open
from holdfast.errors import Fenced, HoldfastError, IllegalTransition, Invalid
from holdfast.transitions import Transitions

MODULES = ("holdfast.errors", "holdfast.clock", "holdfast.codec", "holdfast.transitions")


def every_error() -> list[type[HoldfastError]]:
    kinds, level = [], [HoldfastError]
    while level:
        kinds += level
        level = [child for kind in level for child in kind.__subclasses__()]
    return [kind for kind in kinds if kind.__module__ == "holdfast.errors"]


# -- errors --------------------------------------------------------------------------------------


def test_every_error_has_a_unique_code() -> None:
    codes = [kind.code for kind in every_error()]
    assert len(codes) == len(set(codes))


def test_error_tree_in_the_module_docstring_is_complete() -> None:
    drawn = {
        line.split("──")[1].split()[0]
        for line in (errors.__doc__ or "").splitlines()
        if "──" in line
    }
    assert drawn == {kind.__name__ for kind in every_error()} - {"HoldfastError"}


def test_error_text_is_one_line_with_fields_and_hint() -> None:
    text = str(errors.StoreFull(path="p", why="No space left"))
    assert text == f"store_full: path='p' why='No space left' ({errors.StoreFull.hint})"
    assert "\n" not in text


@pytest.mark.parametrize("kind", every_error())
def test_error_round_trips_over_the_wire(kind: type[HoldfastError]) -> None:
    sent = codec.pack(errors.to_wire(kind(resource="r", held=3)))
    arrived = errors.from_wire(codec.unpack(sent))
    assert type(arrived) is kind
    assert arrived.fields == {"resource": "r", "held": 3}
    assert arrived.resource == "r"


def test_unknown_error_code_decodes_to_holdfast_error() -> None:
    arrived = errors.from_wire(["from_the_future", {"a": 1}])
    assert type(arrived) is HoldfastError
    assert arrived.fields == {"remote_code": "from_the_future", "a": 1}


# -- clock ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_h", [-48, -1, 1, 48])
def test_wall_clock_step_within_a_boot_does_not_move_store_time(step_h: int) -> None:
    clock = SimClock()
    first = anchor_at_open(clock, last=None, floor_ns=0)
    before_ns = first.now_ns(clock.boot_ns())
    clock.step_wall(step_h * 3600 * S)
    clock.advance(S)
    again = anchor_at_open(clock, last=first, floor_ns=before_ns)
    assert again.now_ns(clock.boot_ns()) == before_ns + S


@pytest.mark.parametrize("step_h", [-48, 0, 48])
def test_store_time_after_a_reboot_follows_the_wall_clock_and_never_decreases(step_h: int) -> None:
    clock = SimClock()
    first = anchor_at_open(clock, last=None, floor_ns=0)
    floor_ns = first.now_ns(clock.boot_ns())
    clock.reboot()
    clock.step_wall(step_h * 3600 * S)
    again = anchor_at_open(clock, last=first, floor_ns=floor_ns).now_ns(clock.boot_ns())
    assert again > floor_ns
    if step_h > 0:
        assert again >= clock.wall_ns()


def test_system_clock_has_a_boot_id_and_advances() -> None:
    clock = SystemClock()
    assert clock.boot_id() == clock.boot_id() != ""
    assert clock.boot_ns() <= clock.boot_ns()
    assert clock.entropy(8) != clock.entropy(8)
    assert ClockAnchor("b", 5).now_ns(10) == 15


# -- codec ---------------------------------------------------------------------------------------


class Sample(codec.Record):
    name: str
    count: int = 0


def test_codec_packs_equal_values_to_equal_bytes() -> None:
    assert codec.pack({"a": 1, "b": 2}) == codec.pack({"b": 2, "a": 1})
    assert codec.digest_of({"a": 1, "b": [1]}) == codec.digest_of({"b": [1], "a": 1})


def test_record_with_a_new_field_decodes_older_bytes() -> None:
    assert codec.unpack_as(Sample, codec.pack(["x"])) == Sample("x", 0)


@given(st.binary(max_size=64))
def test_unpack_of_random_bytes_returns_a_record_or_raises_invalid(data: bytes) -> None:
    try:
        codec.unpack_as(Sample, data)
        codec.unpack(data)
    except Invalid:
        pass


@given(st.lists(st.binary(max_size=8), max_size=4), st.lists(st.binary(max_size=8), max_size=4))
def test_digests_of_different_lists_differ(one: list[bytes], other: list[bytes]) -> None:
    assert (codec.digest(*one) == codec.digest(*other)) == (one == other)


# -- transitions -----------------------------------------------------------------------------------


class Light(Enum):
    RED = 1
    GREEN = 2
    BROKEN = 3


class Push(Enum):
    GO = 1
    STOP = 2
    HIT = 3


LIGHT = Transitions(
    "light",
    Light.RED,
    {
        (Light.RED, Push.GO): Light.GREEN,
        (Light.GREEN, Push.STOP): Light.RED,
        (Light.GREEN, Push.HIT): Light.BROKEN,
    },
)


def test_transitions_next_returns_the_state_or_raises_illegal_transition() -> None:
    legal = 0
    for state, event, after in LIGHT.pairs():
        if after is not None:
            assert LIGHT.next(state, event) is after
            assert LIGHT.allows(state, event)
            legal += 1
        else:
            with pytest.raises(IllegalTransition) as caught:
                LIGHT.next(state, event, owner="w1")
            assert caught.value.fields == {
                "machine": "light",
                "prior": state.name,
                "attempted": event.name,
                "owner": "w1",
            }
    assert legal == len(LIGHT.table) == 3


def test_transitions_report_terminal_and_unreachable_states() -> None:
    assert LIGHT.terminal == {Light.BROKEN}
    assert LIGHT.unreachable() == frozenset()
    island = Transitions("island", Light.RED, {(Light.RED, Push.GO): Light.GREEN})
    assert island.unreachable() == {Light.BROKEN}


def test_transitions_render_a_mermaid_diagram() -> None:
    drawing = LIGHT.mermaid()
    assert drawing.startswith("stateDiagram-v2\n    [*] --> RED")
    assert "    GREEN --> BROKEN: hit" in drawing
    assert drawing.endswith("    BROKEN --> [*]")


# -- retry -----------------------------------------------------------------------------------------


@given(st.integers(1, 10**6), st.floats(0, 1, exclude_max=True))
def test_backoff_delay_is_between_half_and_all_of_its_ceiling(attempt: int, unit: float) -> None:
    backoff = retry.Backoff(first_ns=100, factor=3.0, max_ns=10_000)
    ceiling = min(100 * 3.0 ** min(attempt - 1, 64), 10_000)
    assert ceiling / 2 - 1 <= backoff.delay_ns(attempt, unit) <= ceiling


@given(st.lists(st.integers(-(2**70), 2**70), max_size=4))
def test_jitter_is_deterministic_and_in_the_unit_interval(parts: list[int]) -> None:
    assert 0.0 <= retry.jitter(*parts) == retry.jitter(*parts) < 1.0


def test_jitter_of_consecutive_numbers_is_uniform() -> None:
    seen = sorted(retry.jitter(seq, 1) for seq in range(1000))
    assert seen[100] < 0.2
    assert seen[500] == pytest.approx(0.5, abs=0.1)
    assert seen[900] > 0.8


def test_error_fields_are_attributes() -> None:
    error = Fenced(held=3)
    assert error.held == 3
    with pytest.raises(AttributeError):
        _ = error.current
