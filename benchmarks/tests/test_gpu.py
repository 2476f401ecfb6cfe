"""The GPU benchmark where there is no GPU: what it counts, what it prints, and how it ends."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measured.gpu import (
    CONFIG,
    SMALL,
    Speed,
    _bits,
    _joiner,
    _plain_torch,
    _whole,
    decoded_otherwise,
    main,
    model_flops,
    parameters,
    run_parts,
    side_by_side,
    table,
)
from benchmarks.measured.ways import Timed, job_of
from swarm.model.families import build
from tests.support.effort import others

CPU = torch.device("cpu")
OPTIONS = Namespace(**SMALL, stages=2, replicas=1, warmup=1, threads=1, compression="none", overlap=0)


def test_the_operations_are_those_that_torch_counts(tmp_path: Path) -> None:
    """Attention counts half of its scores here, because they are causal; torch counts all."""
    spec, _ = job_of(OPTIONS, tmp_path)
    module = build(_whole(spec), 0, CPU)
    tokens = torch.zeros((1, OPTIONS.sequence), dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        module(tokens).sum().backward()
    scores = 6.0 * OPTIONS.layers * OPTIONS.width * OPTIONS.sequence
    assert counter.get_total_flops() / OPTIONS.sequence == pytest.approx(model_flops(spec) + scores, rel=0.1)


def test_the_large_model_has_about_a_billion_parameters(tmp_path: Path) -> None:
    options = Namespace(**vars(OPTIONS) | {"layers": 16, "width": 2048})
    spec, _ = job_of(options, tmp_path, config=CONFIG)
    assert parameters(spec) == pytest.approx(0.95e9, rel=0.01)
    assert model_flops(spec) == pytest.approx(6 * (parameters(spec) - 32_000 * 2048), rel=0.01)


def test_speeds_are_shares_of_the_peak_and_of_the_first_way(tmp_path: Path) -> None:
    spec, _ = job_of(OPTIONS, tmp_path)
    ways = [Speed.of("torch", Timed(200.0, 1.0, 0.0, 1.0), spec), Speed("swarm", 150.0, 1e12)]
    assert ways[0].flops_per_s == 200.0 * model_flops(spec)
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    console.print(table(ways, 4e12, 950_000_000))
    console.file.close()
    (row,) = [line for line in console.export_text().splitlines() if "swarm" in line]
    assert row.replace("│", " ").split() == ["swarm", "150", "1.0", "25.0%", "75.0%"]


def test_the_same_layers_learn_without_a_swarm(tmp_path: Path) -> None:
    spec, manifest = job_of(OPTIONS, tmp_path)
    found = _plain_torch(spec, manifest, CPU, 1)
    assert found.tokens_per_s > 0.0
    assert 4.0 < found.loss < 7.0  # ln 512 = 6.2 before anything was learnt


@pytest.mark.parametrize(("stages", "compression"), [(2, "int8"), *others((2, "none"))])
def test_stage_servers_that_share_a_device_give_the_bits_of_one_process(stages: int, compression: str) -> None:
    ours, theirs = _bits(Namespace(**vars(OPTIONS) | {"stages": stages}), CPU, "float32", compression)
    assert ours == theirs != ""


def test_a_joiner_that_took_half_of_its_state_before_a_commit_has_the_bits_of_its_donor(tmp_path: Path) -> None:
    options = Namespace(**vars(OPTIONS) | {"quick": True})
    pieces, digests = _joiner(options, CPU, tmp_path / "joiner")
    assert "replay" in pieces
    assert digests.endswith("the same bits")


def test_pipelines_of_torch_and_of_a_swarm_learn_what_one_process_learns(tmp_path: Path) -> None:
    options = Namespace(**vars(OPTIONS) | {"stages": 2})
    spec, manifest = job_of(Namespace(**vars(OPTIONS) | {"stages": 1}), tmp_path)
    found = dict(side_by_side(options, tmp_path, spec, manifest, CPU))
    assert list(found) == ["swarm, float32", "torch 1F1B, bfloat16 autocast"]
    one_process = _plain_torch(spec, manifest, CPU, 1).loss
    for way in found.values():
        assert way.tokens_per_s > 0.0
        assert way.loss == pytest.approx(one_process, abs=0.05)


def test_a_part_that_fails_is_named_and_the_others_go_on() -> None:
    def fails() -> Iterator[str]:
        yield "one"
        raise AssertionError("other bits")

    out = StringIO()
    assert run_parts({"first": fails(), "second": iter(["two"])}, [out]) == ["first"]
    lines = out.getvalue().splitlines()
    assert lines[0] == "first    one"
    assert "AssertionError: other bits" in lines
    assert lines[-3:] == ["first    FAILED after 0 s", "second   two", "second   ended after 0 s"]


def test_a_device_that_decodes_as_the_host_is_told_of_no_codec() -> None:
    assert decoded_otherwise(CPU) == []


@pytest.mark.parametrize(
    ("flags", "words"), [((), '"cuda" is not on this machine'), (("--device", "cpu"), "is no GPU")]
)
def test_without_a_gpu_it_says_so_and_ends_with_3(
    flags: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", *flags])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 3
    assert words in capsys.readouterr().err
