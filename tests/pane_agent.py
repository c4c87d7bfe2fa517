"""A fake agent in a tmux pane: `python tests/pane_agent.py LOG MODE`.

It writes one line of JSON to LOG for each press of Enter: the submitted text.

    line     line editing of the terminal, as in a plain program
    deaf     like line, without echo
    framed   draws the input wrapped in a narrow frame, as agents do; a line feed starts a new line
    paste    like framed; the first Enter after a text ends the paste and does not submit
    hidden   like framed, with the cursor of the terminal parked in a corner
    stuck    shows the input and ignores Enter
"""

import json
import os
import sys
import termios
import tty

WIDTH = 30


def main() -> None:
    log, mode = sys.argv[1:3]
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    if mode == "deaf":
        attributes = termios.tcgetattr(0)
        attributes[3] &= ~termios.ECHO
        termios.tcsetattr(0, termios.TCSANOW, attributes)
    if mode in ("line", "deaf"):
        os.write(sink, b"ready\n")
        for line in sys.stdin:
            write_submission(sink, line.rstrip("\n"))
        return
    tty.setraw(0)
    draft, shown, enter_ignored = "", [], False
    draw(draft, shown, mode)
    os.write(sink, b"ready\n")
    while True:
        for char in os.read(0, 65536).decode("utf-8", "replace"):
            if char == "\x15":
                draft, enter_ignored = "", False
            elif char != "\r":
                draft += char
            elif mode == "stuck" or (mode == "paste" and draft and not enter_ignored):
                enter_ignored = True
            else:
                write_submission(sink, draft)
                shown = [*shown, *([draft] if draft else [])]
                draft, enter_ignored = "", False
        draw(draft, shown, mode)


def write_submission(sink: int, text: str) -> None:
    os.write(sink, json.dumps(text).encode() + b"\n")


def draw(draft: str, shown: list[str], mode: str) -> None:
    rows = [row for text in shown for row in frame_lines(text)][-15:]
    input_rows = frame_lines("> " + draft)[-7:]
    out = "\x1b[2J\x1b[H" + "\r\n".join([*rows, "-" * WIDTH, *input_rows])
    out += (
        "\x1b[1;1H"
        if mode == "hidden"
        else f"\x1b[{len(rows) + 1 + len(input_rows)};{cursor_column(input_rows)}H"
    )
    os.write(1, out.encode())


def frame_lines(text: str) -> list[str]:
    lines = text.split("\n")
    return [
        f"│ {line[at : at + WIDTH].ljust(WIDTH)} │"
        for line in lines
        for at in range(0, max(len(line), 1), WIDTH)
    ]


def cursor_column(lines: list[str]) -> int:
    return len(lines[-1].rstrip("│ ")) + 1


if __name__ == "__main__":
    main()
