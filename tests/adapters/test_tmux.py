"""The tmux client: exact pane targets, literal text, missing and dead panes."""

import pytest

from holdfast.adapters import tmux as adapter
from holdfast.adapters.tmux import Tmux, TmuxMissing, foreground_programs, parse_target
from holdfast.errors import Invalid, Timeout
from tests.process.watch import until
from tests.tmux_panes import TmuxServer, tmux

__all__ = ["tmux"]

MODULES = ("holdfast.adapters.tmux",)


@pytest.mark.parametrize(
    "target",
    ["", "%", "%x", "%1234567890", "a:b:c", "a.b.c", "$1", "a;b", "a\nb", "{last}", "!", "a:b.c"],
)
def test_invalid_pane_target_is_refused(target: str) -> None:
    with pytest.raises(Invalid):
        parse_target(target)


@pytest.mark.parametrize("socket", ["-L", "a b", "a\nb", "x" * 101, "a;b", "$(id)"])
def test_invalid_tmux_socket_is_refused(socket: str) -> None:
    with pytest.raises(Invalid):
        Tmux(socket)


def test_a_pane_is_found_by_id_and_by_name(tmux: TmuxServer) -> None:
    agent = tmux.start_agent("worker")
    server = Tmux(tmux.socket)
    for target in (agent.pane_id, "worker", "worker:0", "worker:0.0"):
        found = server.find_pane(target)
        assert found is not None
        assert found.pane_id == agent.pane_id
        assert not found.dead


@pytest.mark.parametrize("target", ["%999", "nobody", "work", "worker:7", "worker:0.3", "worker:x"])
def test_missing_pane_is_none(tmux: TmuxServer, target: str) -> None:
    tmux.start_agent("worker")
    assert Tmux(tmux.socket).find_pane(target) is None


def test_pane_is_found_among_several_windows(tmux: TmuxServer) -> None:
    tmux.start_agent("worker")
    window = ["-n", "its $log", "--", "cat"]
    tmux.run("new-window", "-d", "-t", "=worker:", *window)
    tmux.run("split-window", "-d", "-t", "=worker:1", "--", "cat")
    listed = tmux.run("list-panes", "-s", "-t", "=worker:", "-F", "#{pane_id}").split()
    server = Tmux(tmux.socket)
    found = [
        server.find_pane(target) for target in ("worker", "worker:1", "worker:1.1", "worker:.0")
    ]
    assert [pane and pane.pane_id for pane in found] == [listed[0], listed[1], listed[2], listed[0]]


def test_missing_tmux_server_has_no_pane() -> None:
    assert Tmux("hf-no-such-server").find_pane("%0") is None


def test_dead_pane_is_reported_dead(tmux: TmuxServer) -> None:
    tmux.run("set-option", "-g", "remain-on-exit", "on")
    pane_id = tmux.start_program("gone", "true")
    found = until(lambda: (p := Tmux(tmux.socket).find_pane(pane_id)) and p.dead and p, "its end")
    assert found.dead


def test_agent_behind_a_shell_is_a_foreground_program(tmux: TmuxServer) -> None:
    agent = tmux.start_agent("worker", shell="sh")
    found = Tmux(tmux.socket).find_pane(agent.pane_id)
    assert found is not None
    assert any(name.startswith("python") for name in foreground_programs(found))


@pytest.mark.parametrize(
    "text",
    [
        "ends with ;",
        "ends with \\;",
        "-l --help",
        "$(touch /tmp/never) `id` && #{pane_id} %1 ~ 'quoted' \"twice\"",
        "Enter",
        "grüße ✓ 日本語",
        "x" * 2500 + ";",
        ";" * 1000 + "y",
    ],
)
def test_text_is_typed_unchanged_into_a_pane(tmux: TmuxServer, text: str) -> None:
    agent = tmux.start_agent("worker", "framed")
    server = Tmux(tmux.socket)
    server.type_text(agent.pane_id, text)
    server.press_key(agent.pane_id, "Enter")
    until(lambda: agent.submitted, "the text")
    agent.expect(text)


def test_missing_tmux_error_names_the_install_command() -> None:
    with pytest.raises(TmuxMissing) as error:
        Tmux(command="no-such-tmux").find_pane("%1")
    assert "apt-get install tmux" in str(error.value)


def test_hanging_tmux_command_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "COMMAND_TIMEOUT_S", 0.2)
    hangs = Tmux(command="cat")
    hangs._server = ["sh", "-c", "sleep 60"]
    with pytest.raises(Timeout):
        hangs.find_pane("%1")
