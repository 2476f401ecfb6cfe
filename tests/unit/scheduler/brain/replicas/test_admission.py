"""Which devices may serve together, and where the optimizer of each stage runs."""

from __future__ import annotations

import pytest

from scheduler.brain.replicas.admission import device_kind, explain_probes, step_places, step_together
from swarm.types import PeerId, UnitName

H100, A100 = "cuda:0 NVIDIA H100 80GB HBM3", "cuda:0 NVIDIA A100"


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("cpu", "cpu"),
        ("mps", "mps"),
        ("cuda:3", "cuda"),
        ("cuda:1 NVIDIA H100 80GB HBM3", "cuda NVIDIA H100 80GB HBM3"),
        ("", ""),
    ],
)
def test_the_kind_of_a_device_leaves_out_which_of_its_kind_it_is(device: str, kind: str) -> None:
    assert device_kind(device) == kind


def test_stages_that_share_a_unit_step_together() -> None:
    own = {UnitName(f"stage-{stage}"): (stage,) for stage in range(3)}
    assert step_together(3, own) == ((0,), (1,), (2,))
    assert step_together(3, own | {UnitName("tied"): (0, 2)}) == ((0, 2), (1,), (0, 2))


def test_a_stage_of_one_kind_steps_on_its_devices_and_a_mixed_one_on_the_cpu() -> None:
    apart = ((0,), (1,), (2,))
    pools = [[H100, H100.replace(":0", ":1")], ["cpu", H100], ["cpu", "cpu"]]
    assert step_places(pools, apart) == ("device", "cpu", "device")
    assert step_places([[H100, A100]], ((0,),)) == ("cpu",)


def test_tied_stages_of_different_kinds_both_step_on_the_cpu() -> None:
    assert step_places([[H100], [H100], ["cpu"]], ((0, 2), (1,), (0, 2))) == ("cpu", "device", "cpu")


def test_differing_probes_are_explained_by_name_and_device() -> None:
    a, b, c = (PeerId(name) for name in "abc")
    devices = {a: H100, b: "cpu", c: "cpu"}
    assert explain_probes({a: "1", b: "1", c: "1"}, devices, (0,)) == ""
    assert explain_probes({}, devices, (0,)) == ""
    fault = explain_probes({a: "1", b: "2", c: "2"}, devices, (1,))
    assert f"replicas of stage 1 than on others: a ({H100}) against b (cpu), c (cpu)" in fault
    assert fault.endswith("cannot be mixed: let machines of one kind serve it")
    assert "stages 0 and 2, which share the tied embedding" in explain_probes({a: "1", b: "2"}, devices, (0, 2))
