"""What a replica may keep beside its stage follows from what the stage server offers."""

from __future__ import annotations

import pytest

from stage_server.ports import LOG_BYTES_MAX, LOG_SHARE, HubPolicy, MemoryBudget
from swarm.errors import NotAllowed
from swarm.job.footprint import stage_footprint
from swarm.types import Memory
from tests.support.ports import assignment_of
from tests.support.specs import tiny_spec

MIB = 1 << 20


def test_the_log_of_commits_takes_a_share_of_what_the_stage_leaves_on_offer() -> None:
    given = assignment_of(tiny_spec())
    needed = stage_footprint(given.spec, 2, 0, 1).total_bytes
    assert MemoryBudget.of(Memory(needed + 100 * MIB)).log_bytes(given) == 100 * MIB // LOG_SHARE
    assert MemoryBudget.of(Memory(needed - 1)).log_bytes(given) == 0
    assert MemoryBudget.of(Memory(1 << 40)).log_bytes(given) == LOG_BYTES_MAX


def test_held_outputs_have_room_even_where_little_is_on_offer() -> None:
    assert MemoryBudget.of(Memory(1)).hold_bytes > 32 * MIB
    assert MemoryBudget.of(Memory(64 << 30)).hold_bytes == 16 << 30


def test_what_lies_in_the_hosts_memory_is_not_taken_from_the_devices() -> None:
    """Eight devices of 80 GB in one box held 140 GB of outputs in its host's memory, a quarter of what is theirs."""
    given = assignment_of(tiny_spec())
    need = stage_footprint(given.spec, 2, 0, 1).memory
    small_host = Memory(80 << 30, need.host_bytes + 100 * MIB)
    assert MemoryBudget.of(small_host).log_bytes(given) == 100 * MIB // LOG_SHARE
    assert MemoryBudget.of(Memory(80 << 30, 8 << 30)).hold_bytes == 1 << 30, "pinned memory takes up to twice as much"
    assert MemoryBudget.of(Memory(1 << 40, need.host_bytes - 1)).log_bytes(given) == 0


@pytest.mark.parametrize(
    ("allowed", "model", "is_allowed"),
    [
        ((), "acme/tiny", False),
        (("acme/*",), "acme/tiny", True),
        (("acme/*",), "acme-2/tiny", False),
        (("acme/*",), "ACME/tiny", False),
        (("acme/*", "gpt2"), "gpt2", True),
        (("gpt2",), "gpt2-large", False),
        (("*",), "any/thing", True),
    ],
)
def test_the_owner_says_which_models_of_the_hub_are_loaded(
    allowed: tuple[str, ...], model: str, is_allowed: bool
) -> None:
    if is_allowed:
        HubPolicy(allowed).check(model)
        return
    with pytest.raises(NotAllowed, match="does not load") as refused:
        HubPolicy(allowed).check(model)
    assert "--allow-hub" in refused.value.hint
