"""A hundred nondeterministic reducers that neither reply nor emit.

There are fifty sources of nondeterminism. Each is used in two placements: its value is a field of
the state, or is nested inside a field. A source of the first kind changes with every call. A source
of the second kind is fixed within a process and differs between processes.

    UNSTEADY_LOOKS   reads of every source before the first event; differs between processes
    UNSTEADY_DIR     directory of the sources that are files
"""

from __future__ import annotations

import email.utils
import enum
import functools
import itertools
import json
import operator
import os
import random
import secrets
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import holdfast as hf

LOOKS_VARIABLE = "UNSTEADY_LOOKS"
DIR_VARIABLE = "UNSTEADY_DIR"
WORDS = [f"word-{n}" for n in range(40)]
# Their sum depends on the order of addition.
FLOATS = {word: (-1) ** n * 10.0 ** (n % 17) / 3 for n, word in enumerate(WORDS)}


class NondeterminismSource(NamedTuple):
    name: str
    read: Callable[[], object]
    changes_per_call: bool


SOURCES: list[NondeterminismSource] = []


def changes_per_call(read: Callable[[], object]) -> Callable[[], object]:
    SOURCES.append(NondeterminismSource(read.__name__, read, changes_per_call=True))
    return read


def fixed_per_process(read: Callable[[], object]) -> Callable[[], object]:
    SOURCES.append(NondeterminismSource(read.__name__, read, changes_per_call=False))
    return read


def scratch_dir() -> Path:
    path = Path(os.environ.get(DIR_VARIABLE) or tempfile.gettempdir()) / f"unsteady-{os.getuid()}"
    path.mkdir(exist_ok=True)
    return path


# -- randomness ------------------------------------------------------------------------------------

changes_per_call(random.random)


@changes_per_call
def random_bits() -> object:
    return random.getrandbits(64)


@changes_per_call
def random_choice() -> object:
    return [random.choice(WORDS) for _ in range(10)]


@changes_per_call
def shuffled() -> object:
    return random.sample(WORDS, len(WORDS))


@changes_per_call
def unseeded() -> object:
    return random.Random().random()


@changes_per_call
def system_random() -> object:
    return random.SystemRandom().random()


@changes_per_call
def token() -> object:
    return secrets.token_hex(8)


@changes_per_call
def urandom() -> object:
    return os.urandom(8)


@changes_per_call
def uuid_4() -> object:
    return uuid.uuid4()


@changes_per_call
def uuid_1() -> object:
    return uuid.uuid1()


@changes_per_call
def message_id() -> object:
    return email.utils.make_msgid()


@changes_per_call
def temporary_name() -> object:
    return next(tempfile._get_candidate_names())  # type: ignore[attr-defined]


# -- clocks ----------------------------------------------------------------------------------------


@changes_per_call
def wall_clock() -> object:
    return time.time()


@changes_per_call
def wall_clock_ns() -> object:
    return time.time_ns()


@changes_per_call
def monotonic_clock() -> object:
    return time.monotonic_ns()


@changes_per_call
def performance_counter() -> object:
    return time.perf_counter_ns()


@changes_per_call
def processor_time() -> object:
    return time.process_time_ns()


@changes_per_call
def calendar() -> object:
    return datetime.now(UTC).isoformat()


@changes_per_call
def timestamp() -> object:
    return datetime.now(UTC).timestamp()


# -- process memory --------------------------------------------------------------------------------

_count = 0
_counter = itertools.count()
_kept: list[object] = []
_cache: dict[int, int] = {}
_ring = deque(range(1000))


@changes_per_call
def global_variable() -> object:
    global _count
    _count += 1
    return _count


@changes_per_call
def global_iterator() -> object:
    return next(_counter)


@changes_per_call
def mutable_default(seen: list[int] = []) -> object:  # noqa: B006
    seen.append(1)
    return len(seen)


class SharedCounter:
    calls = 0


@changes_per_call
def class_attribute() -> object:
    SharedCounter.calls += 1
    return SharedCounter.calls


@changes_per_call
def function_attribute() -> object:
    calls = getattr(function_attribute, "calls", 0) + 1
    function_attribute.calls = calls  # type: ignore[attr-defined]
    return calls


def _enclosing() -> Callable[[], object]:
    calls = 0

    def closure() -> object:
        nonlocal calls
        calls += 1
        return calls

    return closure


changes_per_call(_enclosing())


@changes_per_call
def module_cache() -> object:
    _cache[len(_cache)] = 1
    return len(_cache)


@changes_per_call
def rotated() -> object:
    _ring.rotate(1)
    return _ring[0]


def _numbers() -> Iterator[int]:
    yield from range(1_000_000)


_generator = _numbers()


@changes_per_call
def generator() -> object:
    return next(_generator)


class ReadCounter:
    def __init__(self) -> None:
        self.calls = 0

    def read(self) -> int:
        self.calls += 1
        return self.calls


_read_counter = ReadCounter()


@changes_per_call
def kept_instance() -> object:
    return _read_counter.read()


