"""The claim: the scheduler, relays and stage servers spell their common flags alike."""

from __future__ import annotations

from typing import get_type_hints

from scheduler.__main__ import scheduler
from stage_server.__main__ import stage_server
from swarm.process import lifecycle
from swarm.relay.__main__ import relay


def test_both_servers_have_the_common_flags_in_the_same_words() -> None:
    common = {
        "http_host": lifecycle.HttpHost,
        "http_user": lifecycle.HttpUsers,
        "log_level": lifecycle.LogLevel,
        "log_format": lifecycle.LogFormatName,
    }
    for command in (scheduler, relay, stage_server):
        assert common.items() <= get_type_hints(command, include_extras=True).items()
