"""tmux as the adapter asks it: exact names, plain text, and a pane that is or is not there."""

import pytest

from holdfast.adapters import tmux as adapter
from holdfast.adapters.tmux import Tmux, TmuxMissing, in_front, target_of
from holdfast.errors import Invalid, Timeout
from tests.panes import TmuxServer, tmux
from tests.process.watch import until

__all__ = ["tmux"]

MODULES = ("holdfast.adapters.tmux",)


@pytest.mark.parametrize(
    "target",
    ["", "%", "%x", "%1234567890", "a:b:c", "a.b.c", "$1", "a;b", "a\nb", "{last}", "!", "a:b.c"],
)
def test_what_no_pane_is_called_is_invalid(target: str) -> None:
    with pytest.raises(Invalid):
        target_of(target)


@pytest.mark.parametrize("socket", ["-L", "a b", "a\nb", "x" * 101, "a;b", "$(id)"])
def test_a_bad_socket_is_invalid(socket: str) -> None:
    with pytest.raises(Invalid):
        Tmux(socket)


def test_a_pane_is_found_by_id_and_by_name(tmux: TmuxServer) -> None:
    agent = tmux.agent("worker")
    server = Tmux(tmux.socket)
    for target in (agent.pane_id, "worker", "worker:0", "worker:0.0"):
        found = server.pane(target)
        assert found is not None
        assert found.pane_id == agent.pane_id
        assert not found.dead


@pytest.mark.parametrize("target", ["%999", "nobody", "work", "worker:7", "worker:0.3", "worker:x"])
def test_a_pane_that_is_not_there_is_none(tmux: TmuxServer, target: str) -> None:
    tmux.agent("worker")
    assert Tmux(tmux.socket).pane(target) is None


def test_of_several_windows_and_panes_the_named_one_is_found(tmux: TmuxServer) -> None:
    tmux.agent("worker")
    tmux.run("new-window", "-d", "-t", "=worker:", "-n", "its $log", "--", "cat")
    tmux.run("split-window", "-d", "-t", "=worker:1", "--", "cat")
    listed = tmux.run("list-panes", "-s", "-t", "=worker:", "-F", "#{pane_id}").split()
    server = Tmux(tmux.socket)
    found = [server.pane(target) for target in ("worker", "worker:1", "worker:1.1", "worker:.0")]
    assert [pane and pane.pane_id for pane in found] == [listed[0], listed[1], listed[2], listed[0]]


def test_without_a_server_there_is_no_pane() -> None:
    assert Tmux("hf-no-such-server").pane("%0") is None


def test_a_dead_pane_is_told_as_such(tmux: TmuxServer) -> None:
    tmux.run("set-option", "-g", "remain-on-exit", "on")
    pane_id = tmux.plain("gone", "true")
    found = until(lambda: (p := Tmux(tmux.socket).pane(pane_id)) and p.dead and p, "its end")
    assert found.dead


def test_an_agent_behind_a_shell_is_seen(tmux: TmuxServer) -> None:
    agent = tmux.agent("worker", shell="sh")
    found = Tmux(tmux.socket).pane(agent.pane_id)
    assert found is not None
    assert any(name.startswith("python") for name in in_front(found))


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
def test_a_text_arrives_as_it_stands(tmux: TmuxServer, text: str) -> None:
    agent = tmux.agent("worker", "framed")
    server = Tmux(tmux.socket)
    server.type(agent.pane_id, text)
    server.press(agent.pane_id, "Enter")
    until(lambda: agent.submitted, "the text")
    agent.expect(text)


def test_a_missing_tmux_names_the_command_that_installs_it() -> None:
    with pytest.raises(TmuxMissing) as error:
        Tmux(command="no-such-tmux").pane("%1")
    assert "apt-get install tmux" in str(error.value)


def test_a_tmux_that_hangs_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "COMMAND_TIMEOUT_S", 0.2)
    hangs = Tmux(command="cat")
    hangs._server = ["sh", "-c", "sleep 60"]
    with pytest.raises(Timeout):
        hangs.pane("%1")
