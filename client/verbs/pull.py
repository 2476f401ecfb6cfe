"""`swarm pull`: fetch a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from client.connection import dial
from client.flags import JobName, offers
from client.shell import Shell
from client.transfer.download import download
from client.transfer.model_card import has_narrow_places
from client.transfer.precision import Dtype
from swarm.checkpoint.storage import LATEST
from swarm.errors import UsageError
from swarm.text import counted, size


def pull(
    context: typer.Context,
    job: JobName,
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Where the model folder goes.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="The same.", show_default=False)] = None,
    step: Annotated[
        str, typer.Option(metavar="latest|STEP", help="Which checkpoint.", autocompletion=offers("steps"))
    ] = LATEST,
    dtype: Annotated[
        Dtype, typer.Option(help="Precision of the weights; rounded to nearest even, after all hashes were checked.")
    ] = "keep",
    force: Annotated[bool, typer.Option("--force", help="Replace DIR if it exists.")] = False,
) -> None:
    """Fetch the model of a checkpoint (by default the newest) as a Hugging Face folder; every hash is checked."""
    shell: Shell = context.obj
    if (folder is None) == (out is None):
        raise UsageError(
            "missing argument DIR" if out is None else "DIR and --out are the same: give one of them",
            hint=f"for example: swarm pull {job} ./model",
        )
    target = folder or out
    assert target is not None
    with dial(shell) as scheduler:
        pulled = download(shell, scheduler, of := scheduler.get(job), target, step=step, dtype=dtype, force=force)
    if shell.json:
        shell.data(
            {
                "path": str(pulled.path),
                "files": pulled.files,
                "size_bytes": pulled.size_bytes,
                "weights_sha256": pulled.weights_sha256,
            }
        )
    else:
        print(f"path {pulled.path}")
        print(f"weights_sha256 {pulled.weights_sha256}", flush=True)
    shell.say(f"{counted(pulled.files, 'file')}, {size(pulled.size_bytes)}, all hashes agree")
    if has_narrow_places(of.spec):
        shell.say(
            "the model has narrow places: load it in Transformers with trust_remote_code=True; "
            "other engines cannot load it"
        )
