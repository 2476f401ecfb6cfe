"""What scheduler, stage servers and client share; and `swarm.Client`, for Python programs and notebooks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from client.api import Client

__all__ = ["Client"]


def __getattr__(name: str) -> Any:
    """`Client` lives in the client, on which nothing here stands: it is loaded by whoever asks for it."""
    if name != "Client":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("client.api").Client
