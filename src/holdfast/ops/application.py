"""Which application a command runs: `module:app`, imported with the current directory on the path."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from holdfast.app.app import App
from holdfast.errors import HoldfastError, Invalid


class NoApp(Invalid):
    code = "no_app"
    hint = "name it as module:app; modules of this directory are found, too"


def load_app(name: str) -> App:
    """The application called `module:attribute`; modules of the current directory are found."""
    module, _, path = name.partition(":")
    if not module or not path:
        raise NoApp(what="app", found=name, why="not of the form module:app")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except HoldfastError:
        raise
    except Exception as error:
        # Importing runs the user's code, which may do anything.
        raise NoApp(what="app", found=name, why=f"{type(error).__name__}: {error}") from None
    if not isinstance(found, App):
        raise NoApp(what="app", found=name, why=f"a {type(found).__name__}, not an App")
    return found
