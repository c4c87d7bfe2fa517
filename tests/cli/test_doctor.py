"""`holdfast doctor`: each part of the report, no secrets and no payloads, and stores that cannot be read."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import __version__
from holdfast.cli import doctor
from holdfast.cli.process_report import writer_report
from holdfast.cli.report_redaction import SecretFilter, redact_log_line
from holdfast.clock import S
from holdfast.durable import queue
from holdfast.leadership import worker_registry
from holdfast.store.schema import SCHEMA_VERSION
from holdfast.workers import limit_settings
from holdfast.world import catalog
from tests.cli.conftest import RunCommand
from tests.ops.account_rig import UNIVERSE, AccountRig
from tests.process.watch import until
from tests.test_tidy import EXTRA_MODULES

SECRET = "hunter2-swordfish"


@pytest.fixture(autouse=True)
def _in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("HOLDFAST_STORE", "HOLDFAST_CONFIG", "HOLDFAST_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def test_doctor_reports_each_part(run: RunCommand, path: Path, rig: AccountRig) -> None:
    rig.account("ada").pause()
    rig.store.transact(worker_registry.heartbeat, UNIVERSE, "w", "1", ("world",))
    result = run("doctor", "--store", path, "--json")
    document = result.document
    assert result.code == 0
    assert document["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert document["versions"]["holdfast"] == __version__
    assert {"lmdb", "msgspec", "pyspark"} <= document["versions"].keys()
    assert document["platform"]["processors"] == os.cpu_count()
    assert document["limits"]["open_files"]["soft"] > 0
    [store] = document["stores"]
    assert store["url"] == str(path)
    health = store["health"]
    assert (health["generation"], health["schema_version"]) == (
        1,
        ".".join(map(str, SCHEMA_VERSION)),
    )
    assert health["commits"] > 0
    assert health["space"]["disk_free_bytes"] > 0
    assert abs(store["clocks"]["store_ahead_s"]) < 60
    [worker] = store["workers"]
    assert (worker["worker"], worker["universe"], worker["live"]) == ("w", UNIVERSE, True)
    [readiness] = store["readiness"]
    assert readiness["universe"] == UNIVERSE
    assert not readiness["ready"]
    assert readiness["blockers"][0]["reason"] == "authority_missing"
    [subject] = readiness["subjects"]
    assert subject["type"] == "QuotedAccount"
    assert subject["blockers"][0]["reason"] == "world_paused"
    assert store["writer_log"] == []


def test_doctor_shows_codes_limits_and_the_open_files_of_the_writer(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    rig.store.transact(limit_settings.change_limits, UNIVERSE, {"tasks": 7})
    [store] = run("doctor", "--store", path, "--json").document["stores"]
    [readiness] = store["readiness"]
    assert "authority_missing" in readiness["why"]
    assert readiness["limits"] == [{"name": "tasks", "limit": 7, "used": 0}]
    writer = store["writer"]
    assert Path(f"/proc/{writer['pid']}").exists()
    assert writer["stopped"] is False
    assert 0 < writer["open_files"] < writer["open_files_limit"]
    os.kill(writer["pid"], signal.SIGSTOP)
    try:
        # The kernel stops the process when it next schedules it.
        until(lambda: writer_report(path) == {**writer, "stopped": True}, "a stopped writer")
    finally:
        os.kill(writer["pid"], signal.SIGCONT)


def test_doctor_counts_dead_letters(run: RunCommand, path: Path, letters: list[int]) -> None:
    [store] = run("doctor", "--store", path, "--json").document["stores"]
    assert store["queues"] == [
        {"queue": "mail", "ready": 1, "delayed": 0, "claimed": 0, "dead": 3, "done": 0}
    ]


def test_doctor_prints_the_same_as_text(run: RunCommand, path: Path, letters: list[int]) -> None:
    result = run("doctor", "--store", path)
    assert result.code == 0
    lines = result.out.splitlines()
    assert {"versions", "platform", "limits", "configuration", f"store {path}"} <= set(lines)
    assert "    queue=mail ready=1 delayed=0 claimed=0 dead=3 done=0" in lines


def test_doctor_prints_no_payload_and_no_text_of_user_code(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    rig.store.transact(queue.put_many, "mail", [SECRET.encode()])
    [claim] = rig.store.transact(queue.claim, "mail", "worker", 1, 60 * S)
    rig.store.transact(queue.dead_letter, claim, "broken", f"ValueError: {SECRET}")
    rig.account(SECRET).create()
    blocker = catalog.WorldBlocker("replay_diverged", SECRET, 7)
    event = catalog.WorldEvent.PARK
    world_id = rig.world_id(SECRET)
    rig.store.transact(catalog.change_status, UNIVERSE, world_id, event, blocker)
    (path / "writer.log").write_text(f"dropped a client: invalid: found={SECRET!r}\n{SECRET}\n")
    for options in ((), ("--json",)):
        result = run("doctor", "--store", path, *options)
        assert result.code == 0
        assert "replay_diverged" in result.out
        assert "dropped a client: invalid: (" in result.out
        assert SECRET not in result.out + result.err


def test_doctor_redacts_passwords_tokens_and_texts_of_the_configuration(
    run: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"postgresql://app:{SECRET}@127.0.0.1:1/shop?sslpassword=other-{SECRET}&connect_timeout=1"
    monkeypatch.setenv("HOLDFAST_TOKEN", SECRET)
    monkeypatch.setenv("PGPASSWORD", SECRET)
    monkeypatch.setenv("PGHOST", "db.example")
    Path("holdfast.toml").write_text(f'[stores]\ndefault = "{url}"\n[mail]\nlogin = "{SECRET}"\n')
    monkeypatch.setattr(doctor, "ANSWER_S", 0.2)
    result = run("doctor", "--json")
    assert result.code == 1
    assert SECRET not in result.out + result.err
    document = result.document
    variables = document["configuration"]["variables"]
    assert variables["HOLDFAST_TOKEN"] == variables["PGPASSWORD"] == "…"
    assert variables["PGHOST"] == "db.example"
    content = document["configuration"]["file"]["content"]
    assert content["stores"]["default"].startswith("postgresql://app:…@127.0.0.1:1/shop")
    assert content["mail"] == {"login": "…"}
    assert document["stores"][0]["url"] == content["stores"]["default"]


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://app:pa@{SECRET}@127.0.0.1:1/x",
        f"postgresql://app:pa/{SECRET}@127.0.0.1:1/x",
        f"postgresql://app:pa?{SECRET}@127.0.0.1:1/x",
        f"postgresql://app:{SECRET}@127.0.0.1:port/x",
        f"postgresql://app:{SECRET}",
        f" postgresql://app:{SECRET}@127.0.0.1:1/x",
        f"postgresql://app@127.0.0.1:1/x?PASSWORD={SECRET}",
        f"postgresql://app@127.0.0.1:1/x?options=-c%20app.token%3D{SECRET}",
        f"host=127.0.0.1 port=1 password={SECRET} dbname=x",
        f"mysql://app:{SECRET}@127.0.0.1/x",
    ],
)
@pytest.mark.parametrize("place", ["argument", "variable", "file"])
def test_doctor_shows_no_password_of_a_mistyped_url(
    run: RunCommand, monkeypatch: pytest.MonkeyPatch, url: str, place: str
) -> None:
    monkeypatch.setattr(doctor, "ANSWER_S", 1.0)
    options: tuple[str, ...] = ("--store", url) if place == "argument" else ()
    if place == "variable":
        monkeypatch.setenv("HOLDFAST_STORE", url)
    if place == "file":
        Path("holdfast.toml").write_text(f'[stores]\ndefault = "{url}"\n')
    for form in ((), ("--json",)):
        result = run("doctor", *options, *form)
        assert result.code == 1
        assert SECRET not in result.out + result.err


def test_doctor_shows_no_line_of_a_file_that_does_not_parse(run: RunCommand) -> None:
    Path("holdfast.toml").write_text(f"[stores\npassword = {SECRET}\n")
    result = run("doctor", "--json")
    assert result.code == 1
    assert result.document["configuration"]["file"]["error"] == "not valid TOML"
    assert result.document["stores"][0]["error"]["code"] == "bad_stores"
    assert SECRET not in result.out


def test_secret_filter_removes_a_secret_from_any_text() -> None:
    secrets = SecretFilter({"MY_API_KEY": SECRET}, [f"postgresql://a:pass%2Fword{SECRET[:3]}@h/x"])
    report = {"a": [f"<{SECRET}>"], "b": "pass/wordhun", "c": 7}
    assert secrets.clean(report) == {"a": ["<…>"], "b": "…", "c": 7}


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("Traceback (most recent call last):", True),
        ('  File "/x/writer.py", line 7, in _serve', True),
        ("Fatal Python error: Segmentation fault", True),
        (f"ValueError: {SECRET}", "ValueError: (19 characters removed)"),
        (f"    raise ValueError({SECRET!r})", "(41 characters removed)"),
        (SECRET, "(17 characters removed)"),
        (
            f"holdfast: the writer ends: store_full: {SECRET}",
            "holdfast: the writer ends: store_full: (19 characters removed)",
        ),
    ],
)
def test_log_lines_keep_their_structure_only(line: str, shown: object) -> None:
    assert redact_log_line(line) == (line if shown is True else shown)


def test_doctor_without_a_store(run: RunCommand) -> None:
    result = run("doctor", "--json")
    assert result.code == 0
    assert result.document["stores"] == []
    assert run("doctor").out.splitlines()[-1] == "no store"
    assert list(Path().iterdir()) == []


def test_doctor_reports_that_a_given_store_does_not_exist(run: RunCommand, tmp_path: Path) -> None:
    result = run("doctor", "--store", tmp_path / "missing")
    assert result.code == 1
    assert "cannot be read: not_found: " in result.out


def test_doctor_reports_that_a_store_is_damaged(run: RunCommand, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "data.mdb").write_bytes(b"\xff" * 8192)
    result = run("doctor", "--store", damaged, "--json")
    assert result.code == 1
    assert result.document["stores"][0]["error"]["code"].startswith("store_")
    assert result.document["versions"]["holdfast"] == __version__


def test_doctor_reports_that_a_store_does_not_answer(
    run: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://app@127.0.0.1:{silent.getsockname()[1]}/shop"
        result = run("doctor", "--store", url)
    assert result.code == 1
    assert "  cannot be read: no answer within 0.2 s" in result.out.splitlines()


def test_doctor_imports_no_extra(tmp_path: Path) -> None:
    code = (
        "import json, sys; from holdfast.cli import main; code = main(['doctor']); "
        "print(json.dumps([code, sorted({name.partition('.')[0] for name in sys.modules})]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    code_, modules = json.loads(done.stdout.splitlines()[-1])
    assert code_ == 0
    assert EXTRA_MODULES.isdisjoint(modules)
