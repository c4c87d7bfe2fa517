"""The checkout: the repository around `src/holdfast`. The demo and the simulator's oracle are not in the wheel."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parent.parent


def import_from_checkout(package: str, module: str) -> ModuleType | None:
    """Import `package.module` of the checkout, or return None if this is an installed wheel."""
    root = PACKAGE.parent.parent
    in_checkout = (root / "src" / "holdfast") == PACKAGE
    if not in_checkout or not (root / Path(*package.split(".")) / "__init__.py").is_file():
        return None
    if sys.path[:1] != [str(root)]:
        sys.path.insert(0, str(root))
    return importlib.import_module(f"{package}.{module}")
