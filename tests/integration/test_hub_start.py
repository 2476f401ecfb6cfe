"""A hub id, without a network: what the local cache has is used, by the commit; what it lacks is said."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from scheduler.jobs.job import Job
from stage_server.ports import HubPolicy
from swarm.data.corpus import open_corpus
from swarm.data.tokenizer import ByteTokenizer, load_tokenizer
from swarm.errors import InvalidModel, NotCached
from swarm.hf import hub
from swarm.hf.companions import companions
from swarm.hf.pretrained import ground, hub_files, look_at_model, weight_files
from swarm.job.spec import JobSpec
from swarm.reference.trainer import build_stages, save_folder, sha256_of, train_local
from swarm.types import JobState, PeerId
from tests.support.scenes import play, resolved
from tests.support.simulated import Rig, Tokens, small_spec, write_text

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FIELDS = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, as HF_HOME and HF_HUB_OFFLINE=1 give it to a process that starts."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return cache


def publish(cache: Path, name: str, *, shard: str = "20KB") -> Path:
    """Put a model into the cache as a download does; gives its snapshot."""
    torch.manual_seed(3)
    twin: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **FIELDS), dtype=torch.float32)
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    twin.save_pretrained(snapshot, max_shard_size=shard)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    return snapshot


def job(source: Path, name: str, **changes: object) -> JobSpec:
    changes = {"training__steps": 2, **changes}
    return small_spec(source, model__id=name, model__config={}, model__tokenizer="byte", **changes)


def spec_of(source: Path, name: str, **changes: object) -> JobSpec:
    spec = ground(job(source, name, **changes))
    return resolved(spec)


@pytest.mark.parametrize("shard", ["20KB", "5GB"])
def test_a_hub_model_is_the_folder_it_was_saved_as_pinned_to_its_commit(
    shard: str, offline: Path, tmp_path: Path
) -> None:
    snapshot = publish(offline, "acme/tiny", shard=shard)
    spec = spec_of(tmp_path, "acme/tiny", pipeline__stages=2)
    assert spec.model.revision == COMMIT
    assert weight_files(spec) == ()
    local = spec_of(tmp_path, str(snapshot), pipeline__stages=2)
    assert sha256_of(build_stages(spec, torch.device("cpu"))) == sha256_of(build_stages(local, torch.device("cpu")))


def test_only_the_files_that_hold_a_wanted_tensor_are_fetched(offline: Path, tmp_path: Path) -> None:
    snapshot = publish(offline, "acme/tiny")
    spec = spec_of(tmp_path, "acme/tiny", pipeline__stages=2)
    one = hub_files(spec, frozenset({"lm_head.weight"}))
    assert len(one) == 1 < len(list(snapshot.glob("*.safetensors")))
    for path in snapshot.glob("*.safetensors"):
        if path.name != one[0].location.name:
            path.unlink()
    assert hub_files(spec, frozenset({"lm_head.weight"})) == one
    with pytest.raises(InvalidModel, match=r"safetensors of model.id = .* is not in the local cache"):
        hub_files(spec, frozenset({"lm_head.weight", "model.embed_tokens.weight"}))


def test_what_cannot_be_had_is_said(offline: Path, tmp_path: Path) -> None:
    with pytest.raises(
        InvalidModel, match=r"config\.json of model\.id = .acme/none.* the hub does not answer"
    ) as caught:
        ground(job(tmp_path, "acme/none"))
    assert "HF_HUB_OFFLINE" in caught.value.hint
    for name in ("acme/ti ny", "a--b", "acme/.."):
        with pytest.raises(InvalidModel, match=r"neither a local folder nor a hub id|does not answer"):
            ground(job(tmp_path, name))
    publish(offline, "acme/tiny")
    with pytest.raises(InvalidModel, match=r"revision v2\) is not in the local cache"):
        ground(job(tmp_path, "acme/tiny", model__revision="v2"))
    assert ground(job(tmp_path, "acme/tiny", model__revision=COMMIT)).model.revision == COMMIT


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (huggingface_hub.errors.GatedRepoError, "is gated"),
        (huggingface_hub.errors.RepositoryNotFoundError, "neither a local folder nor a model on the hub"),
        (huggingface_hub.errors.RevisionNotFoundError, "has no revision main"),
        (huggingface_hub.errors.EntryNotFoundError, r"has no config\.json"),
        (huggingface_hub.errors.OfflineModeIsEnabled, "cannot be had"),
        (PermissionError, "cannot be had"),
    ],
)
def test_what_the_library_raises_reaches_the_user_as_an_invalid_model(
    error: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's errors need a server that sends them: here the library itself is told to raise."""

    def refuse(*_: object, **__: object) -> str:
        failure = error.__new__(error)
        Exception.__init__(failure, "no")
        raise failure

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(InvalidModel, match=words):
        ground(job(tmp_path, "acme/tiny"))


