"""`python -m stage_server`, also `swarm stage-server`: one process per device."""

from __future__ import annotations

from swarm.listening import LOOPBACK
from swarm.process.startup import quiet_start

with quiet_start():
    import os
    from pathlib import Path
    from typing import Annotated

    import typer

    from stage_server.lean_imports import lean_imports
    from stage_server.options import DEFAULT_SHARE, MemoryShare, StageServerOptions
    from swarm.home import data_folder
    from swarm.mqtt.topics import DEFAULT_SWARM, check_swarm
    from swarm.pki.tokens import read_line
    from swarm.process import lifecycle
    from swarm.process.callers import Logins
    from swarm.process.logs import configure

SERVERS_MAX = 256  # without a --data-dir, on one machine

cli = lifecycle.program()


@cli.command()
def stage_server(
    context: typer.Context,
    broker: Annotated[
        str,
        typer.Option(
            help="MQTT broker where the scheduler is announced: mqtt://HOST:PORT or mqtts://HOST:PORT; "
            "SWARM_BROKER_FILE may name a file with it."
        ),
    ] = "",
    scheduler: Annotated[str, typer.Option(help="The scheduler's HOST:PORT, instead of --broker.")] = "",
    swarm: Annotated[str, typer.Option(help="Name of the scheduler's swarm at the broker.")] = DEFAULT_SWARM,
    listen: Annotated[
        str,
        typer.Option(
            help="HOST:PORT for other stage servers; port 0 = any.",
            show_default="port 7951 or the next free one, at this machine's address on the way to the scheduler",
        ),
    ] = "",
    announce: Annotated[
        str, typer.Option(help="HOST:PORT at which others reach this server.", show_default="where it listens")
    ] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda:N or mps.")] = "auto",
    stage: Annotated[str, typer.Option(help="Serve only this stage: auto or its number.")] = "auto",
    threads: Annotated[
        str,
        typer.Option(
            help="torch CPU threads: auto (OMP_NUM_THREADS, else all cores) or a number; servers that "
            "share a machine need their share each."
        ),
    ] = "auto",
    max_memory: Annotated[
        str, typer.Option(metavar="SIZE|PERCENT", help="Memory to use: 20GiB, or a share of what is free now.")
    ] = DEFAULT_SHARE,
    http_host: lifecycle.HttpHost = LOOPBACK,
    http_port: lifecycle.HttpPort = "9464",
    http_user: lifecycle.HttpUsers = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Identity of this server; one process each.", show_default="the first free in user data"),
    ] = None,
    connect_retry_max: Annotated[float, typer.Option(min=0.1, help="Longest pause between dials, seconds.")] = 60.0,
    orphan_timeout: Annotated[
        float, typer.Option(min=1.0, help="How long to keep a job's state without a scheduler, seconds.")
    ] = 600.0,
    drain_timeout: Annotated[
        float,
        typer.Option(min=0.0, help="How long SIGTERM or Ctrl-C waits until others have taken the work over, seconds."),
    ] = 60.0,
    allow_hub: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Load models of the hub for jobs, such as 'meta-llama/*'; may be repeated.",
            show_default="none",
        ),
    ] = None,
    hub_token: Annotated[
        bool, typer.Option("--hub-token", help="Ask the hub as yourself (HF_TOKEN, login): jobs get what you may see.")
    ] = False,
    join: lifecycle.JoinLine = "",
    join_file: lifecycle.JoinFile = None,
    site: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Where this server is: those of one site have fast links to each other and serve one island.",
            show_default="not said",
        ),
    ] = "",
    proxy: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Dial stage servers at other hosts through this HTTP proxy, which must allow CONNECT.",
            show_default="none",
        ),
    ] = "",
    via_relay: Annotated[
        bool,
        typer.Option("--via-relay", help="Others cannot dial this server: be reached through the relays of the swarm."),
    ] = False,
    insecure: lifecycle.Insecure = False,
    log_level: lifecycle.LogLevel = "info",
    log_format: lifecycle.LogFormatName = "auto",
) -> None:
    """Serve a stage of the job that the scheduler assigns: compute microbatches, average gradients, hold weights."""
    # Read by cuBLAS when it is first used; with it, equal products give equal bits on one GPU.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if proxy:
        # Else gRPC dials past it whatever no_proxy names.
        os.environ["no_grpc_proxy"] = ""  # noqa: SIM112  # gRPC reads no other
    by_broker, directly = (lifecycle.given_as_flag(context, name) for name in ("broker", "scheduler"))
    if broker and scheduler and by_broker != directly:
        # The flag wins over the other way's variable in the environment.
        broker, scheduler = (broker, "") if by_broker else ("", scheduler)
    form = lifecycle.log_format_of(log_format)
    configure(log_level, form)
    options = StageServerOptions(
        broker=broker,
        scheduler=scheduler,
        swarm=check_swarm(swarm),
        listen=listen,
        announce=announce,
        device=device,
        stage=lifecycle.auto_int("--stage", stage, auto=-1, least=0),
        threads=lifecycle.auto_int("--threads", threads, auto=0, least=1),
        max_memory=MemoryShare.parse(max_memory),
        http_host=lifecycle.check_host(http_host),
        http_port=lifecycle.http_port_of(http_port),
        data_dirs=_own_folders() if data_dir is None else (data_dir,),
        connect_retry_s_max=connect_retry_max,
        orphan_timeout_s=orphan_timeout,
        drain_timeout_s=drain_timeout,
        insecure=insecure,
        site=site,
        proxy=proxy,
        via_relay=via_relay,
        join=read_line(join, join_file),
        allow_hub=tuple(allow_hub or ()),
        hub_token=hub_token,
        log_level=log_level,
        log_format=form,
        logins=Logins.named(http_user or ()),
    )
    options.check()
    with quiet_start(), lean_imports():
        from stage_server.app import serve  # noqa: PLC0415  # loads torch: errors in flags must not wait for it
    farewell = lifecycle.Farewell()
    lifecycle.run_process(serve(options, farewell), farewell)


def _own_folders() -> tuple[Path, ...]:
    folder = data_folder() / "stage-server"
    return tuple(folder / str(number) for number in range(SERVERS_MAX))


if __name__ == "__main__":
    lifecycle.run_cli(cli, "swarm stage-server")
