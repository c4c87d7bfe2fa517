"""The application loader: imports `module:app` with the current directory on the path."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from holdfast.app.app import App
from holdfast.errors import HoldfastError, Invalid

# The applications that this process has loaded.
loaded_apps: list[App] = []


class NoApp(Invalid):
    code = "no_app"
    hint = "the application could not be loaded; give module:app; the current directory is on the module path"


def load_app(name: str) -> App:
    """Import and return the application `module:attribute`; the current directory is on the path."""
    module, _, path = name.partition(":")
    if not module or not path:
        raise NoApp(what="app", found=name, why="not of the form module:app")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        attribute: Any = importlib.import_module(module)
        for part in path.split("."):
            attribute = getattr(attribute, part)
    except HoldfastError:
        raise
    except Exception as error:
        # The import runs user code, which may raise any exception.
        raise NoApp(what="app", found=name, why=f"{type(error).__name__}: {error}") from None
    if not isinstance(attribute, App):
        raise NoApp(what="app", found=name, why=f"a {type(attribute).__name__}, not an App")
    if attribute not in loaded_apps:
        loaded_apps.append(attribute)
    return attribute
