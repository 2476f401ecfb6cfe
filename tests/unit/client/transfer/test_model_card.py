"""What a model's README.md says, and what it does not tell of somebody's machine."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from client.records import Checkpoint, Job
from client.transfer.model_card import model_card
from swarm.job.spec import parse_job

SOURCES = {"/home/ann/secret/corpus/*.jsonl": "*.jsonl", "hf:owner/name": "hf:owner/name", "C:\\texts\\a.txt": "a.txt"}


def card(source: str = "a.txt", checkpoint: Checkpoint = Checkpoint(step=20), **facts: Any) -> str:  # noqa: B008
    spec = parse_job(
        {
            "name": "tiny",
            "model": {"config": {"num_hidden_layers": 2}},
            "data": {"source": source},
            "training": {"steps": 20, "warmup_steps": 1},
        }
    )
    return model_card(
        Job(id="tiny-1", name="tiny", step=20, spec_json=spec.model_dump_json(), **facts), checkpoint, "ab" * 32, "0.1"
    )


def test_a_card_begins_with_what_the_hub_reads() -> None:
    front = card().split("---\n")[1].splitlines()
    values = {line.partition(": ")[0]: json.loads(line.partition(": ")[2]) for line in front}
    assert values == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["swarm"]}


@pytest.mark.parametrize(("source", "shown"), SOURCES.items())
def test_a_card_names_the_data_and_no_folder_of_a_machine(source: str, shown: str) -> None:
    assert f"| data | {shown} |" in card(source)


def test_a_card_tells_losses_that_were_measured_only() -> None:
    assert "loss" not in card()
    told = card("a.txt", Checkpoint(20, loss=2.0), evaluation_loss=math.log(10.0), evaluation_step=20, tokens=640)
    assert "| training loss | 2.0000 nats per token |" in told
    assert "perplexity 10.00, after step 20" in told
    assert "| tokens | 640 |" in told
    assert f"| weights sha256 | {'ab' * 32} |" in told


def test_a_card_of_an_earlier_checkpoint_tells_nothing_of_the_end_of_its_job() -> None:
    """A pull of step 5 said "20 of 20", with the losses of step 20."""
    end: dict[str, Any] = {"loss": 2.0, "evaluation_loss": 2.5, "evaluation_step": 20, "tokens": 640}
    told = card("a.txt", Checkpoint(5, loss=3.0), **end)
    assert "| steps | 5 of 20, of " in told
    assert "| training loss | 3.0000 nats per token |" in told
    assert "| validation loss |" not in told
    assert "| tokens |" not in told
    assert "| steps |" not in card("a.txt", Checkpoint(), **end), "it is not known"
