"""`python -m scheduler`, also `swarm scheduler`: the control plane."""

from __future__ import annotations

from swarm.listening import LOOPBACK
from swarm.process.startup import quiet_start

with quiet_start():
    from pathlib import Path
    from typing import Annotated

    import typer

    from scheduler.app import SchedulerOptions, serve
    from scheduler.brain.retention import kept_for_s
    from scheduler.storage.checkpoints.catalog import root_of
    from swarm.home import data_folder
    from swarm.mqtt.topics import DEFAULT_SWARM, check_swarm
    from swarm.process import lifecycle
    from swarm.process.callers import Logins
    from swarm.process.logs import configure

cli = lifecycle.program()


@cli.command()
def scheduler(
    listen: Annotated[
        str, typer.Option(help="HOST:PORT for clients and stage servers; port 0 = any.")
    ] = f"{LOOPBACK}:7950",
    announce: Annotated[
        str, typer.Option(help="HOST:PORT at which others reach the scheduler.", show_default="where it listens")
    ] = "",
    http_host: lifecycle.HttpHost = LOOPBACK,
    http_port: Annotated[str, typer.Option(help="Port of /metrics and /healthz; 0 = any, none = off.")] = "9464",
    http_user: lifecycle.HttpUsers = None,
    db: Annotated[
        str,
        typer.Option(
            help="Database: sqlite (a file in --data-dir) or an SQLAlchemy URL; SWARM_DB_FILE may name a file with it."
        ),
    ] = "sqlite",
    broker: Annotated[
        str,
        typer.Option(
            help="Broker where stage servers find us: mqtt:// or mqtts://HOST:PORT, embedded (on loopback) or none; "
            "SWARM_BROKER_FILE may name a file with it."
        ),
    ] = "embedded",
    swarm: Annotated[
        str, typer.Option(help="Name under which stage servers find this scheduler at the broker.")
    ] = DEFAULT_SWARM,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Where jobs, token shards and checkpoints are kept.", show_default="user data folder"),
    ] = None,
    checkpoint_root: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder, or URL (s3://, gs://), below which a job's checkpoint.dir may lie, beside --data-dir; may be "
            "given more than once.",
            show_default="--data-dir alone",
        ),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(min=0.5, max=600.0, help="How long a lost peer may stay away before its work is void, seconds."),
    ] = 5.0,
    record: Annotated[
        bool, typer.Option("--record", help="Write down what each job's brain hears, to be replayed: jobs/JOB/brain-*.")
    ] = False,
    keep_jobs: Annotated[
        str,
        typer.Option(
            help="Remove jobs so long after their end, with all weights, checkpoints and logs in --data-dir, such as "
            "30d; 1h at least. Without it they stay until swarm rm.",
            show_default="for ever",
        ),
    ] = "",
    join_listen: Annotated[
        str,
        typer.Option(
            help="HOST:PORT where others join with a token (swarm token create).",
            show_default="the host of --listen, port 7949 or any free one",
        ),
    ] = "",
    certificate_life: Annotated[
        float, typer.Option(min=1 / 720, max=720.0, help="How long a member's certificate is good for, hours.")
    ] = 24.0,
    certificate_grace: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=3650.0,
            help="How long after its end a certificate is still renewed, days: for members that were away; 0 = never.",
        ),
    ] = 30.0,
    otlp: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Send traces of microbatches to an OpenTelemetry collector (OTLP over gRPC), such as "
            "http://127.0.0.1:4317.",
            show_default="nobody",
        ),
    ] = "",
    otlp_ratio: Annotated[float, typer.Option(min=0.0, max=1.0, help="Which share of all microbatches.")] = 0.01,
    insecure: lifecycle.Insecure = False,
    log_level: lifecycle.LogLevel = "info",
    log_format: lifecycle.LogFormatName = "auto",
) -> None:
    """Run the scheduler: it routes microbatches, counts gradients, commits steps and answers `swarm`."""
    configure(log_level, lifecycle.log_format_of(log_format))
    options = SchedulerOptions(
        listen,
        announce,
        lifecycle.check_host(http_host),
        lifecycle.http_port_of(http_port),
        db,
        broker,
        data_dir or data_folder() / "scheduler",
        insecure,
        grace,
        check_swarm(swarm),
        record,
        tuple(map(root_of, checkpoint_root or ())),
        3600.0 * certificate_life,
        86400.0 * certificate_grace,
        kept_for_s(keep_jobs),
        join_listen,
        otlp,
        otlp_ratio,
        Logins.named(http_user or ()),
    )
    lifecycle.run_process(serve(options))


if __name__ == "__main__":
    lifecycle.run_cli(cli, "swarm scheduler")
