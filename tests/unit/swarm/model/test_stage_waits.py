"""How often the host waits for its device: counted on a far device, where no number of tensors may change it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.processes import Process


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What tests/support/waits.py counts."""
    log = tmp_path_factory.mktemp("waits") / "log"
    counting = Process.start(log, "tests.support.waits").child
    out, _ = counting.communicate(timeout=240)
    assert counting.returncode == 0, log.read_text()
    return json.loads(out)


def test_the_far_device_counts_reads_and_copies_and_refuses_to_mix(counted: Any) -> None:
    *taken, refusal = counted["the device itself"]
    assert taken == [["_to_copy"], ["_local_scalar_dense"], ["_to_copy"], ["copy_"], []]
    assert "mixes far and near" in refusal[0]


def test_the_host_waits_once_for_a_forward_and_once_for_a_backward(counted: Any) -> None:
    assert len(counted["microbatches"]) == 15
    for microbatch, waits in counted["microbatches"].items():
        assert len(waits) == 2, microbatch
    assert len(counted["recomputation and dropout"]) == 2
    assert len(counted["bfloat16 parameters"]) == 2


def test_a_device_decodes_what_arrives_with_the_bits_of_the_cpu_and_without_a_wait(counted: Any) -> None:
    """Received tensors were decoded on the host, and crossed to the device as float32: 4 bytes for each element."""
    found = counted["decoded"]
    assert all(decoded["same bits"] and decoded["waits"] == [] for decoded in found.values()), found
    # A GPU has other bits for it than a CPU, which this device does not show.
    assert all(decoded["divided by numbers"] == 0 for decoded in found.values()), found
    crossed = {name: round(one["bytes of an element"], 2) for name, one in found.items()}
    assert crossed == {"none": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.02, "fp4": 0.52}


def test_a_step_waits_at_most_four_times_whatever_the_number_of_tensors(counted: Any) -> None:
    """Once for each of the two units' sums, once for the digest; LAMB once more for its norms."""
    assert set(counted["steps"]) >= {"adamw", "sgd", "lamb", "muon", "bfloat16 parameters"}
    for optimizer, (few, many) in counted["steps"].items():
        assert len(few) == len(many) == (4 if optimizer == "lamb" else 3), optimizer


def test_steps_in_groups_take_few_operations_whatever_the_number_of_tensors_and_no_wait(counted: Any) -> None:
    """Each small tensor took all operations of its optimizer; in a group it takes one, which scales its gradient."""
    for optimizer, found in counted["groups"].items():
        few, many, few_grouped, many_grouped = found["operations"]
        assert many >= 10 * few, optimizer
        if optimizer == "lamb":  # it steps one tensor at a time
            assert (few_grouped, many_grouped) == (few, many)
        else:
            assert many_grouped - few_grouped == 45, optimizer
        assert found["waits"] == ([1] * 4 if optimizer == "lamb" else [0] * 4), optimizer
        (near, far), (near_grouped, far_grouped) = found["probes"]
        assert near == far == near_grouped == far_grouped, "the probe steps as the stage does"


def test_sums_and_norms_of_a_large_tensor_take_the_operations_of_a_small_tensor_and_the_bits_of_the_cpu(
    counted: Any,
) -> None:
    """On a GPU a reproducible backward of 425 M parameters took 27,318 kernels, and six times as long as an ordinary
    backward: sums went tile by tile, and norms block by block."""
    few, many = counted["large tensors"]
    assert few["same bits"]
    assert many["same bits"]
    assert many["operations"] == few["operations"]


def test_launches_do_not_grow_with_the_elements_of_a_tensor(counted: Any) -> None:
    """A GPU takes 5 us for each launch: digests of 100 tensors took 2,480, and lay in front of the next microbatch."""
    bounds = {"accumulate": 6, "norms": 40, "sgd": 12, "adamw": 12, "lookahead": 12, "digest": 25, "small digests": 30}
    for power, found in counted["launches"].items():
        assert found.keys() == bounds.keys()
        assert all(found[name] <= bounds[name] for name in bounds), (power, found)


def test_a_part_waits_beside_the_compute_thread_and_a_checkpoint_waits_once(counted: Any) -> None:
    """A checkpoint took two waits a tensor, and a part kept microbatches waiting while gigabytes were copied."""
    found = counted["copies to the host"]
    assert (found["part"], len(found["capture"])) == ([], 1)
    assert found["stays"], "what was captured is no copy"


def test_an_optimizer_on_the_host_waits_once_for_many_parameters_and_has_the_bits_of_a_cpu(counted: Any) -> None:
    assert counted["a step on the host"] == {"waits": ["event"], "same bits": True}


def test_no_stream_uses_memory_before_it_is_ready_or_after_it_is_free(counted: Any) -> None:
    assert counted["races"] == []
    assert counted["unsealed"]


def test_each_call_between_streams_that_is_forgotten_is_found(counted: Any) -> None:
    found = {call: [bool(races) for races in scenes] for call, scenes in counted["planted"].items()}
    assert found == {
        "": [False, False],
        "wait_event": [True, False],
        "wait_stream": [False, True],
        "record_stream": [True, True],
        "synchronize": [False, True],
    }


def test_a_gradient_that_does_not_fit_is_noticed_on_the_device_and_nothing_is_added(counted: Any) -> None:
    found = counted["not finite"]
    assert (found["finite"], found["added"]) == (False, False)
    assert len(found["waits"]) == 1


def test_state_is_handed_to_a_joiner_with_one_wait(counted: Any) -> None:
    assert len(counted["snapshot"]) == 1


def test_digests_and_probes_are_those_of_the_cpu_and_wait_once(counted: Any) -> None:
    found = counted["digests"]
    assert found["digests"][0] == found["digests"][1]
    assert len(found["waits"]) == 1
    assert all(near == far for near, far in found["probes"].values())
