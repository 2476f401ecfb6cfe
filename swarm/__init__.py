"""The code that scheduler, stage servers and client share; and `swarm.Client`, for Python programs and notebooks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from client.api import Client

__all__ = ["Client"]


def __getattr__(name: str) -> Any:
    """Load `Client` from the package `client` on first use: nothing else here depends on that package."""
    if name != "Client":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("client.api").Client
