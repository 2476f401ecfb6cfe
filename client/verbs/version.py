"""`swarm version`: of this command and of the scheduler."""

from __future__ import annotations

import typer

from client.connection import Scheduler
from client.shell import Shell, product
from swarm.errors import SwarmError
from swarm.messages import PROTOCOL_VERSION

ANSWER_S_MAX = 5.0


def command(context: typer.Context) -> None:
    """Show the version of this command and of the scheduler."""
    shell: Shell = context.obj
    answer = None
    try:
        with Scheduler(shell.scheduler, min(shell.timeout_s, ANSWER_S_MAX)) as scheduler:
            answer = scheduler.version()
    except SwarmError as error:
        shell.say(error.message)
    if shell.json:
        theirs = answer and {"product": answer.product, "protocol": answer.protocol, "epoch": answer.epoch}
        shell.data({"product": product(), "protocol": PROTOCOL_VERSION, "scheduler": theirs})
        return
    print(f"swarm {product()}, protocol {PROTOCOL_VERSION}")
    if answer is not None:
        print(f"scheduler {answer.product}, protocol {answer.protocol}, at {shell.scheduler}")
