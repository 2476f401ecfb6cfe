"""`python -m swarm.relay`, also `swarm relay`: carries bytes to stage servers that can only dial out."""

from __future__ import annotations

from swarm.process.startup import quiet_start

with quiet_start():
    from pathlib import Path
    from typing import Annotated

    import typer

    from swarm.home import data_folder
    from swarm.listening import LOOPBACK
    from swarm.pki.tokens import read_line
    from swarm.process import lifecycle
    from swarm.process.callers import Logins
    from swarm.process.logs import configure
    from swarm.relay.app import RelayOptions, serve
    from swarm.relay.budget import budget_of

cli = lifecycle.program()


@cli.command()
def relay(
    listen: Annotated[
        str,
        typer.Option(
            help="HOST:PORT for stage servers, which all must reach; port 0 = any.",
            show_default="port 7955 of this machine's address on the way to the scheduler",
        ),
    ] = "",
    announce: Annotated[
        str, typer.Option(help="HOST:PORT at which stage servers reach the relay.", show_default="where it listens")
    ] = "",
    join: lifecycle.JoinLine = "",
    join_file: lifecycle.JoinFile = None,
    scheduler: Annotated[
        str, typer.Option(help="The scheduler's HOST:PORT.", show_default="the one that was joined")
    ] = "",
    max_rate: Annotated[
        str, typer.Option(help="Carry no more than this for all together, such as 200Mbit.", show_default="no limit")
    ] = "",
    max_bytes_per_job: Annotated[
        str, typer.Option(help="Carry no more than this for a job, such as 2TiB.", show_default="no limit")
    ] = "",
    http_host: lifecycle.HttpHost = LOOPBACK,
    http_port: lifecycle.HttpPort = "9464",
    http_user: lifecycle.HttpUsers = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Identity of this relay; one process each.", show_default="user data folder"),
    ] = None,
    log_level: lifecycle.LogLevel = "info",
    log_format: lifecycle.LogFormatName = "auto",
) -> None:
    """Carry bytes between stage servers of which one cannot be dialled (swarm stage-server --via-relay). They are
    encrypted from end to end: a relay cannot read them."""
    configure(log_level, lifecycle.log_format_of(log_format))
    options = RelayOptions(
        listen,
        announce,
        scheduler,
        read_line(join, join_file),
        lifecycle.check_host(http_host),
        lifecycle.http_port_of(http_port),
        data_dir or data_folder() / "relay",
        budget_of(max_rate, max_bytes_per_job),
        Logins.named(http_user or ()),
    )
    options.check()
    lifecycle.run_process(serve(options))


if __name__ == "__main__":
    lifecycle.run_cli(cli, "swarm relay")