@changes_per_call
def identity() -> object:
    _kept.append(object())
    return id(_kept[-1])


@changes_per_call
def address_in_repr() -> object:
    _kept.append(object())
    return repr(_kept[-1])


@changes_per_call
def hash_of_an_object() -> object:
    _kept.append(object())
    return hash(_kept[-1])


# -- threads, processes and files ------------------------------------------------------------------


@changes_per_call
def thread_name() -> object:
    return threading.Thread().name


@changes_per_call
def written_by_a_thread() -> object:
    done: list[int] = []
    thread = threading.Thread(target=lambda: done.append(time.perf_counter_ns()))
    thread.start()
    thread.join()
    return done


@changes_per_call
def environment_counter() -> object:
    calls = int(os.environ.get("UNSTEADY_CALLS", "0")) + 1
    os.environ["UNSTEADY_CALLS"] = str(calls)
    return calls


@changes_per_call
def file_contents() -> object:
    path = scratch_dir() / "contents"
    with path.open("ab") as file:
        file.write(b".")
    return path.stat().st_size


@changes_per_call
def directory_listing() -> object:
    (scratch_dir() / f"file-{uuid.uuid4().hex}").touch()
    return sorted(os.listdir(scratch_dir()))


@fixed_per_process
def process_id() -> object:
    return os.getpid()


@fixed_per_process
def environment() -> object:
    return os.environ.get(LOOKS_VARIABLE, "")


@fixed_per_process
def arguments() -> object:
    return [*sys.argv, os.environ.get(LOOKS_VARIABLE)]


STARTED = time.time_ns()
DRAWN = random.random()


@fixed_per_process
def constant_of_a_module() -> object:
    return [STARTED, DRAWN]


@fixed_per_process
@functools.cache
def cached_forever() -> object:
    return time.time_ns()


# -- hashes of strings -----------------------------------------------------------------------------


@dataclass(frozen=True)
class FrozenPoint:
    name: str = "here"


class HashedColour(enum.Enum):
    RED = "red"


@fixed_per_process
def hash_of_a_string() -> object:
    return hash("word")


@fixed_per_process
def hash_of_values() -> object:
    return [hash(b"word"), hash(("a", "b")), hash(FrozenPoint()), hash(HashedColour.RED)]


@fixed_per_process
def order_of_a_set() -> object:
    return list(set(WORDS))


@fixed_per_process
def dict_from_a_set() -> object:
    return {word: at for at, word in enumerate(set(WORDS))}


@fixed_per_process
def text_of_a_set() -> object:
    return [str(frozenset(WORDS)), json.dumps(list(set(WORDS) | {"more"}))]


@fixed_per_process
def popped_from_a_set() -> object:
    words = set(WORDS)
    return [words.pop() for _ in range(5)] + [min(words, key=len), next(iter(words))]


@fixed_per_process
def floats_in_the_order_of_a_set() -> object:
    # Not by `sum`: since Python 3.12 it compensates for rounding, and the order no longer matters.
    return [
        functools.reduce(operator.add, (FLOATS[word] for word in set(WORDS[at:])))
        for at in range(8)
    ]


@fixed_per_process
def sorted_by_hash() -> object:
    return sorted(WORDS, key=hash)


# -- the worlds ------------------------------------------------------------------------------------


class Poked(hf.Event):
    n: int


class Steady(hf.World):
    """The base world without a source. Its replay must not diverge."""

    seen: str = ""
    found: dict[str, list[str]] = msgspec.field(default_factory=dict)

    @hf.on(Poked)
    def poked(self, event: Poked, cx: hf.Context) -> None:
        self.seen = repr(event.n)
        self.found[str(event.n)] = [repr(sorted(set(WORDS))), str(cx.uuid()), str(cx.now_ns)]


def _as_field(state: Steady, n: int, value: str) -> None:
    state.seen = value


def _inside(state: Steady, n: int, value: str) -> None:
    state.found.setdefault(str(n % 2), []).append(value)


PLACEMENTS: dict[str, Callable[[Steady, int, str], None]] = {"field": _as_field, "inside": _inside}


def _world(source: NondeterminismSource, placement: str) -> type[hf.World]:
    def poked(self: Any, event: Poked, cx: hf.Context) -> None:
        PLACEMENTS[placement](self, event.n, repr(source.read()))

    body = {"__module__": __name__, "poked": hf.on(Poked)(poked)}
    return type(Steady)(f"{source.name}__{placement}", (Steady,), body)


NONDETERMINISTIC_WORLDS: dict[str, tuple[NondeterminismSource, type[hf.World]]] = {
    f"{source.name}__{way}": (source, _world(source, way))
    for source in SOURCES
    for way in PLACEMENTS
}

app = hf.App(
    "unsteady",
    worlds=[Steady, *(kind for _, kind in NONDETERMINISTIC_WORLDS.values())],
    version="1",
)

for _ in range(int(os.environ.get(LOOKS_VARIABLE) or 0)):
    for _source in SOURCES:
        _source.read()
