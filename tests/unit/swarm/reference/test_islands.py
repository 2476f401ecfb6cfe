"""swarm.reference.islands: several islands in one process, joined by outer steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from swarm.checkpoint.reader import Checkpoint, fault_of, list_checkpoints
from swarm.checkpoint.storage import LocalStorage
from swarm.errors import InvalidConfig, JobFailed
from swarm.job.families import HEAD
from swarm.job.islands import courses, island_spec, outer_courses, outer_plan
from swarm.job.leases import Cut, Leases
from swarm.job.outer_log import OuterRecord, TookPart, read, written
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec, parse_job
from swarm.model.families import EMBEDDING
from swarm.model.islands.exchange import proposed, shortened
from swarm.model.stage import Stage
from swarm.reference.checkpoints import Islands, LocalCheckpoints
from swarm.reference.islands import ReferenceOuterSteps
from swarm.reference.trainer import StepReport, Trained, build_stages, train_local, train_step
from tests.support.effort import others
from tests.support.one_process import CPU, T, batches_of, drift, farthest, spec_of, train, weights


def test_one_island_with_an_outer_step_behind_every_step_of_rate_one_is_the_inner_optimizer() -> None:
    plain = train(spec_of("allreduce", 1))
    outer = train(spec_of(islands=1, every_steps=1, learning_rate=1.0, momentum=0.0, compression="none"))
    assert farthest(weights(plain.stages), weights(outer.stages)) <= 1e-6
    assert outer.losses == pytest.approx(plain.losses, abs=1e-6)
    assert plain.stages[0].version == 6
    assert outer.stages[0].version == 12, "an outer step is a step"


def test_islands_train_by_themselves_and_an_exchange_takes_the_mean_of_what_they_learned() -> None:
    spec = spec_of(every_steps=6, learning_rate=1.0, momentum=0.0, compression="none")
    share, batches, alone = island_spec(spec), batches_of(spec), []
    for course in courses(spec):
        stages = build_stages(share, CPU)
        for step in range(6):
            train_step(stages, share, batches, course.at(step))
        alone.append(weights(stages))
    mean = {name: (alone[0][name] + alone[1][name]) / 2 for name in alone[0]}
    assert farthest(alone[0], alone[1]) > 1e-3, "they saw other data"
    assert farthest(mean, weights(train(spec).stages)) <= 1e-6


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mode", ["diloco", "streaming", "gaia"])
def test_the_cut_changes_no_bit(mode: str, tied: bool) -> None:
    """Fragments are layers and codes begin with each tensor, so stages are invisible to outer steps as well."""
    every = {"every_steps": 4, "fragments": 3} if mode == "streaming" else {"every_steps": 2}
    code = "int8" if mode == "gaia" else "fp4"
    one, three = (train(spec_of(mode, stages=stages, tied=tied, compression=code, **every)) for stages in (1, 3))
    assert (one.losses, one.evaluations, one.sha256) == (three.losses, three.evaluations, three.sha256)
    if tied:
        held = weights(three.stages)
        assert torch.equal(held[EMBEDDING], held[HEAD])


def test_diloco_is_evaluated_where_all_islands_hold_the_outer_weights_and_streaming_at_once() -> None:
    diloco, streaming = (train(spec_of(mode, every_steps=4)).evaluations for mode in ("diloco", "streaming"))
    assert [evaluation.version for evaluation in diloco] == [4, 6]
    assert [evaluation.version for evaluation in streaming] == [1, 2, 3, 4, 5, 6]


def pair(**outer: Any) -> tuple[list[list[Stage]], ReferenceOuterSteps]:
    """Two islands with weights of their own, and the outer steps between them."""
    spec = spec_of(**outer)
    islands = [build_stages(spec, CPU) for _ in range(2)]
    steps = ReferenceOuterSteps(spec, islands)
    drift(islands)
    return islands, steps


def test_proposals_weigh_as_much_as_the_tokens_behind_them() -> None:
    """Those since the exchange before: what was behind an earlier proposal does not count again."""
    islands, steps = pair(every_steps=3, learning_rate=1.0, momentum=0.0, compression="none")
    for first, tokens in ((0, [100, 300]), (3, [300, 100])):
        one, other = map(weights, islands)
        for step in range(first, first + 3):
            assert steps.after(step, dict(enumerate(tokens))) == []
            assert steps.is_level == (step == first + 2)
        share = tokens[0] / 400
        expected = {name: share * one[name] + (1 - share) * other[name] for name in one}
        assert farthest(expected, weights(islands[0])) <= 1e-5
        assert farthest(weights(islands[0]), weights(islands[1])) == 0.0
        drift(islands, seed=10)


def test_an_island_divides_by_the_targets_of_its_own_share() -> None:
    spec = spec_of()
    assert batches_of(spec).tokens_of(0) == spec.training.global_batch_sequences // 2 * T


def test_streaming_merges_what_was_captured_and_keeps_a_share_of_the_weights() -> None:
    islands, steps = pair(
        mode="streaming", steps=8, every_steps=4, fragments=1, overlap_steps=2, mixing=0.25, learning_rate=1.0,
        momentum=0.0, compression="none",
    )  # fmt: skip
    captured = [weights(island) for island in islands]
    for step in range(4):
        steps.after(step, {0: 1, 1: 1})
    for stage in (stage for island in islands for stage in island):  # what is learned between capture and merge
        for value in stage.weights.newest().values():
            value.data += 1
    steps.after(4, {0: 1, 1: 1})
    assert farthest(weights(islands[0]), captured[0]) == pytest.approx(1.0, abs=1e-5), "it is on its way"
    steps.after(5, {0: 1, 1: 1})
    for island, own in zip(islands, captured, strict=True):
        mean = {name: (captured[0][name] + captured[1][name]) / 2 for name in own}
        expected = {name: 0.25 * (own[name] + 1) + 0.75 * mean[name] for name in own}
        assert farthest(expected, weights(island)) <= 1e-5
    steps.after(6, {0: 1, 1: 1})
    steps.after(7, {0: 1, 1: 1})
    assert farthest(weights(islands[0]), weights(islands[1])) == 0.0, "the closing merge"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_proposal_that_is_not_finite_is_dropped_and_heals_all_islands(bad: float) -> None:
    islands, steps = pair(every_steps=6, compression="bfloat16")
    start = weights(build_stages(spec_of(), CPU))
    (broken,) = islands[1]
    broken.weights.newest()[EMBEDDING].data.fill_(bad)
    assert [steps.after(step, {0: 1, 1: 1}) for step in range(6)] == [[]] * 5 + [[0]]
    assert farthest(start, weights(islands[0])) == farthest(start, weights(islands[1])) == 0.0


@pytest.mark.parametrize("mode", ["diloco", "streaming"])
def test_all_islands_hold_the_same_outer_state_behind_every_merge(mode: str) -> None:
    spec = spec_of(mode, stages=2, tied=True, every_steps=4, compression="fp4")
    batches, share = batches_of(spec), island_spec(spec)
    islands = [build_stages(share, CPU) for _ in range(2)]
    steps, seen = ReferenceOuterSteps(spec, islands), set[tuple[str, ...]]()
    for step in range(6):
        for island, course in zip(islands, courses(spec), strict=True):
            train_step(island, share, batches, course.at(step))
        assert steps.after(step, {0: 1, 1: 1}) == []
        held = {tuple(stage.digest().partition("-")[2] for stage in island) for island in islands}
        assert len(held) == 1
        seen |= held
    assert len(seen) == 1 + len({step for step in range(6) if outer_plan(spec).rhythm.merges(step)})


@pytest.mark.parametrize("mode", ["diloco", "streaming"])
def test_no_microbatch_is_late_in_the_first_steps_however_many_outer_steps_lie_between(mode: str) -> None:
    """Versions count outer steps too, `pipeline.sync_steps` does not."""
    spec = spec_of(mode, every_steps=2)
    never_late = spec.having("pipeline", overlap="all", sync_steps=spec.training.steps)
    assert train(never_late).sha256 == train(spec).sha256


# Gaia ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("islands", [2, 3])
def test_gaia_without_a_threshold_behind_every_step_is_one_synchronous_optimizer(islands: int) -> None:
    changes = {"optimizer": "sgd", "momentum": 0.9, "grad_clip_norm": 0.0, "global_batch_sequences": 12}
    synchronous = changed(spec_of("allreduce", 1), "training", **changes)
    filtered = changed(spec_of("gaia", every_steps=1, threshold=0.0), "training", **changes)
    plain, joined = train(synchronous), train(changed(filtered, "islands", count=islands))
    assert farthest(weights(plain.stages), weights(joined.stages)) <= 1e-6
    assert joined.losses == pytest.approx(plain.losses, abs=1e-6)


@pytest.mark.parametrize(
    ("outer", "tokens"),
    [
        ({}, (1, 1)),
        ({"threshold": 0.2, "every_steps": 1}, (1, 3)),
        ({"threshold": 0.2, "every_steps": 4, "overlap_steps": 3}, (1, 1, 2)),
        ({"threshold": 0.2, "every_steps": 6, "overlap_steps": 1, "fragments": 3}, (2, 1)),
        ({"threshold": 1.0, "every_steps": 3}, (1, 1)),
    ],
)
def test_what_islands_make_reaches_the_model_once(outer: dict[str, Any], tokens: tuple[int, ...]) -> None:
    """What is too small to be sent is sent later, and at the end nothing is left."""
    spec = spec_of("gaia", steps=11, **outer)
    islands = [build_stages(spec, CPU) for _ in tokens]
    steps, start = ReferenceOuterSteps(spec, islands), weights(islands[0])
    made = {name: torch.zeros(one.shape, dtype=torch.float64) for name, one in start.items()}
    for step in range(11):
        for number, (island, share) in enumerate(zip(islands, tokens, strict=True)):
            before = weights(island)
            drift([island], seed=10 * step + number, scale=1e-3)
            for stage in island:
                stage.apply(stage.version, {}, learning_rate=0.0, scale=1.0, skip=True)
            for name, one in weights(island).items():
                made[name] += (one.double() - before[name]) * share / sum(tokens)
        assert steps.after(step, dict(enumerate(tokens))) == []
        apart = farthest(weights(islands[0]), weights(islands[1]))
        assert (apart > 0.0) == (step < 10), "islands differ until the closing merge"
    assert farthest(weights(islands[0]), {name: start[name] + one for name, one in made.items()}) <= 1e-6


def test_the_larger_the_threshold_the_less_travels() -> None:
    def sent_bytes(threshold: float) -> int:
        spec, sizes = spec_of("gaia", steps=8, threshold=threshold), list[int]()

        def look(islands: Islands, report: StepReport) -> None:
            for (stage,) in islands:
                assert stage.proposals is not None
                course = stage.proposals.course
                due = course.next_outer(stage.version) if course.captured(stage.version) else None
                sizes.extend(shortened(stage, proposed(stage, unit, due.step)).numel() for unit in stage.units if due)

        train_local(spec, batches_of(spec), on_commit=look)
        assert len(sizes) == 2 * 3
        return sum(sizes)

    found = [sent_bytes(threshold) for threshold in (0.0, 0.01, 0.05, 0.2)]
    assert sorted(set(found), reverse=True) == found


# Late islands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize(
    ("mode", "outer"),
    [
        ("diloco", {"every_steps": 2}),
        ("streaming", {"every_steps": 2, "fragments": 1, "overlap_steps": 1, "mixing": 0.5}),
        ("gaia", {"every_steps": 2, "overlap_steps": 1, "threshold": 0.2}),
    ],
)
def test_a_late_island_takes_over_what_the_others_moved_and_keeps_its_own(
    mode: str, outer: dict[str, Any], bad: bool
) -> None:
    """Also what it has made since it captured. If the others' proposal is not finite, they did not move."""
    spec = spec_of(mode, steps=8, compression="none", **outer)
    islands = [build_stages(spec, CPU) for _ in range(2)]
    steps, (first, second) = ReferenceOuterSteps(spec, islands), islands
    merged = outer_plan(spec).rhythm.overlap_steps + 1
    exchanges = TookPart(
        [OuterRecord(merged + 1, (0,), late=(1,))], 2, [(due.behind, 0) for due in outer_courses(spec)[0].outer]
    )
    drift(islands)
    if bad:
        first[0].weights.newest()[EMBEDDING].data.fill_(math.inf)
    for step in range(merged + 1):
        for stage in (*first, *second):
            stage.apply(stage.version, {}, learning_rate=0.0, scale=1.0, skip=True)
        if step < merged:
            steps.after(step, {0: 1, 1: 1}, exchanges)
    drift(islands, seed=7)
    held, before = weights(second), anchors(second)
    assert steps.after(merged, {0: 1, 1: 1}, exchanges) == ([0] if bad else [])
    assert steps.owing == {1}
    after = anchors(second)
    assert farthest(after, anchors(first)) == 0.0
    assert (farthest(after, before) > 0.0) != bad
    assert farthest(weights(second), {name: held[name] + after[name] - before[name] for name in held}) <= 1e-5
    assert (farthest(weights(first), after) == 0.0) == (bad or mode == "diloco")


