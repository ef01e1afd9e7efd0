"""bide: register something to happen at time T; fire it now, move or cancel it until then."""

from bide._version import __version__ as __version__
