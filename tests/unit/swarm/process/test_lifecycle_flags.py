"""The claim: both servers spell their common flags alike."""

from __future__ import annotations

from typing import get_type_hints

from scheduler.__main__ import scheduler
from stage_server.__main__ import stage_server
from swarm.process.lifecycle import HttpHost, HttpUsers, Insecure, LogFormatName, LogLevel


def test_both_servers_have_the_common_flags_in_the_same_words() -> None:
    common = {
        "http_host": HttpHost,
        "http_user": HttpUsers,
        "insecure": Insecure,
        "log_level": LogLevel,
        "log_format": LogFormatName,
    }
    for command in (scheduler, stage_server):
        flags = get_type_hints(command, include_extras=True)
        assert {name: flags[name] for name in common} == common
