"""Typed end to end: what a handle's state has is known to a type checker."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

MODULES = ("holdfast.app.app", "holdfast.app.handle")

# What mypy must say of a line stands behind it.
PROGRAM = """
import holdfast as hf

class Deposited(hf.Event):
    amount: int

class Account(hf.World):
    balance: int = 0

    @hf.on(Deposited)
    def deposited(self, event: Deposited, cx: hf.Context) -> None:
        self.balance += event.amount
        cx.reply(self.balance)

app = hf.App("bank", worlds=[Account])

with app.open("./data") as rt:
    ada = rt.world(Account, "ada")
    reveal_type(ada.state().balance)                    #: Revealed type is "int"
    reveal_type(ada.state(at=3))                        #: Revealed type is "bank.Account"
    reveal_type(ada.send(Deposited(5)))                 #: Revealed type is "holdfast.app.handle.Delivery"
    reveal_type(ada.fork("what-if").state().balance)    #: Revealed type is "int"
    ada.state().balanec                                 #: "Account" has no attribute "balanec"
    Deposited("5")                                      #: incompatible type "str"; expected "int"
    rt.world(int, "ada")                                #: cannot be "int"
    rt.world(Account, 5)                                #: incompatible type "int"; expected "str"

@hf.upcast(Deposited, 1)
def renamed(fields: dict[str, object]) -> dict[str, object]:
    return {"amount": fields["sum"]}

hf.App("bank", worlds=[Account], upcasts=[renamed])

@hf.effect("a")
def plain(call: hf.Call, what: str) -> int: raise NotImplementedError
@hf.effect("b", attempts=2)
async def awaited(call: hf.Call, what: str) -> int: raise NotImplementedError
@hf.effect("c")
def costed(call: hf.Call, what: str) -> hf.Costed[int]: raise NotImplementedError
@hf.effect("d")
async def both(call: hf.Call, what: str) -> hf.Costed[int]: raise NotImplementedError
reveal_type(plain)                                      #: what: str], int]"
reveal_type(awaited)                                    #: what: str], int]"
reveal_type(costed)                                     #: what: str], int]"
reveal_type(both)                                       #: what: str], int]"
"""


@pytest.mark.slow
def test_a_type_checker_knows_the_state_of_a_world(tmp_path: Path) -> None:
    from mypy import api

    program = tmp_path / "bank.py"
    program.write_text(PROGRAM)
    told, errors, _ = api.run(
        ["--strict", "--no-error-summary", "--cache-dir", str(tmp_path / "cache"), str(program)]
    )
    assert not errors
    said = {
        int(found[1]): found[2].replace("builtins.", "")
        for found in re.finditer(r"bank\.py:(\d+): \w+: (.*)", told)
    }
    expected = {
        number: line.partition("#: ")[2]
        for number, line in enumerate(PROGRAM.splitlines(), start=1)
        if "#: " in line
    }
    assert said.keys() == expected.keys(), told
    for number, text in expected.items():
        assert text in said[number], said[number]
