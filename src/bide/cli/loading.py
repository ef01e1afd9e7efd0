"""MODULE:APP: from its text to the app."""

from __future__ import annotations

import importlib
import os
import sys
from difflib import get_close_matches

from bide.app import Bide
from bide.core.errors import BadInput, BideError, SetupError


def load_app(application: str) -> Bide:
    """The Bide object that `application` names, looked for here first. Raises BadInput, SetupError."""
    module_name, colon, path = application.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), *path.split("."))):
        raise BadInput("MODULE:APP", application, "a module, a colon and the app's name in it, such as shop:app")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: object = importlib.import_module(module_name)
    except BideError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise SetupError(f"{module_name}: cannot be loaded: {error}") from error
        accepted = f"a module that can be imported from {os.getcwd()} or the Python path ({error})"
        raise BadInput("MODULE:APP", application, accepted) from None
    except Exception as error:
        raise SetupError(f"{module_name}: cannot be loaded: {type(error).__name__}: {error}") from error
    apps = [name for name, value in vars(found).items() if isinstance(value, Bide)]
    for part in path.split("."):
        if not hasattr(found, part):
            closest = get_close_matches(part, apps, n=1, cutoff=0.0)
            accepted = f"the name of a Bide object in {module_name}" + (f", such as {closest[0]}" if closest else "")
            raise BadInput("MODULE:APP", application, accepted)
        found = getattr(found, part)
    if not isinstance(found, Bide):
        there = f"; in {module_name} these are: {', '.join(apps)}" if apps else ""
        raise BadInput("MODULE:APP", application, f"the name of a Bide object, not of a {type(found).__name__}{there}")
    return found
