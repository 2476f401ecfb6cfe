"""The README.md of a model folder: the model, its origin, its data and its training."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from client.records import Checkpoint, Job
from swarm.job.schedule import perplexity


def model_card(job: Job, checkpoint: Checkpoint, weights_sha256: str, product: str) -> str:
    """The text of the card in Hugging Face's form, for the weights of a checkpoint; `job` has its spec.

    Tokens and validation loss are known for the newest step only; step 0 of the checkpoint: not known.
    """
    spec = job.spec
    model, data, training = spec["model"], spec["data"], spec["training"]
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["swarm"]}
    base = model["id"] if model["id"] and not model["id"].startswith(("/", ".", "~")) else ""
    if base:
        front["base_model"] = base
    is_newest = checkpoint.step == job.step
    rows = {
        "family": model["family"],
        "started from": base or ("a local folder" if model["id"] else "random weights"),
        "data": _shown_source(data["source"]),
        "sequence length": data["sequence_length"],
        "steps": checkpoint.step
        and f"{checkpoint.step} of {training['steps']}, of {training['global_batch_sequences']} sequences",
        "optimizer": f"{training['optimizer']}, learning rate {training['learning_rate']:g}, {training['schedule']}",
        "tokens": job.tokens if is_newest else "",
        "training loss": _nats(checkpoint.loss),
        "validation loss": _validation(job) if is_newest else "",
        "weights sha256": weights_sha256,
    }
    lines = [f"| {name} | {_cell(value)} |" for name, value in rows.items() if value]
    flag = ", trust_remote_code=True" if has_narrow_places(spec) else ""
    head = "\n".join(f"{key}: {json.dumps(value)}" for key, value in front.items())
    return (
        f"---\n{head}\n---\n\n# {job.name}\n\n"
        f"Trained by swarm-stages {product}, job `{job.id}`.\n\n"
        "| | |\n|---|---|\n" + "\n".join(lines) + "\n\n"
        "```python\nfrom transformers import AutoModelForCausalLM\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("."{flag})\n```\n'
    )


def has_narrow_places(spec: Mapping[str, Any]) -> bool:
    """Whether Transformers needs the code in the model's folder to load it."""
    return bool(spec.get("model", {}).get("narrow", {}).get("kind", "none") != "none")


def _shown_source(source: str) -> str:
    """Where the data came from, without the folders of somebody's machine."""
    return source if source.startswith("hf:") else source.replace("\\", "/").rpartition("/")[2]


def _nats(loss: float) -> str:
    return f"{loss:.4f} nats per token" if math.isfinite(loss) else ""


def _validation(job: Job) -> str:
    if not job.evaluation_step or not math.isfinite(job.evaluation_loss):
        return ""
    after = f"after step {job.evaluation_step}"
    return f"{_nats(job.evaluation_loss)}, perplexity {perplexity(job.evaluation_loss):.2f}, {after}"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
