"""A stage server loads less of the libraries than they load by themselves, and computes the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swarm.data import ByteTokenizer
from swarm.job.partition import resolve
from swarm.reference.trainer import train_local
from tests.support.simulated import Tokens, small_spec, write_text

BASE = {"hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3}
GATED = BASE | {"intermediate_size": 50, "num_key_value_heads": 1}
WINDOW = {"sliding_window": 5}
MODELS = {
    "llama": GATED,
    "mistral": GATED | WINDOW,
    "qwen2": GATED | WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": GATED | {"head_dim": 10},
    "gemma2": GATED | WINDOW | {"head_dim": 10},
    "gpt2": {"n_embd": 36, "n_layer": 2, "n_head": 3},
    "gpt_neox": BASE | {"intermediate_size": 50, "rotary_pct": 0.5},
}

LEAN = """
import json, sys
from pathlib import Path
from stage_server.lean_imports import UNUSED, lean_imports
with lean_imports():
    import stage_server.app
from tests.integration.test_lean_imports import train
hashes = train(Path(sys.argv[1]))
loaded = [name for name in UNUSED if name in sys.modules]
from transformers.utils.import_utils import define_import_structure
import torch._dynamo
print(json.dumps([hashes, loaded, torch._dynamo.is_compiling(), define_import_structure.__module__]))
"""


def train(folder: Path) -> dict[str, str]:
    """sha256 of the weights after two steps, by family."""
    folder.mkdir()
    source = write_text(folder)
    hashes = {}
    for number, (family, config) in enumerate(MODELS.items()):
        spec = small_spec(
            source,
            model__family=family,
            model__config=config,
            model__recompute=bool(number % 2),
            training__steps=2,
            training__optimizer=("adamw", "sgd", "nadamw", "lamb")[number % 4],
            pipeline__stages=2,
        )
        spec = resolve(spec, vocabulary_size=ByteTokenizer.vocabulary_size, stages_if_auto=1)
        tokens = Tokens.make(folder / family, spec)
        hashes[family] = train_local(spec, tokens.batches(spec), device=torch.device("cpu")).sha256
    return hashes


@pytest.mark.timeout(300)
def test_every_family_trains_to_the_same_weights_without_what_is_left_out(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAN, str(tmp_path / "lean")]
    lean = subprocess.run(command, capture_output=True, text=True, check=False)
    assert lean.returncode == 0, lean.stderr[-3000:]
    hashes, loaded, compiling, catalogue = json.loads(lean.stdout)
    assert loaded == [], "what is left out at the start is loaded later all the same"
    assert compiling is False, "after the imports the real module is to be had"
    assert catalogue == "transformers.utils.import_utils", "and the real function"
    assert len(set(hashes.values())) == len(MODELS)
    assert hashes == train(tmp_path / "full")
