"""Handlers for recordings, and a command that raises."""

import argparse

from holdfast.runner import Refused, WorkItem

not_a_function = 7


def accept(work: WorkItem) -> None: ...


def refuse(work: WorkItem) -> None:
    raise Refused(seq=work.seq)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("how")


def run(args: argparse.Namespace) -> int:
    if args.how == "interrupt":
        raise KeyboardInterrupt
    if args.how == "missing":
        raise FileNotFoundError(2, "No such file or directory", "nowhere")
    raise RuntimeError("first line\nsecond line")