def trained(
    spec: JobSpec, tokens: Tokens, files: Mapping[str, bytes] = ByteTokenizer().tokenizer_files(),
    hub_policy: HubPolicy | None = None,
) -> Job:  # fmt: skip
    """The job as it ends on two stage servers, or on one whose owner has this policy."""

    async def act(rig: Rig) -> Job:
        if hub_policy is not None:
            rig.hub = hub_policy
            rig.add_peer(PeerId("peer-0"), rig.tasks, Random(1))
        job = await rig.jobs.submit(spec, tokens.of_job(), files)
        await rig.finished(job)
        return job

    return play(tokens, 2 if hub_policy is None else 0, act)


def test_every_stage_server_reads_the_hub_itself(offline: Path, tmp_path: Path) -> None:
    publish(offline, "acme/tiny")
    spec = spec_of(write_text(tmp_path), "acme/tiny", pipeline__stages=2)
    tokens = Tokens.make(tmp_path, spec)
    record = trained(spec, tokens).record
    assert (record.state, record.weights_sha256) == (JobState.SUCCEEDED, train_local(spec, tokens.batches(spec)).sha256)
    shutil.rmtree(offline)
    record = trained(spec, tokens).record
    assert record.state is JobState.FAILED
    assert "is not in the local cache" in record.reason


def test_what_lies_beside_a_hub_models_weights_goes_with_the_trained_model(offline: Path, tmp_path: Path) -> None:
    """Without a network a licence of another name and other JSON stayed behind, though the cache held them."""
    snapshot = publish(offline, "acme/tiny")
    beside = {
        "generation_config.json": b'{"eos_token_id": [2, 10],\n "temperature": 0.6}',
        "LICENSE": b"as you like",
        "USE_POLICY.md": b"be kind",
        "NOTICE.txt": b"by acme",
        "labels.json": b'["a"]',
    }
    left = {"README.md": b"x", "run.py": b"x", "adapter_config.json": b"{}", "big.json": b" " * (2 << 20)}
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir()
    for number, (name, content) in enumerate((beside | left).items()):
        (blobs / f"{number}").write_bytes(content)
        (snapshot / name).unlink(missing_ok=True)
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    text = write_text(tmp_path)
    spec = spec_of(text, "acme/tiny", pipeline__stages=2)
    corpus = open_corpus(spec)
    assert dict(corpus.companions) == beside

    save_folder(build_stages(spec, torch.device("cpu")), spec, tmp_path / "out", corpus.small_files)
    tokens = Tokens.make(tmp_path, spec)

    job = trained(spec, tokens, corpus.small_files)
    (folder,) = (tokens.root / "jobs" / job.record.id / "checkpoints").glob("step-*/model")
    pulled = {path.name: path.read_bytes() for path in folder.iterdir()}
    for written in (pulled, {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}):
        assert beside.items() <= written.items()
        assert not written.keys() & left.keys()


