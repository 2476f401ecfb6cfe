"""Submitting a job: check the file, tokenise, send what the scheduler lacks, submit, follow."""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from client.connection import CHUNK_BYTES, Scheduler
from client.follow import follow, raise_unless_succeeded
from client.shell import Shell, bytes_bar, size
from client.upload import upload_weights
from client.views import job_values
from swarm.config import JobSpec, load_job
from swarm.data import ByteTokenizer, ShardInfo, TokenManifest, read_documents, tokenise
from swarm.errors import InvalidData
from swarm.partition import common_name, resolve
from swarm.pretrained import ground, weight_files
from swarm.wire import jobs_pb2 as pb

INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Value:
    """One resolved value of a job and where it came from: default, file, --set or auto."""

    key: str
    value: Any
    origin: str


def check_job(path: Path, overrides: Sequence[str]) -> JobSpec:
    """The spec in `path`, after every check that needs no scheduler: InvalidConfig, InvalidData, UsageError."""
    spec = ground(load_job(path, overrides))
    weight_files(spec)
    # For its checks only: "auto" is resolved by the scheduler, which knows the peers.
    resolve(spec, vocabulary_size=ByteTokenizer.vocabulary_size, stages_if_auto=1)
    if not read_documents(spec.data.source, spec.data.format):
        raise InvalidData(f'data.source = "{spec.data.source}" matches only empty files', hint="add text to them")
    return spec


def submit(shell: Shell, path: Path, overrides: Sequence[str], *, detach: bool, managed: bool = False) -> int:
    """Send the job in `path` to the scheduler and follow it; gives the exit code.

    `managed`: `swarm up` started this and stops it, so there is nothing to say about detaching.
    """
    spec = check_job(path, overrides)
    with Scheduler(shell.scheduler, shell.timeout_s) as scheduler:
        scheduler.check_protocol()
        with tempfile.TemporaryDirectory(prefix="swarm-tokens-") as folder:
            with bytes_bar(shell, "tokenising") as advance:
                manifest = tokenise(spec, Path(folder), advance)
            shell.say(
                f"{manifest.tokens} tokens in {len(manifest.shards)} "
                f"{'shard' if len(manifest.shards) == 1 else 'shards'}, "
                f"unigram entropy {manifest.unigram_entropy:.3f} nats"
            )
            _upload(shell, scheduler, manifest)
        files = upload_weights(shell, scheduler, spec)
        view = scheduler.submit(_request(spec, manifest, files))
        return _after_submit(shell, scheduler, view, detach=detach, managed=managed)


def _after_submit(shell: Shell, scheduler: Scheduler, view: pb.JobView, *, detach: bool, managed: bool) -> int:
    if shell.json:
        shell.data(job_values(view))
    else:
        print(view.id, flush=True)
    where = "" if shell.scheduler == Shell().scheduler else f" --scheduler {shell.scheduler}"
    commands = f"follow: swarm status -w {view.id}{where}   cancel: swarm cancel {view.id}{where}"
    shell.say(f"job {view.id} accepted: {view.reason or view.state}")
    if detach:
        shell.say(commands)
        return 0
    if not managed:
        shell.say(f"Ctrl-C detaches, the job goes on.   {commands}")
    try:
        ended = follow(shell, scheduler, view.id)
    except KeyboardInterrupt:
        shell.say(f"\ndetached: job {view.id} goes on.   {commands}")
        return INTERRUPTED
    raise_unless_succeeded(ended)
    shell.say(f"job {ended.id} succeeded: weights sha256 {ended.weights_sha256}")
    if not managed:
        shell.say(f"fetch the model: swarm pull {ended.id} DIR{where}")
    return 0


def _request(spec: JobSpec, manifest: TokenManifest, files: Sequence[pb.JobFile]) -> pb.SubmitRequest:
    return pb.SubmitRequest(
        spec_json=spec.model_dump_json(),
        shards=[_wire(shard) for shard in manifest.shards],
        token_dtype=manifest.token_dtype,
        vocabulary_size=manifest.vocabulary_size,
        unigram_entropy=manifest.unigram_entropy,
        end_of_text=manifest.end_of_text,
        tokenizer_files=ByteTokenizer().tokenizer_files(),
        files=files,
    )


