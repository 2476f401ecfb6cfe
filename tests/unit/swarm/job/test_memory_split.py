"""Where to cut so that the pool's memory holds the model, and who then serves which stage."""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest

from swarm.errors import OutOfMemory
from swarm.job.footprint import model_costs, stage_footprint
from swarm.job.memory_split import check_possible, fit, is_possible, needs, stage_counts
from swarm.job.partition import balanced_split, flops_per_token
from swarm.job.placement import Candidate, place
from swarm.job.resolve import Basis, lighter, resolve
from swarm.job.spec import JobSpec, parse_job
from swarm.text import size
from swarm.types import Memory, PeerId
from tests.support.memories import memories

MIB = 1 << 20


def spec_of(layers: int = 8, *, min_replicas: int = 1, vocabulary: int = 2000) -> JobSpec:
    values = {
        "name": "x",
        "model": {"config": {"hidden_size": 128, "num_hidden_layers": layers, "num_attention_heads": 4}},
        "data": {"source": "x", "sequence_length": 64},
        "training": {"global_batch_sequences": 16, "microbatch_sequences": 2},
        "pipeline": {"max_in_flight": 1},
        "limits": {"min_replicas": min_replicas},
    }
    return resolve(parse_job(values), Basis(vocabulary))


def bytes_of(spec: JobSpec, layers: int, stage: int, stages: int) -> int:
    return stage_footprint(spec, layers, stage, stages).total_bytes


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
def test_with_memory_enough_the_cut_is_the_balanced_one(stages: int) -> None:
    spec = spec_of()
    for sizes in ([1 << 40] * stages, [0] * stages, [1 << 40, 1 << 41] * stages):
        assert fit(model_costs(spec), memories(*sizes), stages, spec.limits.min_replicas) == balanced_split(
            spec, stages
        )


def test_a_small_peer_gets_a_small_stage() -> None:
    spec = spec_of()
    small, large = bytes_of(spec, 2, 1, 2), bytes_of(spec, 8, 0, 2)
    assert fit(model_costs(spec), memories(small, large), 2, spec.limits.min_replicas) == (6, 2)
    assert fit(model_costs(spec), memories(small, small), 2, spec.limits.min_replicas) is None


def test_replicas_that_a_stage_must_have_all_hold_it() -> None:
    spec = spec_of(min_replicas=2)
    two, many = bytes_of(spec, 2, 1, 2), 1 << 40
    assert fit(model_costs(spec), memories(many, two, many, many), 2, spec.limits.min_replicas) == (6, 2)
    assert fit(model_costs(spec), memories(many, two, many, two), 2, spec.limits.min_replicas) == (6, 2)
    assert fit(model_costs(spec), memories(many, two, two, two), 2, spec.limits.min_replicas) is None


def test_more_stages_are_tried_where_fewer_do_not_fit() -> None:
    spec = spec_of()
    size = max(bytes_of(spec, 3, 0, 4), bytes_of(spec, 3, 3, 4))
    counts = stage_counts(spec.layers, 2, 6)
    assert counts == [2, 3, 4, 5, 6]
    found = [fit(model_costs(spec), memories(size) * 6, stages, 1) for stages in counts]
    assert found[0] is None
    assert any(found)


def test_the_cut_is_the_cheapest_of_all_that_fit() -> None:
    """Against every cut and every assignment of peers, on random pools."""
    rng = Random(5)
    spec = spec_of(6)
    layer, head = flops_per_token(spec)
    cuts = [(a, b, 6 - a - b) for a in range(1, 5) for b in range(1, 6 - a)]
    feasible = 0
    for _ in range(40):
        offered = [bytes_of(spec, rng.randint(1, 6), rng.randrange(3), 3) for _ in range(3)]

        def fits(cut: tuple[int, ...], offered: list[int] = offered) -> bool:
            sizes = [bytes_of(spec, layers, stage, 3) for stage, layers in enumerate(cut)]
            return any(all(a <= b for a, b in zip(sizes, order, strict=True)) for order in permutations(offered))

        costs = [max(a, b, c + head / layer) for a, b, c in cuts if fits((a, b, c))]
        plan = fit(model_costs(spec), memories(*offered), 3, spec.limits.min_replicas)
        assert (plan is None) == (not costs)
        if plan is not None:
            feasible += 1
            assert fits(plan)
            assert max(plan[0], plan[1], plan[2] + head / layer) == min(costs)
            peers = [Candidate(PeerId(f"p{n}"), offer=Memory(size)) for n, size in enumerate(offered)]
            assert place(peers, 3, 1, needs(model_costs(spec), plan, 3)).plan is not None
    assert feasible > 10


