"""pydantic models are accepted wherever a dataclass is: arguments, results, events, replies, state, step values."""

from __future__ import annotations

import datetime
import decimal
import enum
import pathlib
import subprocess
import sys
import uuid
from typing import Annotated, Any, Literal

import msgspec
import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel, field_validator

import holdfast as hf
from holdfast import codec
from holdfast.app.storable_types import NotStorable
from holdfast.errors import Invalid
from tests.aio.faces import LONG_S, Face

MODULES = ("holdfast.codec", "holdfast.app.storable_types")


class Colour(enum.Enum):
    RED = "red"


class Item(BaseModel):
    name: str
    cents: int = Field(gt=0)


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    tricks: list[str] = []


class Everything(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    id: uuid.UUID
    at: datetime.datetime
    day: datetime.date
    took: datetime.timedelta
    price: decimal.Decimal
    colour: Colour
    data: bytes
    pair: tuple[int, str]
    tags: frozenset[str] = frozenset()
    points: set[tuple[int, int]] = set()
    pet: Annotated[Cat | Dog, Field(discriminator="kind")] = Cat()
    pets: list[Cat | Dog] = []
    items: dict[str, Item] = {}
    limit: Annotated[int, Field(ge=1)] | None = None
    camel: str = Field("", alias="camelCase", serialization_alias="CAMEL")

    @field_validator("limit")
    @classmethod
    def even(cls, value: int | None) -> int | None:
        if value is not None and value % 2:
            raise ValueError("must be even")
        return value


class Names(RootModel[list[str]]):
    pass


class Basket(BaseModel):
    id: str
    items: list[Item] = []

    def total(self) -> int:
        return sum(item.cents for item in self.items)


class Total(BaseModel):
    cents: int


class BasketPaid(BaseModel):
    """An event."""

    order: Basket


class TotalAsked(hf.Event[Total]):
    pass


class Shop(hf.World):
    last: Basket | None = None
    orders: list[Basket] = msgspec.field(default_factory=list)
    total: Total = msgspec.field(default_factory=lambda: Total(cents=0))

    @hf.on(BasketPaid)
    def paid(self, event: BasketPaid, cx: hf.Context) -> None:
        self.last = event.order
        self.orders.append(event.order)
        self.total.cents += event.order.total()
        cx.do(ship, event.order)

    @hf.on(TotalAsked)
    def asked(self, event: TotalAsked, cx: hf.Context) -> None:
        cx.reply(self.total)


@hf.effect("ship")
def ship(call: hf.Call, order: Basket) -> Total:
    return Total(cents=order.total())


@hf.task
def add(order: Basket, item: Item | None = None) -> Basket:
    return Basket(id=order.id, items=[*order.items, *([item] if item else [])])


def price(order: Basket) -> Total:
    return Total(cents=order.total())


@hf.flow
async def check_out(order: Basket) -> Total:
    bigger = await hf.step(add, order, Item(name="bag", cents=5))
    return await hf.step(price, bigger)


app = hf.App("shop", worlds=[Shop], effects=[ship], tasks=[add], flows=[check_out])

ORDER = Basket(id="o-1", items=[Item(name="pen", cents=120)])
EVERYTHING = Everything(
    id=uuid.UUID(int=7),
    at=datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    day=datetime.date(2026, 1, 2),
    took=datetime.timedelta(seconds=3.5),
    price=decimal.Decimal("1.20"),
    colour=Colour.RED,
    data=b"\xff\x00",
    pair=(1, "one"),
    tags=frozenset({"b", "a", "c"}),
    points={(3, 4), (1, 2)},
    pet=Dog(tricks=["sit"]),
    pets=[Cat(lives=3), Dog()],
    items={"x": Item(name="x", cents=1)},
    limit=2,
    camelCase="x",
)


@pytest.fixture
def rt() -> Any:
    with app.open("memory:") as runtime:
        yield runtime
        runtime.check()


def test_task_takes_and_returns_models(face: Face) -> None:
    result = face.result(face.submit(add, ORDER, Item(name="bag", cents=5)))
    assert result == Basket(id="o-1", items=[*ORDER.items, Item(name="bag", cents=5)])


def test_task_refuses_a_value_that_the_model_refuses(face: Face) -> None:
    with pytest.raises(Invalid) as caught:
        face.submit(add, {"id": "o-1", "items": [{"name": "pen", "cents": 0}]})
    assert caught.value.why.startswith("Basket: items.0.cents: Input should be greater than 0")
    assert "\n" not in str(caught.value)


def test_flow_and_its_steps_use_models(face: Face) -> None:
    assert face.result(face.start(check_out, ORDER)) == Total(cents=125)


def test_world_uses_models_as_event_state_effect_argument_and_reply(
    face: Face, rt: hf.Runtime
) -> None:
    shop = rt.world(Shop, "main")
    face.send(shop, BasketPaid(order=ORDER))
    assert face.ask(shop, TotalAsked(), timeout=LONG_S) == Total(cents=120)
    state = face.state(shop)
    assert (state.last, state.orders, state.total) == (ORDER, [ORDER], Total(cents=120))
    assert shop.journal()[0].event == BasketPaid(order=ORDER)
    assert shop.fork("copy").state() == state


def test_state_with_models_is_restored_from_a_store_that_was_closed(tmp_path: Any) -> None:
    with app.open(str(tmp_path)) as rt:
        shop = rt.world(Shop, "main")
        rt.send_many([(shop, BasketPaid(order=ORDER))] * 300)
        assert shop.ask(TotalAsked(), timeout=LONG_S) == Total(cents=36_000)
    with app.open(str(tmp_path)) as rt:
        shop = rt.world(Shop, "main")
        assert shop.state(at=200).orders == [ORDER] * 200
        shop.send(BasketPaid(order=ORDER))
        assert shop.ask(TotalAsked(), timeout=LONG_S) == Total(cents=36_120)


def test_model_survives_encoding_and_decoding() -> None:
    packed = codec.pack_value(EVERYTHING)
    assert codec.convert(codec.unpack(packed), Everything) == EVERYTHING
    assert codec.unpack_as(Everything, packed) == EVERYTHING
    names = Names(["b", "a"])
    assert codec.convert(codec.unpack(codec.pack_value(names)), Names) == names


SCRIPT = """
import sys
from holdfast import codec
from tests.aio.test_pydantic_models import EVERYTHING
sys.stdout.write(codec.pack_value([EVERYTHING, {"x": EVERYTHING}]).hex())
"""


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_equal_models_have_equal_bytes_in_every_process(seed: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == codec.pack_value([EVERYTHING, {"x": EVERYTHING}]).hex()


# -- what the App refuses ------------------------------------------------------------------------


class WithPath(BaseModel):
    where: pathlib.Path


class WithNestedPath(BaseModel):
    inner: list[WithPath | Cat] = []


class WithIntKeys(BaseModel):
    by_id: dict[int, Item] = {}


class WithSet(BaseModel):
    names: set[str] = set()


class Branch(BaseModel):
    children: list[Branch] = []


class Foreign:
    pass


def world_with(hint: Any) -> Any:
    return msgspec.defstruct("Bad", [("field", hint, None)], bases=(hf.World,))


def task_with(hint: Any) -> Any:
    def work(value: Any) -> None: ...

    work.__annotations__ = {"value": hint, "return": None}
    return hf.task(work)


def effect_with(hint: Any) -> Any:
    def work(call: Any, value: Any) -> None: ...

    work.__annotations__ = {"value": hint, "return": None}
    return hf.effect("work")(work)


def flow_with(hint: Any) -> Any:
    async def work(value: Any) -> None: ...

    work.__annotations__ = {"value": hint, "return": None}
    return hf.flow(work)


DECLARE: dict[str, Any] = {
    "worlds": world_with,
    "tasks": task_with,
    "effects": effect_with,
    "flows": flow_with,
}


@pytest.mark.parametrize("where", DECLARE)
@pytest.mark.parametrize(
    ("hint", "path", "found"),
    [
        (WithPath, ".where", "pathlib.Path"),
        (WithNestedPath, ".inner.where", "pathlib.Path"),
        (WithIntKeys, ".by_id", "a dict with keys of IntType"),
        (Foreign, "", f"{__name__}.Foreign"),
    ],
)
def test_app_refuses_a_type_that_cannot_be_stored(
    where: str, hint: Any, path: str, found: str
) -> None:
    with pytest.raises(NotStorable) as caught:
        hf.App("bad", **{where: [DECLARE[where](hint)]})
    field = "field" if where == "worlds" else "value"
    assert (caught.value.field, caught.value.found) == (field + path, found)


def test_app_refuses_an_event_model_that_cannot_be_stored() -> None:
    with pytest.raises(NotStorable) as caught:
        hf.App("bad", events=[WithPath])
    assert (caught.value.what, caught.value.type, caught.value.field) == (
        "event",
        "WithPath",
        "where",
    )


def test_app_refuses_a_union_of_models_outside_of_a_model() -> None:
    for where in ("tasks", "flows", "effects", "worlds"):
        with pytest.raises(NotStorable):
            hf.App("bad", **{where: [DECLARE[where](Cat | Dog)]})


def test_app_refuses_sets_in_models_of_a_world_or_an_event() -> None:
    with pytest.raises(Invalid, match="order of a set"):
        hf.App("bad", worlds=[world_with(WithSet | None)])
    with pytest.raises(Invalid, match="order of a set"):
        hf.App("bad", events=[WithSet])


@pytest.mark.parametrize("hint", [Everything, Branch, Names, list[Item], Cat | None])
def test_app_accepts_models_that_can_be_stored(hint: Any) -> None:
    for where in ("tasks", "flows", "effects"):
        hf.App("good", **{where: [DECLARE[where](hint)]})


def test_holdfast_does_not_import_pydantic() -> None:
    program = (
        "import sys, holdfast as hf, msgspec\n"
        "@hf.task\ndef add(a: int) -> int: return a\n"
        "class E(hf.Event): n: int\n"
        "class W(hf.World):\n    n: int = 0\n"
        "    @hf.on(E)\n    def e(self, event, cx): cx.reply(event.n)\n"
        "with hf.App('a', tasks=[add], worlds=[W]).open('memory:') as rt:\n"
        "    assert rt.submit(add, 1).result(60) == 1\n"
        "    assert rt.world(W, 'w').ask(E(2)) == 2\n"
        "assert 'pydantic' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