def _upload(shell: Shell, scheduler: Scheduler, manifest: TokenManifest) -> None:
    """Send the shards that the scheduler lacks, equal ones once."""
    files = {shard.sha256: shard for shard in manifest.shards}
    missing = {shard.sha256 for shard in scheduler.missing_shards([_wire(shard) for shard in files.values()])}
    lacking = [shard for sha256, shard in files.items() if sha256 in missing]
    total_bytes = sum(shard.size_bytes for shard in lacking)
    if not lacking:
        shell.say("the scheduler has the data already")
        return
    sent_bytes = 0
    with bytes_bar(shell, "uploading") as advance:

        def pieces(shard: ShardInfo) -> Iterator[bytes]:
            nonlocal sent_bytes
            with shard.path.open("rb") as file:
                while piece := file.read(CHUNK_BYTES):
                    yield piece
                    sent_bytes += len(piece)
                    advance(sent_bytes, total_bytes)

        for shard in lacking:
            scheduler.put_shard(_wire(shard), pieces(shard))
    shell.say(f"uploaded {size(total_bytes)}")


def _wire(shard: ShardInfo) -> pb.Shard:
    return pb.Shard(sha256=shard.sha256, tokens=shard.tokens, size_bytes=shard.size_bytes)


# --dry-run -----------------------------------------------------------------------------------------------------------


def dry_run(shell: Shell, path: Path, overrides: Sequence[str]) -> None:
    """Show what `submit` would send and where each value came from; sends nothing. Raises as `submit` does."""
    spec = check_job(path, overrides)
    values = origins(spec, path, overrides)
    documents = read_documents(spec.data.source, spec.data.format)
    data_bytes = sum(document.size_bytes for document in documents)
    if shell.json:
        shell.data(
            {
                "values": [{"key": value.key, "value": value.value, "origin": value.origin} for value in values],
                "files": len(documents),
                "size_bytes": data_bytes,
            }
        )
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("KEY", "VALUE", "FROM"):
        table.add_column(column)
    for value in values:
        table.add_row(Text(value.key), Text(_shown(value.value)), Text(value.origin))
    shell.out.print(table)
    shell.say(f"data: {len(documents)} files, {size(data_bytes)}; nothing was sent")


def origins(spec: JobSpec, path: Path, overrides: Sequence[str]) -> list[Value]:
    """Every value of the spec in the order of the job file, resolved as far as it can be without a scheduler."""
    resolved = resolve(spec, vocabulary_size=ByteTokenizer.vocabulary_size, stages_if_auto=1)
    family = resolved.model.family
    in_file = {_final_key(key, family) for key in _leaves(tomllib.loads(path.read_text(encoding="utf-8-sig")))}
    by_flag = {_final_key(override.partition("=")[0].strip(), family) for override in overrides}
    written = _leaves(spec.model_dump(mode="json"))
    final = _leaves(resolved.model_dump(mode="json"))
    if spec.pipeline.stages == "auto" and spec.pipeline.split == "auto":
        final |= {"pipeline.stages": "auto", "pipeline.split": "auto"}
    values = []
    for key, value in final.items():
        if _named(key, by_flag):
            origin = "--set"
        elif _named(key, in_file):
            origin = "file"
        elif spec.model.id and key.startswith(("model.config.", "model.family", "model.revision")):
            origin = "model.id"
        else:
            origin = "default"
        if key in ("pipeline.stages", "pipeline.split", "pipeline.max_in_flight") and value == "auto":
            origin += ", chosen when the job starts"
        elif value != written.get(key, value):
            origin += ", auto"
        values.append(Value(key, value, origin))
    return values


def _final_key(key: str, family: str) -> str:
    """A key as a user may write it, under the name that it has in a resolved spec."""
    section, dot, field_name = key.rpartition(".")
    return f"{section}{dot}{common_name(family, field_name)}" if section == "model.config" else key


def _named(key: str, names: set[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of nested values."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _leaves(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _shown(value: Any) -> str:
    match value:
        case str():
            return f'"{value}"'
        case bool():
            return str(value).lower()
        case list():
            return "[" + ", ".join(_shown(item) for item in value) + "]"
        case _:
            return str(value)
