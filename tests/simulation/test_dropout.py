"""Masks are the same at every replica, however often and wherever a microbatch is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.reference.trainer import train_local
from tests.support.scenes import resolved
from tests.support.simulated import Tokens, run_swarm, small_spec, write_text


@pytest.mark.parametrize(("stages", "recompute"), [(2, True)])
def test_the_swarm_with_dropout_ends_with_the_weights_of_one_process(
    tmp_path: Path, stages: int, recompute: bool
) -> None:
    source = write_text(tmp_path)
    config = {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 16}
    dropout = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.1)
    hashes = []
    for fields in (config, config | dropout):
        spec = resolved(
            small_spec(
                source,
                model__family="gpt2",
                model__config=fields,
                model__recompute=recompute,
                pipeline__stages=stages,
                training__steps=3,
            )
        )
        tokens = Tokens.make(tmp_path, spec)
        hashes.append(train_local(spec, tokens.batches(spec)).sha256)
    run = run_swarm(spec, tokens, 2 * stages, seed=stages)
    assert run.sha256 == hashes[1] != hashes[0]
    if stages > 1:
        assert run.counts.duplicated > 0
        assert run.counts.reordered > 0
