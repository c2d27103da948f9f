"""Finds an App by its path, such as `package.module:app`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from mtask.app.app import App
from mtask.errors import AppNotFound, MtaskError


def load_app(path: str) -> App:
    """Import the module and return its App; raise AppNotFound with the reason."""
    module_name, colon, attribute = path.partition(":")
    if not module_name or not colon or not attribute:
        raise AppNotFound(path, "it is not of the form package.module:app")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(missing + "."):
            raise AppNotFound(path, f"there is no module {missing!r} here or on the Python path") from None
        raise AppNotFound(path, f"its import needs module {missing!r}, which is not installed") from error
    except MtaskError as error:
        raise AppNotFound(path, f"its import failed: {error}") from error
    except Exception as error:
        raise AppNotFound(path, f"its import failed: {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            apps = [name for name, value in vars(found).items() if isinstance(value, App)]
            hint = f"; it has {', '.join(map(repr, apps))}" if apps else ""
            raise AppNotFound(path, f"module {module_name!r} has no {attribute!r}{hint}")
        found = getattr(found, part)
    if not isinstance(found, App):
        raise AppNotFound(path, f"{attribute!r} is {type(found).__name__}, not an mtask.App")
    return found
