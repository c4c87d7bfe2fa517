"""An agent in a pane, for tests: `python tests/pane_agent.py LOG MODE`.

It writes a line of JSON into LOG for each press of Enter: what was submitted by it.

    line     the terminal's own line editing, as a plain program has it
    deaf     the same, and nothing that is typed is shown
    framed   draws what is typed in a narrow frame, wrapped, as agents do; a line feed is a new line
    paste    the same, and it takes the first Enter behind a text for the end of a paste
    hidden   like framed, with the terminal's cursor parked in a corner
    stuck    shows what is typed, and takes no Enter at all
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
        kept = termios.tcgetattr(0)
        kept[3] &= ~termios.ECHO
        termios.tcsetattr(0, termios.TCSANOW, kept)
    if mode in ("line", "deaf"):
        os.write(sink, b"ready\n")
        for line in sys.stdin:
            write(sink, line.rstrip("\n"))
        return
    tty.setraw(0)
    draft, shown, swallowed = "", [], False
    draw(draft, shown, mode)
    os.write(sink, b"ready\n")
    while True:
        for char in os.read(0, 65536).decode("utf-8", "replace"):
            if char == "\x15":
                draft, swallowed = "", False
            elif char != "\r":
                draft += char
            elif mode == "stuck" or (mode == "paste" and draft and not swallowed):
                swallowed = True
            else:
                write(sink, draft)
                shown = [*shown, *([draft] if draft else [])]
                draft, swallowed = "", False
        draw(draft, shown, mode)


def write(sink: int, text: str) -> None:
    os.write(sink, json.dumps(text).encode() + b"\n")


def draw(draft: str, shown: list[str], mode: str) -> None:
    rows = [row for text in shown for row in framed(text)][-15:]
    typed = framed("> " + draft)[-7:]
    out = "\x1b[2J\x1b[H" + "\r\n".join([*rows, "-" * WIDTH, *typed])
    out += "\x1b[1;1H" if mode == "hidden" else f"\x1b[{len(rows) + 1 + len(typed)};{end(typed)}H"
    os.write(1, out.encode())


def framed(text: str) -> list[str]:
    lines = text.split("\n")
    return [
        f"│ {line[at : at + WIDTH].ljust(WIDTH)} │"
        for line in lines
        for at in range(0, max(len(line), 1), WIDTH)
    ]


def end(typed: list[str]) -> int:
    return len(typed[-1].rstrip("│ ")) + 1


if __name__ == "__main__":
    main()
