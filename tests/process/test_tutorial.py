"""The tutorials and the bank example. The blocks of a tutorial are run and their output is compared.

A block `python FILE` is written to that file. All blocks `sh` run in one shell. A block `text` is the expected
output of the block before it, where `…` matches any text and times may differ.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from tests.process.watch import assert_no_client_left, until
from tests.processes import ROOT, Proc

TUTORIALS = [ROOT / "docs" / name for name in ("tutorial-worlds.md", "tutorial-flows.md")]
each_tutorial = pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda page: page.name)
EXAMPLE = ROOT / "examples" / "bank" / "app.py"

TUTORIAL_S = 100
MARK = "--- block"


class PageBlock(NamedTuple):
    kind: str
    file: str
    text: str


def blocks_of(markdown: str) -> list[PageBlock]:
    found = re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```$", markdown, re.MULTILINE | re.DOTALL)
    return [PageBlock(*groups) for groups in found]


def script_of(blocks: list[PageBlock]) -> str:
    """A script of all `sh` blocks in order. It prints a line with the block's number before each block."""
    lines = ["set -eu"]
    for at, block in enumerate(blocks):
        if block.kind == "sh":
            lines += [f"echo '{MARK} {at}'", block.text]
    return "\n".join(lines)


def printed_by(lines: list[str]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    at = -1
    for line in lines:
        if line.startswith(MARK):
            at = int(line.split()[-1])
            found[at] = []
        else:
            found[at].append(line)
    return found


def pattern_of(text: str) -> str:
    return ".*".join(re.escape(part) for part in without_times(text).split("…"))


def without_times(text: str) -> str:
    """The text with dates and times replaced."""
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "(time)", text.rstrip())


@each_tutorial
def test_every_block_of_the_tutorial_is_executed(tutorial: Path) -> None:
    text = tutorial.read_text(encoding="utf-8")
    blocks = blocks_of(text)
    assert len(blocks) == text.count("```") // 2
    assert {block.kind for block in blocks} == {"python", "sh", "text"}
    assert all(block.file for block in blocks if block.kind == "python")
    for before, block in pairwise(blocks):
        assert block.kind != "text" or before.kind == "sh"


@pytest.mark.slow
@pytest.mark.timeout(TUTORIAL_S + 20)
@each_tutorial
def test_tutorial_examples_print_the_documented_output(tutorial: Path, tmp_path: Path) -> None:
    blocks = blocks_of(tutorial.read_text(encoding="utf-8"))
    for block in blocks:
        if block.kind == "python":
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with Proc.spawn(
        ["bash", "-c", script_of(blocks)], ready=None, cwd=tmp_path, env={"PATH": path}
    ) as shell:
        code = shell.wait(TUTORIAL_S)
        printed = printed_by(shell.lines)
        assert code == 0, f"block {max(printed)} failed:\n" + "\n".join(shell.errors)
    for at, (block, after) in enumerate(pairwise(blocks)):
        if block.kind == "sh" and after.kind == "text":
            printed_text = without_times("\n".join(printed[at]))
            assert re.fullmatch(pattern_of(after.text), printed_text), (
                f"block {at} printed:\n{printed_text}"
            )
    assert_no_client_left(tmp_path / "data")


# -- the example ---------------------------------------------------------------------------------


@pytest.fixture
def bank() -> ModuleType:
    spec = importlib.util.spec_from_file_location("holdfast_example_bank", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_bank_payment_moves_money_between_accounts(bank: ModuleType) -> None:
    with bank.app.open("memory:") as runtime:
        ada, bob = (runtime.world(bank.Account, name) for name in ("ada", "bob"))
        ada.send(bank.Deposited(500))
        assert ada.ask(bank.PaymentOrdered("bob", 120)) == "paid"
        assert ada.ask(bank.PaymentOrdered("bob", 999)) == "refused"
        assert ada.ask(bank.PaymentOrdered("bob", -5)) == "refused"
        assert ada.ask(bank.BalanceAsked()) == 380
        assert bob.ask(bank.BalanceAsked()) == 120


def test_bank_daily_limit_is_reset_at_the_end_of_the_day(bank: ModuleType) -> None:
    with bank.app.open("memory:") as runtime:
        ada = runtime.world(bank.Account, "ada")
        ada.send(bank.Deposited(5_000))
        assert ada.ask(bank.PaymentOrdered("bob", bank.DAILY_LIMIT)) == "paid"
        assert ada.ask(bank.PaymentOrdered("bob", 1)) == "refused"
        timers = [entry.height for entry in ada.journal() if len(entry.step.emitted) == 3]
        assert timers == [2], "the first payment of a day sets its end, and only that one"
        ada.send(bank.DayEnded())
        assert ada.ask(bank.PaymentOrdered("bob", 1)) == "paid"


def test_bank_audit_receives_every_payment(bank: ModuleType) -> None:
    with bank.app.open("memory:") as runtime:
        for name in ("ada", "bob"):
            account = runtime.world(bank.Account, name)
            account.send(bank.Deposited(100))
            for amount in (10, 30):
                assert account.ask(bank.PaymentOrdered("eve", amount)) == "paid"
        audit = runtime.world(bank.Audit, "main")
        until(lambda: audit.state().payments == 4, "the audit's turn")
        assert audit.state() == bank.Audit(payments=4, volume=80, largest=30)