def test_what_no_peer_can_hold_is_impossible_only_if_that_is_known() -> None:
    spec = spec_of()
    counts = range(1, 9)
    model = model_costs(spec)
    with pytest.raises(OutOfMemory, match=r"one decoder layer needs about .* offers 2.0 MiB: .* too little") as caught:
        check_possible(model, memories(1 * MIB, 2 * MIB), counts)
    assert "start a stage server that offers" in caught.value.hint
    check_possible(model, [], counts)
    check_possible(model, memories(1 * MIB, 0), counts)
    check_possible(model, memories(1 << 40), counts)


def test_a_refusal_names_the_memory_that_is_short_and_by_how_much() -> None:
    model = model_costs(spec_of(vocabulary=200_000))
    need = max(model.stage_memory(0, stage, 8, 1) for stage in (0, 7))
    for offer, short in (
        (Memory(need.device_bytes - 5 * MIB, 1 << 40), "5.0 MiB on the device too little"),
        (Memory(1 << 40, need.host_bytes - 7 * MIB), "7.0 MiB of host memory too little"),
    ):
        with pytest.raises(OutOfMemory) as caught:
            check_possible(model, [offer], [8])
        assert f"needs about {need}, the largest of 1 stage server offers {offer}: {short}" in caught.value.message
        assert not is_possible(model, [offer], [8])
    assert is_possible(model, [need], [8])


def hint_for(one: JobSpec, offers: tuple[Memory, ...], counts: list[int]) -> str:
    ways = [(setting, model_costs(after), counts) for setting, after in lighter(one)]
    with pytest.raises(OutOfMemory) as caught:
        check_possible(model_costs(one), offers, counts, ways)
    return caught.value.hint


def test_the_hint_names_only_settings_that_are_not_set_and_help() -> None:
    """A job with microbatches of one sequence and recomputation was told to set just these."""
    spec, counts = spec_of(12, vocabulary=60_000), [12]
    offered = memories(bytes_of(spec, 0, 11, 12) // 2)
    assert "and set training.microbatch_sequences = 1" in hint_for(spec, offered, counts)
    set_already = spec.having("training", microbatch_sequences=1).having("model", recompute=True)
    assert "microbatch_sequences" not in hint_for(set_already, offered, counts)
    assert "recompute" not in hint_for(set_already, offered, counts)
    *_, (_, lightest) = lighter(spec)
    assert not list(lighter(lightest))
    least = max(bytes_of(lightest, 0, stage, 12) for stage in (0, 11))
    assert hint_for(lightest, offered, counts).startswith(f"start a stage server that offers {size(least)} first")


def test_the_settings_that_the_hint_names_make_the_model_possible() -> None:
    spec = spec_of(4, vocabulary=2000)
    *_, (_, lightest) = lighter(spec)
    offered = memories(bytes_of(lightest, 1, 1, 4))
    hint = hint_for(spec, offered, [4])
    assert [after for setting, after in lighter(spec) if setting in hint]
    assert "start a stage server" not in hint
    assert is_possible(model_costs(lightest), offered, [4])


def test_big_stages_go_to_big_peers_and_small_peers_are_not_wasted() -> None:
    peers = [Candidate(PeerId(name), offer=Memory(size)) for name, size in {"a": 4, "b": 1, "c": 4, "d": 2}.items()]
    assert place(peers, 2, 2, memories(3, 1)).plan == {"a": 0, "c": 0, "b": 1, "d": 1}
    assert place(peers, 3, 1, memories(2, 1, 3)).plan == {"a": 2, "d": 0, "b": 1, "c": 0}


def test_the_reason_names_stage_need_and_the_largest_peer() -> None:
    peers = [Candidate(PeerId("a"), offer=Memory(5 * MIB)), Candidate(PeerId("b"), offer=Memory(9 * MIB))]
    decision = place(peers, 2, 1, memories(4 * MIB, 3 << 30))
    assert decision.plan is None
    assert decision.reason == (
        "stage 1 needs 1 replica more (2 idle, 2 needed); a replica there takes about 3.0 GiB, "
        "the largest idle peer is b with 9.0 MiB (3.0 GiB too little)"
    )


def test_a_pin_to_a_stage_that_does_not_fit_leaves_the_peer_idle() -> None:
    peers = [
        Candidate(PeerId("a"), pinned_stage=0, offer=Memory(1)),
        Candidate(PeerId("b"), offer=Memory(5)),
        Candidate(PeerId("c"), offer=Memory(5)),
        Candidate(PeerId("d"), offer=Memory(1)),
    ]
    decision = place(peers, 2, 1, memories(4, 3))
    assert decision.plan == {"b": 0, "c": 1}
    assert "a is pinned to stage 0, which does not fit it; no stage fits d" in decision.reason
