"""Static types of the public API: mypy infers the state type of a world handle."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

MODULES = ("holdfast.app.app", "holdfast.app.world_handle")

# The text after `#:` is the expected mypy message for that line.
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
    reveal_type(ada.send(Deposited(5)))                 #: Revealed type is "holdfast.app.world_handle.Delivery"
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
def test_mypy_infers_world_state_types(tmp_path: Path) -> None:
    from mypy import api

    program = tmp_path / "bank.py"
    program.write_text(PROGRAM)
    output, errors, _ = api.run(
        ["--strict", "--no-error-summary", "--cache-dir", str(tmp_path / "cache"), str(program)]
    )
    assert not errors
    messages_by_line = {
        int(found[1]): found[2].replace("builtins.", "")
        for found in re.finditer(r"bank\.py:(\d+): \w+: (.*)", output)
    }
    expected = {
        number: line.partition("#: ")[2]
        for number, line in enumerate(PROGRAM.splitlines(), start=1)
        if "#: " in line
    }
    assert messages_by_line.keys() == expected.keys(), output
    for number, text in expected.items():
        assert text in messages_by_line[number], messages_by_line[number]