def test_the_list_of_files_is_the_hubs_where_it_answers(
    offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = publish(offline, "acme/tiny")
    for name in ("LICENSE", "labels.json"):
        (snapshot / name).write_bytes(b"[]")
    spec = spec_of(tmp_path, "acme/tiny")
    monkeypatch.setattr(hub, "names", lambda *_: ["config.json", "labels.json", "lost.json"])
    assert companions(spec, ()).keys() == {"labels.json"}, "a file that cannot be had is left out"


def test_a_stage_server_loads_only_the_models_that_its_owner_allows(offline: Path, tmp_path: Path) -> None:
    """Whoever submitted a job could have any model downloaded by all stage servers, and pull its weights."""
    publish(offline, "acme/tiny")
    spec = spec_of(write_text(tmp_path), "acme/tiny", pipeline__stages=1)
    tokens = Tokens.make(tmp_path, spec)

    for allowed in ((), ("other/*", "acme-2/*")):
        record = trained(spec, tokens, hub_policy=HubPolicy(allowed)).record
        assert record.state is JobState.FAILED
        assert 'does not load model.id = "acme/tiny" from the hub' in f"{record.reason} {record}"
    assert trained(spec, tokens, hub_policy=HubPolicy(("acme/*",))).record.state is JobState.SUCCEEDED


@dataclass
class Asked:
    """What a hub was asked for."""

    ranges: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Asked]]:
    """Serves the weights of a folder in parts, and nothing else."""
    servers: list[ThreadingHTTPServer] = []

    def serve(folder: Path) -> Asked:
        asked = Asked()

        class Hub(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.tokens.add(self.headers.get("Authorization", ""))
                path, wanted = folder / self.path.rpartition("/")[2], self.headers.get("Range", "")
                if not path.is_file() or not wanted:
                    self.send_error(404)
                    return
                asked.ranges.append(wanted)
                first, last = map(int, wanted.removeprefix("bytes=").split("-"))
                content = path.read_bytes()
                part = content[first : last + 1]
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(content)}")
                self.send_header("Content-Length", str(len(part)))
                self.end_headers()
                self.wfile.write(part)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
        servers.append(server)
        Thread(target=server.serve_forever, daemon=True).start()
        template = f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", template.partition("/{")[0])
        return asked

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("with_token", [False, True])
def test_the_owners_token_goes_to_the_hub_only_if_the_owner_says_so(
    with_token: bool,
    offline: Path,
    tmp_path: Path,
    serving: Callable[[Path], Asked],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stage servers asked the hub as their owner: gated and private weights left by `swarm pull`."""
    publish(offline, "acme/tiny")
    spec = spec_of(tmp_path, "acme/tiny", model__revision="main", pipeline__stages=2)
    shutil.rmtree(offline)
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    asked = serving(tmp_path / "nothing")
    with pytest.raises(InvalidModel):
        hub_files(spec, frozenset({"lm_head.weight"}), with_token=with_token)
    assert asked.tokens == {"Bearer hf_canary" if with_token else ""}


def test_a_hub_that_does_not_answer_is_said_at_once_to_who_submits(
    offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library tried for 24 s before anybody was told."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "ANSWER_S_MAX", 0.5)

    def start(**changes: object) -> None:
        if "model__id" in changes:
            changes |= {"model__config": {}}
        load_tokenizer(ground(small_spec(tmp_path, **changes)))

    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes calls and says nothing
        port = silent.getsockname()[1]
        for address in (f"http://127.0.0.1:{port}", "http://127.0.0.1:9"):
            monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
            for name in ({"model__id": "acme/tiny"}, {"model__tokenizer": "acme/tiny"}):
                began_s = time.monotonic()
                with pytest.raises(NotCached, match=f"local cache, and the hub at {address} does not") as caught:
                    start(**name)
                assert time.monotonic() - began_s < 20.0
                assert "local folder" in caught.value.hint
        publish(offline, "acme/tiny")
        hub.check_answers("acme/tiny", "main", "config.json", "")  # who has it asks nobody


# What is known before -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["20KB", "5GB"])
def test_the_headers_of_a_hub_model_are_read_before_anything_is_sent(
    shard: str, offline: Path, tmp_path: Path, serving: Callable[[Path], Asked]
) -> None:
    """Nothing of a hub model was checked before stage servers had downloaded it."""
    snapshot = publish(offline, "acme/tiny", shard=shard)
    there = tmp_path / "there"
    there.mkdir()
    for path in snapshot.glob("*.safetensors"):
        path.rename(there / path.name)
    asked = serving(there)
    spec = spec_of(tmp_path, "acme/tiny", model__revision=COMMIT, pipeline__stages=2)
    assert look_at_model(spec) == ()
    assert len(asked.ranges) == len(list(there.iterdir()))
    config = json.loads((snapshot / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps(config | {"vocab_size": 258}))
    other = spec_of(tmp_path, "acme/tiny", model__revision=COMMIT, pipeline__stages=2)
    with pytest.raises(InvalidModel, match=r"has shape \[260, 32\], this model needs \[258, 32\]") as client:
        look_at_model(other)
    for path in there.iterdir():
        path.rename(snapshot / path.name)
    with pytest.raises(InvalidModel) as cached:
        look_at_model(other)
    with pytest.raises(InvalidModel) as stage_server:
        build_stages(other, torch.device("cpu"))
    assert str(client.value) == str(cached.value) == str(stage_server.value)


def test_a_head_of_its_own_is_found_on_the_hub(offline: Path, tmp_path: Path, serving: Callable[[Path], Asked]) -> None:
    snapshot = publish(offline, "acme/tiny", shard="5GB")
    config = json.loads((snapshot / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    there = tmp_path / "there"
    there.mkdir()
    (snapshot / "model.safetensors").rename(there / "model.safetensors")
    serving(there)
    spec = spec_of(tmp_path, "acme/tiny", model__revision=COMMIT, pipeline__stages=2)
    assert not spec.tied
    assert "differs from model.embed_tokens.weight, to which config.json ties it" in look_at_model(spec)[0]


def test_headers_that_cannot_be_had_are_left_to_the_stage_servers(offline: Path, tmp_path: Path) -> None:
    snapshot = publish(offline, "acme/tiny", shard="5GB")
    spec = spec_of(tmp_path, "acme/tiny", pipeline__stages=2)
    assert look_at_model(spec) == ()
    (snapshot / "model.safetensors").unlink()
    (line,) = look_at_model(spec)
    assert line.endswith("cannot be had now: stage servers check the weights when they load them")
