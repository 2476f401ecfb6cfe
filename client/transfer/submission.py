"""Sending a job: check it, tokenise its data, upload what the scheduler lacks, submit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from client.connection import Scheduler
from client.records import Job, Peer
from client.shell import Shell, bytes_bar
from client.transfer.auto_tokenizer import looking_at_auto_tokenizer
from client.transfer.upload import File, named, open_start, upload, upload_start, upload_weights
from swarm.checkpoint.reader import Checkpoint
from swarm.checkpoint.storage import check_absolute
from swarm.data.corpus import Corpus, open_corpus, tokenise
from swarm.data.shards import remarks, token_dtype
from swarm.data.tokenizer import BYTE
from swarm.hf.companions import MODEL_FOLDER, TOKENIZER_MESSAGE_BYTES_MAX
from swarm.hf.pretrained import ground, look_at_model
from swarm.job.islands import check_for_swarm, outer_remarks
from swarm.job.spec import JobSpec, spec_from_json
from swarm.process.temporary import temporary_folder
from swarm.text import counted
from swarm.types import PeerState
from swarm.wire import jobs_pb2 as pb


def check(spec: JobSpec, say: Callable[[str], object] = lambda line: None) -> tuple[JobSpec, Corpus]:
    """The spec, completed from its model, and its data, after every check that needs no scheduler: InvalidConfig.

    `say` hears what is worth a line: tensors that are left out, tokens that the model has no row for.
    """
    check_for_swarm(spec)
    spec = ground(spec)
    corpus = open_corpus(spec)
    # For its checks only: "auto" is resolved by the scheduler, which knows the peers.
    resolved = corpus.resolve(spec)
    for line in (*look_at_model(resolved), *outer_remarks(resolved), *corpus.remarks(spec)):
        say(line)
    return spec, corpus


def send(shell: Shell, scheduler: Scheduler, spec: JobSpec, corpus: Corpus) -> Job:
    """Send a checked job to the scheduler; the shell shows the progress."""
    spec, start = open_start(spec, corpus, shell.say)
    scheduler.check_protocol()
    check_absolute(spec.checkpoint.dir)
    # All that the scheduler refuses is refused before a byte is sent: of much data that takes a night.
    resolved_now(scheduler, spec, corpus, start)
    if spec.model.dtype != "float32" and (told := slow_text(spec.model.dtype, scheduler.peers())):
        shell.say(told)
    if shell.quiet:
        return _send(shell, scheduler, spec, corpus, start)
    with looking_at_auto_tokenizer(corpus.tokenizer, spec.model.family) as told_of_tokenizer:
        return _send(shell, scheduler, spec, corpus, start, told_of_tokenizer)


def resolved_now(scheduler: Scheduler, spec: JobSpec, corpus: Corpus, start: Checkpoint | None) -> JobSpec:
    """The spec as the scheduler would resolve it now; raises what it would refuse a submit for, but for uploads.

    The scheduler is not asked about a `start` on this machine, which `open_start` has looked at.
    """
    spec = spec if start is None else spec.having("checkpoint", resume_from="")
    request = pb.SubmitRequest(
        spec_json=spec.model_dump_json(),
        token_dtype=token_dtype(corpus.tokenizer.vocabulary_size),
        vocabulary_size=corpus.tokenizer.vocabulary_size,
        end_of_text=corpus.tokenizer.end_of_text,
    )
    return spec_from_json(scheduler.call("Check", request).spec_json)


def _send(
    shell: Shell,
    scheduler: Scheduler,
    spec: JobSpec,
    corpus: Corpus,
    start: Checkpoint | None,
    told_of_tokenizer: Callable[[], str] = lambda: "",
) -> Job:
    with temporary_folder("swarm-tokens-") as folder:
        with bytes_bar(shell, "tokenising") as advance:
            manifest = tokenise(spec, folder, advance, corpus)
        shell.say(
            f"{manifest.tokens} tokens in {counted(len(manifest.shards), 'shard')}, "
            f"guessing by frequency alone gives a loss of {manifest.unigram_entropy:.3f} nats"
        )
        for remark in remarks(spec, manifest):
            shell.say(remark)
        files = [File(shard.sha256, shard.size_bytes, shard.path, shard.tokens) for shard in manifest.shards]
        upload(shell, scheduler, {file.sha256: file for file in files}, "data")
    request = pb.SubmitRequest(
        spec_json=spec.model_dump_json(),
        shards=[file.shard for file in files],
        token_dtype=manifest.token_dtype,
        vocabulary_size=manifest.vocabulary_size,
        unigram_entropy=manifest.unigram_entropy,
        end_of_text=manifest.end_of_text,
    )
    request.files.extend(
        upload_weights(shell, scheduler, spec) if start is None else upload_start(shell, scheduler, start)
    )
    if corpus.small_files and (spec.model.id or spec.model.tokenizer not in ("", BYTE)):
        shell.say(f"sent along: {named(corpus.small_files)}")
    _add_small_files(shell, scheduler, request, corpus.small_files)
    # Before the job is accepted: Ctrl-C while this is waited for loses no job.
    if told := told_of_tokenizer():
        shell.say(told)
    return scheduler.submit(request)


def slow_text(dtype: str, peers: Sequence[Peer]) -> str:
    """A warning if these stage servers are slow at this dtype; else empty."""
    usable = [peer for peer in peers if peer.state in (PeerState.IDLE, PeerState.SERVING)]
    slow = sum(peer.slow_bfloat16 for peer in usable)
    if not slow:
        return ""
    return (
        f"{slow} of {counted(len(usable), 'stage server')} have no bfloat16 instructions: with model.dtype = "
        f'"{dtype}" they are about 20 times as slow as with --set model.dtype=float32'
    )


def _add_small_files(
    shell: Shell, scheduler: Scheduler, request: pb.SubmitRequest, small_files: Mapping[str, bytes]
) -> None:
    """Put the tokenizer's and the model's files into the request; if they do not fit one message they are uploaded."""
    if sum(map(len, small_files.values())) <= TOKENIZER_MESSAGE_BYTES_MAX:
        request.tokenizer_files.update(small_files)
        return
    files = {f"{MODEL_FOLDER}{name}": File.of(raw) for name, raw in small_files.items()}
    request.files.extend(upload(shell, scheduler, files, "tokenizer"))
