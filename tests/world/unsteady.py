"""A hundred reducers that look at what no journal holds, and neither reply nor emit.

Fifty sources, each in two ways: the value is a field of the state, or lies deep inside it. A source
*moves* when a second look in the same process sees something else. The others are the same throughout
a process and differ between processes.

    UNSTEADY_LOOKS   how often this process has looked before its first event: another number in each
    UNSTEADY_DIR     where the sources that are files lie
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

LOOKS = "UNSTEADY_LOOKS"
DIR = "UNSTEADY_DIR"
WORDS = [f"word-{n}" for n in range(40)]
# Their sum depends on the order in which they are added.
FLOATS = {word: (-1) ** n * 10.0 ** (n % 17) / 3 for n, word in enumerate(WORDS)}


class Source(NamedTuple):
    name: str
    look: Callable[[], object]
    moves: bool


SOURCES: list[Source] = []


def moving(look: Callable[[], object]) -> Callable[[], object]:
    SOURCES.append(Source(look.__name__, look, moves=True))
    return look


def standing(look: Callable[[], object]) -> Callable[[], object]:
    SOURCES.append(Source(look.__name__, look, moves=False))
    return look


def place() -> Path:
    found = Path(os.environ.get(DIR) or tempfile.gettempdir()) / f"unsteady-{os.getuid()}"
    found.mkdir(exist_ok=True)
    return found


# -- chance ----------------------------------------------------------------------------------------

moving(random.random)


@moving
def random_bits() -> object:
    return random.getrandbits(64)


@moving
def random_choice() -> object:
    return [random.choice(WORDS) for _ in range(10)]


@moving
def shuffled() -> object:
    return random.sample(WORDS, len(WORDS))


@moving
def unseeded() -> object:
    return random.Random().random()


@moving
def system_random() -> object:
    return random.SystemRandom().random()


@moving
def token() -> object:
    return secrets.token_hex(8)


@moving
def urandom() -> object:
    return os.urandom(8)


@moving
def uuid_4() -> object:
    return uuid.uuid4()


@moving
def uuid_1() -> object:
    return uuid.uuid1()


@moving
def message_id() -> object:
    return email.utils.make_msgid()


@moving
def temporary_name() -> object:
    return next(tempfile._get_candidate_names())  # type: ignore[attr-defined]


# -- clocks ----------------------------------------------------------------------------------------


@moving
def wall_clock() -> object:
    return time.time()


@moving
def wall_clock_ns() -> object:
    return time.time_ns()


@moving
def monotonic_clock() -> object:
    return time.monotonic_ns()


@moving
def performance_counter() -> object:
    return time.perf_counter_ns()


@moving
def processor_time() -> object:
    return time.process_time_ns()


@moving
def calendar() -> object:
    return datetime.now(UTC).isoformat()


@moving
def timestamp() -> object:
    return datetime.now(UTC).timestamp()


# -- memory of a process ---------------------------------------------------------------------------

_count = 0
_counter = itertools.count()
_kept: list[object] = []
_cache: dict[int, int] = {}
_ring = deque(range(1000))


@moving
def global_variable() -> object:
    global _count
    _count += 1
    return _count


@moving
def global_iterator() -> object:
    return next(_counter)


@moving
def mutable_default(seen: list[int] = []) -> object:  # noqa: B006
    seen.append(1)
    return len(seen)


class Shared:
    calls = 0


@moving
def class_attribute() -> object:
    Shared.calls += 1
    return Shared.calls


@moving
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


moving(_enclosing())


@moving
def module_cache() -> object:
    _cache[len(_cache)] = 1
    return len(_cache)


@moving
def rotated() -> object:
    _ring.rotate(1)
    return _ring[0]


def _numbers() -> Iterator[int]:
    yield from range(1_000_000)


_generator = _numbers()


@moving
def generator() -> object:
    return next(_generator)


class Meter:
    def __init__(self) -> None:
        self.calls = 0

    def read(self) -> int:
        self.calls += 1
        return self.calls


_meter = Meter()


@moving
def kept_instance() -> object:
    return _meter.read()


@moving
def identity() -> object:
    _kept.append(object())
    return id(_kept[-1])


@moving
def address_in_repr() -> object:
    _kept.append(object())
    return repr(_kept[-1])


@moving
def hash_of_an_object() -> object:
    _kept.append(object())
    return hash(_kept[-1])


# -- threads, processes and files ------------------------------------------------------------------


@moving
def thread_name() -> object:
    return threading.Thread().name


@moving
def written_by_a_thread() -> object:
    done: list[int] = []
    thread = threading.Thread(target=lambda: done.append(time.perf_counter_ns()))
    thread.start()
    thread.join()
    return done


@moving
def environment_counter() -> object:
    calls = int(os.environ.get("UNSTEADY_CALLS", "0")) + 1
    os.environ["UNSTEADY_CALLS"] = str(calls)
    return calls


@moving
def file_contents() -> object:
    path = place() / "contents"
    with path.open("ab") as file:
        file.write(b".")
    return path.stat().st_size


@moving
def directory_listing() -> object:
    (place() / f"file-{uuid.uuid4().hex}").touch()
    return sorted(os.listdir(place()))


@standing
def process_id() -> object:
    return os.getpid()


@standing
def environment() -> object:
    return os.environ.get(LOOKS, "")


@standing
def arguments() -> object:
    return [*sys.argv, os.environ.get(LOOKS)]


STARTED = time.time_ns()
DRAWN = random.random()


@standing
def constant_of_a_module() -> object:
    return [STARTED, DRAWN]


@standing
@functools.cache
def cached_forever() -> object:
    return time.time_ns()


# -- hashes of strings -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    name: str = "here"


class Colour(enum.Enum):
    RED = "red"


@standing
def hash_of_a_string() -> object:
    return hash("word")


@standing
def hash_of_values() -> object:
    return [hash(b"word"), hash(("a", "b")), hash(Point()), hash(Colour.RED)]


@standing
def order_of_a_set() -> object:
    return list(set(WORDS))


@standing
def dict_from_a_set() -> object:
    return {word: at for at, word in enumerate(set(WORDS))}


@standing
def text_of_a_set() -> object:
    return [str(frozenset(WORDS)), json.dumps(list(set(WORDS) | {"more"}))]


@standing
def popped_from_a_set() -> object:
    words = set(WORDS)
    return [words.pop() for _ in range(5)] + [min(words, key=len), next(iter(words))]


@standing
def floats_in_the_order_of_a_set() -> object:
    # Not by `sum`: since Python 3.12 it compensates for rounding, and the order no longer matters.
    return [
        functools.reduce(operator.add, (FLOATS[word] for word in set(WORDS[at:])))
        for at in range(8)
    ]


@standing
def sorted_by_hash() -> object:
    return sorted(WORDS, key=hash)


# -- the worlds ------------------------------------------------------------------------------------


class Poked(hf.Event):
    n: int


class Steady(hf.World):
    """What all of them are without their source: it must not be found."""

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


WAYS: dict[str, Callable[[Steady, int, str], None]] = {"field": _as_field, "inside": _inside}


def _world(source: Source, way: str) -> type[hf.World]:
    def poked(self: Any, event: Poked, cx: hf.Context) -> None:
        WAYS[way](self, event.n, repr(source.look()))

    body = {"__module__": __name__, "poked": hf.on(Poked)(poked)}
    return type(Steady)(f"{source.name}__{way}", (Steady,), body)


UNSTEADY: dict[str, tuple[Source, type[hf.World]]] = {
    f"{source.name}__{way}": (source, _world(source, way)) for source in SOURCES for way in WAYS
}

app = hf.App("unsteady", worlds=[Steady, *(kind for _, kind in UNSTEADY.values())], version="1")

for _ in range(int(os.environ.get(LOOKS) or 0)):
    for _source in SOURCES:
        _source.look()
