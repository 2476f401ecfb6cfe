"""Fine-tuning with real processes: by the command line, a Transformers folder in, and one out that loads there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from swarm.data.batches import Batches, TokenData
from swarm.data.corpus import open_corpus, tokenise
from swarm.hf.pretrained import ground
from swarm.job.spec import load_job
from swarm.reference.trainer import save_folder, train_local
from tests.support.processes import Cluster
from tests.support.simulated import write_text
from tests.support.tokenizer import write_tokenizer

JOB = """\
name = "fine"
[model]
id = {model}
dtype = "float32"
[data]
source = {source}
sequence_length = 16
[training]
steps = 5
global_batch_sequences = 12
microbatch_sequences = 2
warmup_steps = 1
learning_rate = 1e-2
reproducible = true
[pipeline]
stages = 2
compression = "none"
overlap = 2
"""


def client(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "client", *arguments, "--scheduler", cluster.address]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


def loss_of(folder: Path, batches: Batches) -> float:
    """Mean loss per token of a folder's model on a few microbatches, computed by Transformers alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    summed = count = 0.0
    with torch.no_grad():
        for step in range(20, 24):
            ids, targets = (torch.from_numpy(part).long() for part in batches.microbatch(step, 0))
            logits = model(ids).logits.float().flatten(0, 1)
            summed += float(torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum"))
            count += float((targets != -100).sum())
    return summed / count


def test_a_folder_is_fine_tuned_and_comes_back(tmp_path: Path) -> None:
    torch.manual_seed(4)
    fields = {"vocab_size": 410, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "sliding_window": 5}
    config = AutoConfig.for_model("mistral", **fields)
    start: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    start.save_pretrained(tmp_path / "base", max_shard_size="10KB")
    write_tokenizer(tmp_path / "base")
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(model=json.dumps(str(tmp_path / "base")), source=json.dumps(str(write_text(tmp_path)))))

    with Cluster(tmp_path) as cluster:
        cluster.add_servers(2)
        submitted = client(cluster, "submit", str(job))
        assert submitted.returncode == 0, f"{submitted.stderr}\n{cluster.tails()}"
        assert "of weights" in submitted.stderr
        name = submitted.stdout.strip()
        view = json.loads(client(cluster, "status", name, "-o", "json").stdout)["data"]
        pulled = client(cluster, "pull", name, str(tmp_path / "pulled"))
        assert pulled.returncode == 0, pulled.stderr
        logs = client(cluster, "logs", name, "-n", "0").stdout
        assert logs.count("weights read") == 2, logs

    grounded = ground(load_job(job))
    corpus = open_corpus(grounded)
    spec = corpus.resolve(grounded)
    manifest = tokenise(spec, tmp_path / "tokens", None, corpus)
    batches = Batches.of_job(
        spec, TokenData.open([shard.path for shard in manifest.shards], manifest.token_dtype), manifest.end_of_text
    )
    trained = train_local(spec, batches)
    assert view["weights_sha256"] == trained.sha256
    save_folder(trained.stages, spec, tmp_path / "local", corpus.tokenizer.tokenizer_files())
    losses = [loss_of(tmp_path / folder, batches) for folder in ("pulled", "local", "base")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0] < losses[2] - 0.1
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "pulled" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()
    text = "the quick brown fox"
    before, after = (AutoTokenizer.from_pretrained(tmp_path / folder)(text).input_ids for folder in ("base", "pulled"))
    assert before == after
