"""docs/runbooks: for each page the fault is caused, its commands run in their order, and the fault is gone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.blockers.codes import CODES
from holdfast.blockers.runbooks import PAGES as PAGES_OF_CODES
from holdfast.cli import main
from holdfast.workers.readiness import ReadinessReason
from tests.deploy.test_alerts import alerts
from tests.postgres import fresh_url
from tests.process.test_tutorial import blocks_of, pattern_of, without_times
from tests.process.watch import until
from tests.processes import ROOT
from tests.runbooks import machine_faults, release_faults, time_zone_faults
from tests.runbooks.alert_faults import EMBEDDED, FAULTS, STAYS, VARIANTS, Fault
from tests.runbooks.blocker_faults import CODE_FAULTS, CODE_VARIANTS
from tests.runbooks.fault_scene import FaultScene
from tests.runbooks.postgres_login import refused_worker, write_password
from tests.runbooks.procedures import PROCEDURES
from tests.runbooks.shelf_app import count_stock

PAGES = ROOT / "docs" / "runbooks"
INDEX = PAGES / "README.md"
# The modules register their faults.
FAULT_MODULES = (machine_faults, release_faults, time_zone_faults)
ALL_FAULTS = {**FAULTS, **CODE_FAULTS}
# Faults that end, of pages whose state mostly stays.
ENDS = {"clock_that_was_years_behind_before_the_boot"}
# Their faults need Spark, the exit of a writer, or a PostgreSQL server with passwords.
DEEP = {"run-stopped", "schema-mismatch", "postgres-password", "zero-downtime-upgrade"}
LIMIT = (pytest.mark.timeout(120),)
DEEP_MARKS = (pytest.mark.deep, pytest.mark.timeout(900))
PROCEDURE_SECTIONS = ["When", "Type", "It worked"]
SECTIONS = ["You see", "It means", "Type", "It worked"]


def page_names() -> set[str]:
    return {path.stem for path in PAGES.glob("*.md")} - {INDEX.stem}


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultScene]:
    yield from open_scene(tmp_path, monkeypatch, str(tmp_path / "store"))


@pytest.fixture
def scene_on_postgres(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultScene]:
    yield from open_scene(tmp_path, monkeypatch, fresh_url())


def open_scene(
    directory: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> Iterator[FaultScene]:
    monkeypatch.chdir(directory)
    monkeypatch.setenv("HOLDFAST_STORE", store)
    with FaultScene(directory, store) as opened:
        yield opened


def test_every_alert_has_a_page_and_every_page_an_alert() -> None:
    runbooks = {rule["annotations"]["runbook"]: name for name, rule in alerts().items()}
    pages = FAULTS.keys()
    assert runbooks.keys() == {f"docs/runbooks/{name}.md" for name in pages}
    for path, alert in runbooks.items():
        assert (ROOT / path).read_text().startswith(f"# {alert}\n")


def test_every_page_has_a_fault() -> None:
    assert page_names() == ALL_FAULTS.keys() | PROCEDURES.keys()


def test_index_lists_every_page() -> None:
    listed = re.findall(
        r"^\| `(Holdfast\w+)` \| \[([a-z-]+)\.md\]\(\2\.md\) \|$", INDEX.read_text(), re.M
    )
    names = {
        name: Path(rule["annotations"]["runbook"]).stem for name, rule in sorted(alerts().items())
    }
    assert listed == list(names.items())
    procedures = re.findall(r"^- \[([a-z-]+)\.md\]\(\1\.md\): ", INDEX.read_text(), re.M)
    assert procedures == list(PROCEDURES)


def test_every_code_has_a_page_and_every_page_a_reason() -> None:
    assert PAGES_OF_CODES.keys() == CODES.keys()
    assert set(PAGES_OF_CODES.values()) <= page_names()
    assert CODE_FAULTS.keys() - FAULTS.keys() <= set(PAGES_OF_CODES.values())


def test_index_has_the_page_of_every_code() -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \| \[([a-z-]+)\.md\]\(\2\.md\)", INDEX.read_text(), re.M)
    assert rows == sorted(rows)
    listed = dict(rows)
    assert len(listed) == len(rows)
    assert listed.pop(ReadinessReason.STORE_FAILED.value) == "target-down"
    assert listed == PAGES_OF_CODES
    assert {reason.value for reason in ReadinessReason} <= CODES.keys() | {"store_failed"}
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", INDEX.read_text())
    assert [link for link in links if not (PAGES / link).exists()] == []


@pytest.mark.parametrize("code", sorted(PAGES_OF_CODES))
def test_page_of_a_code_names_it(code: str) -> None:
    assert f"`{code}`" in (PAGES / f"{PAGES_OF_CODES[code]}.md").read_text()


@pytest.mark.parametrize("name", sorted(page_names()))
def test_page_has_its_sections_and_commands(name: str) -> None:
    parts = re.split(r"^## (.*)$", (PAGES / f"{name}.md").read_text(), flags=re.M)
    assert parts[1::2] == (PROCEDURE_SECTIONS if name in PROCEDURES else SECTIONS)
    for section, text in zip(parts[1::2], parts[2::2], strict=True):
        kinds = {block.kind for block in blocks_of(text)}
        assert "sh" in kinds or section not in ("Type", "It worked"), section
        assert kinds <= {"sh", "sql", "text"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=DEEP_MARKS if name in DEEP else LIMIT)
        for name in sorted(ALL_FAULTS)
    ],
)
def test_commands_of_a_page_mend_its_fault(name: str, scene: FaultScene) -> None:
    run_page(name, ALL_FAULTS[name], scene)


def cases(variants: Mapping[str, Sequence[Fault]], *marks: pytest.MarkDecorator) -> list[Any]:
    return [
        pytest.param(
            name, fault, id=fault.__name__, marks=DEEP_MARKS if name in DEEP else (*LIMIT, *marks)
        )
        for name, faults in variants.items()
        for fault in faults
    ]


@pytest.mark.parametrize(
    ("name", "variant"), cases(VARIANTS) + cases(CODE_VARIANTS, pytest.mark.deep)
)
def test_commands_of_a_page_mend_another_fault(
    name: str, variant: Fault, scene: FaultScene
) -> None:
    run_page(name, variant, scene)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=DEEP_MARKS if name in DEEP else LIMIT)
        for name in sorted(PROCEDURES)
    ],
)
def test_commands_of_a_procedure_succeed(name: str, scene: FaultScene) -> None:
    run_page(name, PROCEDURES[name], scene)


@pytest.mark.deep
@pytest.mark.postgresql
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(ALL_FAULTS.keys() - EMBEDDED))
def test_commands_of_a_page_mend_its_fault_on_postgresql(
    name: str, scene_on_postgres: FaultScene
) -> None:
    run_page(name, ALL_FAULTS[name], scene_on_postgres)


@pytest.mark.deep
@pytest.mark.postgresql
@pytest.mark.timeout(900)
def test_upgrade_under_load_interrupts_nothing_on_postgresql(scene_on_postgres: FaultScene) -> None:
    name = "zero-downtime-upgrade"
    run_page(name, PROCEDURES[name], scene_on_postgres)


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_worker_whose_login_is_refused_continues_with_the_new_password(scene: FaultScene) -> None:
    worker = refused_worker(scene)
    until(lambda: main(["ready"]) != 0, "the refused login")
    write_password(Path(os.environ["PGPASSFILE"]), "new-password")
    scene.run_line("until holdfast ready; do sleep 1; done")
    assert scene.client().submit(count_stock, "b").result(timeout=60) == "b is counted"
    assert worker.running


def run_page(name: str, fault: Fault, scene: FaultScene) -> None:
    scene.page = name
    exists = fault(scene)
    until(exists, "the fault")
    output = ""
    for block in blocks_of((PAGES / f"{name}.md").read_text()):
        if block.kind == "sh":
            output = scene.run_block(block.text)
        elif block.kind == "sql":
            output = scene.run_sql(block.text)
        else:
            pattern = pattern_of(block.text)
            assert re.fullmatch(pattern, without_times(output), re.DOTALL), output
    if name in STAYS and fault.__name__ not in ENDS:
        until(exists, "the fault stays")
    else:
        until(lambda: not exists(), "the fault ends")
