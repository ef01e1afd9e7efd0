"""Find and load extensions by entry points: stores and sinks by the scheme of a URL, commands by their name.

    [project.entry-points."bide.stores"]
    mongodb = "bide_mongodb:MongoStore"        # called with the URL: a `bide.ports.Store`

    [project.entry-points."bide.sinks"]
    slack = "bide_slack:SlackSink"             # called with the URL: a `bide.ports.Sink`

    [project.entry-points."bide.commands"]
    import-celery = "bide_celery.command:main" # a click command

Nothing is loaded before it is asked for, and a name that bide itself has stays bide's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from bide.core.errors import BideError, SetupError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

STORES, SINKS, COMMANDS = "bide.stores", "bide.sinks", "bide.commands"


@cache
def installed(group: str) -> Mapping[str, EntryPoint]:
    """The extensions of a group by name, not loaded. Reads the metadata of all distributions, once: milliseconds."""
    from importlib.metadata import entry_points

    return {one.name: one for one in entry_points(group=group)}


def load(extension: EntryPoint) -> Any:
    """Import it. Raises SetupError, which names it and its distribution, if that fails."""
    try:
        return extension.load()
    except Exception as error:
        raise SetupError(f"{described(extension)} cannot be loaded: {type(error).__name__}: {error}") from error


def make(extension: EntryPoint, url: str) -> Any:
    """Load it and call it with `url`. Raises SetupError, which names it, for any error that is no BideError."""
    try:
        return load(extension)(url)
    except BideError:
        raise
    except Exception as error:
        raise SetupError(f"{described(extension)} cannot be made: {type(error).__name__}: {error}") from error


def described(extension: EntryPoint) -> str:
    of = extension.dist.name if extension.dist else "a distribution"
    return f"{extension.name!r} of {of} ({extension.group} {extension.value})"