def anchors(island: Sequence[Stage]) -> dict[str, torch.Tensor]:
    """The outer weights that an island holds."""
    return {name: one for stage in island for name, one in stage.capture(optimizer=False).weights.items()}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("mode", "outer"),
    [
        ("diloco", {"every_steps": 3}),
        ("streaming", {"every_steps": 6, "fragments": 3, "overlap_steps": 1}),
        ("streaming", {"every_steps": 7, "fragments": 2, "overlap_steps": 2}),
        ("gaia", {}),
    ],
)
def test_the_tokens_of_each_step_are_in_one_version_of_each_fragment(
    mode: str, outer: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a late island in the next one, whoever is late."""
    dice, steps, count = Random(seed), 29, 4
    spec = spec_of(mode, count, steps=steps, **outer)
    course, late, log = outer_courses(spec)[0], dict[int, set[int]](), list[OuterRecord]()
    for due in course.outer:
        able = {island for island in range(count) if dice.random() < 0.4} - late.get(due.fragment, set())
        late[due.fragment] = set() if due.behind == steps or len(able) == count else able
        islands = tuple(sorted({*range(count)} - late[due.fragment]))
        if late[due.fragment]:
            log.append(OuterRecord(due.behind, islands, {}, due.fragment, tuple(sorted(late[due.fragment]))))
    exchanges = TookPart(read(written(log)), count, [(due.behind, due.fragment) for due in course.outer])
    made = ReferenceOuterSteps(spec, [[]] * count)
    trained = [[dice.randrange(1, 1000) for _ in range(steps)] for _ in range(count)]
    counted = [[list[int]() for _ in range(count)] for _ in range(course.fragments)]
    merge = made._merge

    def look(fragment: int, step: int, islands: Sequence[int], late: Collection[int]) -> bool:
        for island in islands:
            counted[fragment][island].append(made._proposed[fragment][island][1])
        return merge(fragment, step, islands, late)

    monkeypatch.setattr(made, "_merge", look)
    for step in range(steps):
        made.after(step, {island: trained[island][step] for island in range(count)}, exchanges)
    for fragment in range(course.fragments):
        merges = [due for due in course.outer if due.fragment == fragment]
        for island in range(count):
            spans, since = list[int](), 0
            for due in merges:
                if island in exchanges.proposers(due.behind - 1, fragment):
                    spans.append(sum(trained[island][since : due.captured]))
                    since = due.captured
            assert counted[fragment][island] == spans
            assert sum(spans) == sum(trained[island])
    assert log, "somebody was late"


@pytest.mark.parametrize("mode", ["diloco", "streaming", "gaia"])
def test_the_cut_changes_no_bit_of_a_job_with_late_islands(mode: str) -> None:
    """They end with the model, and with another one than if nobody had been late."""
    found = list[Trained]()
    for stages in (1, 3):
        spec = spec_of(mode, every_steps=2, stages=stages)
        first, *_ = outer_courses(spec)[0].outer
        log = [OuterRecord(first.behind, (1,), {}, first.fragment, (0,))]
        found.append(train_local(spec, batches_of(spec), log=log))
    assert (found[0].losses, found[0].evaluations, found[0].sha256) == (
        found[1].losses,
        found[1].evaluations,
        found[1].sha256,
    )
    assert found[0].sha256 != train(spec_of(mode, every_steps=2)).sha256
    if mode == "diloco":
        alone = train_local(spec, batches_of(spec), log=[OuterRecord(step, (1,)) for step in (2, 4, 6)])
        assert found[0].evaluations[0] == alone.evaluations[0], "island 0 holds no outer weights behind step 2"


def test_nothing_is_saved_where_an_island_was_late(tmp_path: Path) -> None:
    """Behind the next exchange it is, and goes on from there."""
    spec, log = spec_of(every_steps=2, steps=8), [OuterRecord(4, (0,), late=(1,))]
    whole, found = kept(spec, tmp_path, log=log, every_steps=4)
    assert [evaluation.step for evaluation in found] == [6]
    again = train_local(spec, batches_of(spec), start=found[0], log=log)
    assert (again.sha256, again.losses) == (whole.sha256, whole.losses[6:])


# Checkpoints ---------------------------------------------------------------------------------------------------------


def changed(spec: JobSpec, section: str, **values: object) -> JobSpec:
    """The spec with other values, resolved anew."""
    held = spec.model_dump()
    held[section] |= values
    if "stages" in values:
        held["pipeline"]["split"] = "auto"
    return resolve(parse_job(held), Basis(257))


def kept(
    spec: JobSpec, folder: Path, log: Sequence[OuterRecord] = (), **changes: object
) -> tuple[Trained, list[Checkpoint]]:
    """Train and keep every checkpoint that is due."""
    spec = changed(spec, "checkpoint", keep_last=9, **changes)
    storage = LocalStorage(folder)
    checkpoints = LocalCheckpoints(storage, spec, {}, lambda _said: None)
    trained = train_local(
        spec,
        batches_of(spec),
        on_commit=lambda islands, report: (
            checkpoints.after(islands, report.step + 1, report.loss, report.tokens, whole=report.is_whole) and None
        ),
        log=log,
    )
    return trained, list_checkpoints(storage)[0]


@pytest.mark.parametrize(("tied", "optimizer"), [(False, "adamw"), (True, "sgd")])
def test_a_checkpoint_brings_back_every_island_bit_for_bit_at_any_number_of_stages(
    tmp_path: Path, tied: bool, optimizer: str
) -> None:
    spec = changed(spec_of(every_steps=2, tied=tied, steps=7), "training", optimizer=optimizer)
    whole, found = kept(spec, tmp_path, every_steps=3)
    assert [evaluation.step for evaluation in found] == [4, 6], "behind the first exchange that follows steps 3 and 6"
    for start in found:
        assert fault_of(start) == ""
        for stages in (1, 3):
            again = changed(spec, "pipeline", stages=stages)
            trained = train_local(again, batches_of(again), start=start)
            assert (trained.sha256, trained.losses) == (whole.sha256, whole.losses[start.step :])


@pytest.mark.parametrize("mode", ["streaming", "gaia"])
def test_islands_that_merge_fragments_in_turn_go_on_from_a_checkpoint_with_weights_of_their_own(
    tmp_path: Path, mode: str
) -> None:
    """With gaia these have what was not significant yet."""
    spec = spec_of(mode, every_steps=4, fragments=2, overlap_steps=1, steps=10)
    whole, found = kept(spec, tmp_path, every_steps=1)
    assert [evaluation.step for evaluation in found] == [3, 5, 7, 9], "behind each merge"
    # Each fragment at each number of stages; in `make test-all` each merge.
    for start, (kept_stages, other_stages) in zip(found, ((1, 3), (3, 1), (3, 1), (1, 3)), strict=True):
        assert fault_of(start) == ""
        for stages in (kept_stages, *others(other_stages)):
            again = changed(spec, "pipeline", stages=stages)
            trained = train_local(again, batches_of(again), start=start)
            assert (trained.sha256, trained.losses) == (whole.sha256, whole.losses[start.step :])
    for count in (1, 4) if mode == "streaming" else (4,):
        other = spec_of(mode, islands=count, every_steps=4, fragments=2, overlap_steps=1, steps=10)
        assert len(train_local(other, batches_of(other), start=found[0]).losses) == 7


def test_a_checkpoint_with_islands_goes_on_with_more_of_them_with_fewer_and_without(tmp_path: Path) -> None:
    """With what there is: the outer weights and their momentum, and the optimizer of another island."""
    _, (start, *_) = kept(spec_of(every_steps=2), tmp_path, every_steps=2)
    for count in (1, 4):
        spec = spec_of(islands=count, every_steps=2)
        assert len(train_local(spec, batches_of(spec), start=start).losses) == 4
    plain = spec_of("allreduce", 1)
    assert len(train_local(plain, batches_of(plain), start=start).losses) == 4


def test_a_checkpoint_without_islands_is_where_islands_may_begin(tmp_path: Path) -> None:
    _, (start, *_) = kept(spec_of("allreduce", 1), tmp_path, every_steps=3)
    spec = spec_of(every_steps=3)
    assert len(train_local(spec, batches_of(spec), start=start).losses) == 3
    other = spec_of(every_steps=2)
    with pytest.raises(InvalidConfig, match="of step 3, and islands that exchange every 2 steps do not begin there"):
        train_local(other, batches_of(other), start=start)


def test_a_pause_waits_for_the_next_exchange() -> None:
    spec = changed(spec_of(every_steps=3), "limits", on_nonfinite="pause")
    seen: list[int] = []

    def spoilt(islands: Islands, report: StepReport) -> None:
        seen.append(report.step)
        if report.step == 0:
            next(iter(islands[1][0].weights.newest().values())).data.fill_(math.nan)

    with pytest.raises(JobFailed, match="the gradient of step 1 is not finite"):
        train_local(spec, batches_of(spec), on_commit=spoilt)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize(("speeds", "shares"), [((3.0, 1.0), (3, 1)), *others(((5.0, 3.0), (5, 3)))])
def test_islands_train_the_leases_that_fit_their_speeds_behind_the_first_period(
    speeds: tuple[float, float], shares: tuple[int, int]
) -> None:
    """All of each step of the job is trained, so its losses are those of as many tokens."""
    spec = changed(spec_of(every_steps=2, compression="none"), "islands", shares="speed")
    batches = batches_of(spec)
    plain = train_local(changed(spec, "islands", shares="equal"), batches_of(spec_of(every_steps=2)))
    tokens: list[int] = []
    equal, unequal = (
        train_local(spec, batches, speeds=told, on_step=lambda report: tokens.append(report.tokens))
        for told in ((), speeds)
    )
    assert set(tokens) == {8 * T}
    assert equal.sha256 != unequal.sha256
    assert equal.losses[:2] == unequal.losses[:2], "until then they are equal"
    assert (equal.sha256, equal.losses) == (plain.sha256, plain.losses)
    leases, log = Leases(2, 4, spec.training.steps, 2), list[Cut]()
    for start in range(2, spec.training.steps, 2):
        log.append(leases.anew({0: start, 1: start}, dict(enumerate(2 * 4 * share // sum(shares) for share in shares))))
        leases.cut(log[-1])
    again = train_local(spec, batches, log=log)
    assert (again.sha256, again.losses) == (unequal.sha256, unequal.losses)


def test_a_log_in_which_an_island_trains_nothing_in_a_step_is_refused() -> None:
    spec = changed(spec_of(every_steps=2), "islands", shares="speed")
    log = [Cut({0: 3, 1: 3}, {0: ((10, 12), (14, 16)), 1: ()})]
    with pytest.raises(InvalidConfig, match="island 1 has no microbatch to train in step 3"):
        train_local(spec, batches_of(spec), log=log)
    alone = OuterRecord(4, (0,))
    assert train_local(spec, batches_of(spec), log=[*log, alone, OuterRecord(spec.training.steps, (0,))]).losses
