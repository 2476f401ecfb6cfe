"""amqtt lets in who shows the user and the key, to the last character, and nobody else."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.mqtt.key import USER

with warnings.catch_warnings():  # amqtt warns at import about plug-ins that we do not use
    warnings.simplefilter("ignore")
    from swarm.mqtt.amqtt_key import KeyPlugin

KEY = "0f" * 32


@pytest.mark.parametrize(
    ("user", "password", "may"),
    [
        (USER, KEY, True),
        (USER, KEY[:-1], False),
        (USER, f"{KEY}0", False),
        (USER, "", False),
        (USER, None, False),
        (None, None, False),
        ("", KEY, False),
        ("root", KEY, False),
        (f"{USER}:{KEY}", "", False),
        (USER, "schlüssel", False),
    ],
)
async def test_only_the_user_with_the_key_is_let_in(user: str | None, password: str | None, may: bool) -> None:
    context: Any = SimpleNamespace(config=KeyPlugin.Config(key=KEY))
    plugin = KeyPlugin(context)
    session: Any = SimpleNamespace(username=user, password=password)
    assert await plugin.authenticate(session=session) is may
