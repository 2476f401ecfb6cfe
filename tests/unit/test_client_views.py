"""How a job looks to people and programs."""

from __future__ import annotations

import math

from rich.console import Console

from client.follow import progress_line
from client.views import job_table, job_values
from swarm.wire import jobs_pb2 as pb


def view(**facts: object) -> pb.JobView:
    return pb.JobView(id="j", state="running", step=4, steps=9, loss=2.0, tokens_per_s=10.0, eta_s=3.0, **facts)


def shown(job: pb.JobView) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(job_table(job))
    return capture.get()


def test_validation_loss_and_perplexity_are_shown_once_there_is_an_evaluation() -> None:
    evaluated = view(evaluation_loss=math.log(10.0), evaluation_step=4)
    assert "validation 2.3026 (perplexity 10.00)" in progress_line(evaluated)
    assert "validation loss" in shown(evaluated)
    assert "2.3026 (perplexity 10.00) after step 4" in shown(evaluated)
    values = job_values(evaluated)["evaluation"]
    assert (values["step"], round(values["perplexity"], 6)) == (4, 10.0)
    never = view(evaluation_loss=math.nan)
    assert "validation" not in progress_line(never) + shown(never)
    assert job_values(never)["evaluation"] is None


def test_a_validation_loss_that_is_not_finite_is_a_dash_and_null() -> None:
    broken = view(evaluation_loss=math.nan, evaluation_step=2)
    assert "validation - (perplexity -)" in progress_line(broken)
    assert job_values(broken)["evaluation"] == {"step": 2, "loss": None, "perplexity": None}
    assert job_values(view(evaluation_loss=1e9, evaluation_step=2))["evaluation"]["perplexity"] > 1e300
