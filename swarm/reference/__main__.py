"""`python -m swarm.reference JOB.toml --out DIR`, also `swarm train-local`: the reference trainer as a command.

Flags and the job file are checked before torch is loaded, which takes seconds.
"""

from __future__ import annotations

from swarm.process.startup import quiet_start

with quiet_start():
    import os
    import sys
    from functools import partial
    from pathlib import Path
    from typing import Annotated

    import typer

    from swarm.checkpoint.reader import open_folder
    from swarm.data.corpus import open_corpus
    from swarm.errors import UsageError
    from swarm.hf.model_folder import check_out_dir
    from swarm.hf.pretrained import ground, look_at_model
    from swarm.job.changes import places_of, with_places_of
    from swarm.job.islands import check_speeds, outer_remarks
    from swarm.job.outer_log import Entry, read
    from swarm.job.spec import load_job
    from swarm.process.lifecycle import program, run_cli

SPEED_MIN, SPEED_MAX = 1e-6, 1e6  # of --speeds: the ratios of these are numbers that can be counted with

cli = program()


@cli.command()
def train_local(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Job file (TOML), or what swarm status JOB -o json printed.")
    ],
    out: Annotated[Path | None, typer.Option(help="Where the model folder goes; the job's name if left out.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the job file.")
    ] = None,
    threads: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help="torch threads; bits agree between equal numbers only. Beside a swarm at work on this machine take "
            "few: threads that wait for each other make it many times slower.",
        ),
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda:N or mps.")] = "auto",
    resume_from: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Go on from a checkpoint: a step-… folder, or a folder of them (the newest that verifies). "
            "Checkpoints of a swarm fit too.",
        ),
    ] = None,
    outer_log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Repeat what became of the islands of a swarm: outer-log.jsonl in the folder that swarm pull made.",
        ),
    ] = None,
    speeds: Annotated[
        str,
        typer.Option(
            metavar="X,Y,...",
            help='With islands.shares = "speed": how fast each island is. Only the ratios count. Equal ones if left '
            "out.",
        ),
    ] = "",
) -> None:
    """Train a job in this one process, all its islands, and write the model folder; prints the sha256 of its weights.

    Checkpoints (checkpoint.every_steps, every_s) go to checkpoint.dir, or to OUT-checkpoints.
    """
    threads_if_given, of_islands = _threads(threads), _speeds(speeds)
    job = ground(load_job(file, overrides or ()))
    corpus = open_corpus(job)
    spec = corpus.resolve(job)
    say = partial(print, file=sys.stderr, flush=True)
    for line in (*look_at_model(spec), *outer_remarks(spec), *corpus.remarks(job)):
        say(line)
    out_dir = out or Path(spec.name)
    check_out_dir(out_dir)
    folder = resume_from or (Path(spec.checkpoint.resume_from) if spec.checkpoint.resume_from else None)
    check_speeds(spec, len(of_islands), repeats=outer_log is not None)
    start = open_folder(folder, say) if folder is not None else None
    if start is not None:
        say(f"goes on at step {start.step} of {start.storage.where}/{start.name}")
        spec = corpus.resolve(with_places_of(places_of(start.trainer_state()), job))
    log = () if outer_log is None else _log(outer_log)
    # Read by cuBLAS when it is first used; with it, equal products give equal bits on one GPU.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with quiet_start():
        from swarm.reference.trainer import train_and_save  # noqa: PLC0415  # loads torch: errors above must not wait for it
    sha256 = train_and_save(
        spec, corpus, out_dir, device=device, threads=threads_if_given, start=start, log=log, speeds=of_islands
    )
    print(f"weights_sha256 {sha256}")


def main() -> None:
    run_cli(cli, "swarm train-local", variables=False)


def _log(file: Path) -> tuple[Entry, ...]:
    try:
        if file.exists() and not file.is_file():  # a device or a pipe might not end
            raise UsageError(f"--outer-log {file}: it is no regular file")
        return read(file.read_bytes())
    except OSError as error:
        raise UsageError(f"--outer-log {file}: {error.strerror}") from None


def _speeds(text: str) -> tuple[float, ...]:
    try:
        speeds = tuple(float(speed) for speed in text.split(",")) if text else ()
    except ValueError:
        speeds = (0.0,)
    if all(SPEED_MIN <= speed <= SPEED_MAX for speed in speeds):
        return speeds
    told = f"give a number from {SPEED_MIN:g} to {SPEED_MAX:g} for each island, such as 1,0.5"
    raise UsageError(f"--speeds {text}: {told}")


def _threads(text: str) -> int | None:
    if text == "auto":
        return None
    if text.isdecimal() and 1 <= int(text) <= 1024:
        return int(text)
    raise UsageError(f'--threads {text}: give a number of at least 1, or "auto"')


if __name__ == "__main__":
    main()
