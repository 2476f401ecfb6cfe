"""A model's folder may come from the net: nothing in it makes a client read, or send, another file of its machine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from client.transfer.upload import named, upload_weights
from swarm.data.tokenizer import _eos_token_id, read_tokenizer_files
from swarm.errors import InvalidConfig
from swarm.hf.companions import companions
from swarm.hf.own_files import NotOwn, is_there, open_own, read_own
from swarm.hf.pretrained import ground, weight_files
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec, parse_job
from swarm.model.state import read_span
from swarm.wire import jobs_pb2 as pb
from tests.support.model_folders import write_model
from tests.support.tokenizer import write_tokenizer

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 400,
    "hidden_size": 8,
    "intermediate_size": 12,
}
SECRET = "a secret of this machine"


def told(read: Callable[[Path], object], folder: Path) -> tuple[str, bool]:
    """What is read of a folder, or the refusal; and whether it was refused."""
    try:
        return str(read(folder)), False
    except InvalidConfig as error:
        return str(error), True


def job(folder: Path) -> JobSpec:
    return parse_job({"name": "t", "model": {"id": str(folder)}, "data": {"source": "x", "sequence_length": 8}})


def of_another_repository(place: Path, path: Path) -> None:
    (place / "blobs").mkdir()
    (place / "blobs" / "0").write_text(json.dumps({SECRET: SECRET}))
    path.symlink_to(place / "blobs" / "0")


def linked(at: Callable[[Path], Path], to: str, by: str) -> Callable[[Path, Path], None]:
    """The file is a link `by`, which leads through another link, at that place, to where the secret is."""

    def plant(place: Path, path: Path) -> None:
        at(path).symlink_to(place / to)
        path.symlink_to(by)

    return plant


PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "elsewhere": lambda place, path: path.symlink_to(place / "secret"),
    "by dots": lambda place, path: path.symlink_to(os.path.relpath(place / "secret", path.parent)),
    "by another link": linked(lambda path: path.parent / "first", "secret", "first"),
    "behind a linked folder": linked(lambda path: path.parent / "sub", "", "sub/secret"),
    "of another repository": of_another_repository,
    "of blobs that are a link": linked(lambda path: path.parents[2] / "blobs", "", "../../blobs/secret"),
    "of this process": lambda place, path: path.symlink_to("/proc/self/environ"),
    "a device": lambda place, path: path.symlink_to("/dev/zero"),
    "a pipe": lambda place, path: os.mkfifo(path),
    "a folder": lambda place, path: path.mkdir(),
    "a loop": lambda place, path: path.symlink_to(path.name),
    "nothing": lambda place, path: path.symlink_to("nothing"),
}


def tokenizer_of(folder: Path) -> object:
    return read_tokenizer_files(folder)


def weights_of(folder: Path) -> object:
    return [[*read_span(file.location, 0, file.size_bytes)] for file in weight_files(job(folder))]


def companions_of(folder: Path) -> object:
    return companions(job(folder), ())


READ: dict[str, Callable[[Path], object]] = {
    "tokenizer.json": tokenizer_of,
    "merges.txt": tokenizer_of,
    "model.safetensors": weights_of,
    "model.safetensors.index.json": weights_of,
    "config.json": lambda folder: ground(job(folder)),
    "LICENSE": companions_of,
    "more.json": companions_of,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder that could lie in the hub's cache."""
    (tmp_path / "models--acme--tiny" / "snapshots").mkdir(parents=True)
    made = write_model(tmp_path / "models--acme--tiny" / "snapshots" / "0", CONFIG)
    return write_tokenizer(made)


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("planted", PLANTED)
def test_nothing_beside_the_weights_leads_out_of_the_folder(
    name: str, planted: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tokenizer.json -> ~/.ssh/id_ed25519` in a folder from the net was sent to the scheduler, for all to pull."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text(json.dumps({SECRET: SECRET}))
    (folder / name).unlink(missing_ok=True)
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    PLANTED[planted](tmp_path / "elsewhere", folder / name)
    found, is_refused = told(READ[name], folder)
    assert SECRET not in found
    assert is_refused or READ[name] is companions_of, "what a model needs is refused, with the reason"
    assert not is_refused or len(found) < 1000


def test_a_refused_link_says_where_it_leads_and_what_to_do(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}")
    (folder / "merges.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidConfig, match=r"merges.txt cannot be read: it is a link to .*/secret, .*copy that file"):
        read_tokenizer_files(folder)


def test_the_config_beside_a_tokenizer_that_leads_elsewhere_tells_no_end_of_text(folder: Path, tmp_path: Path) -> None:
    spec = job(folder)
    spec = spec.having("model", tokenizer=str(folder))
    (folder / "config.json").write_text('{"eos_token_id": 7}')
    assert _eos_token_id(spec, folder) == 7
    (folder / "config.json").rename(tmp_path / "config.json")
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    assert _eos_token_id(spec, folder) == -1


def test_links_below_the_folder_and_of_the_hubs_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    repository = folder.parents[1]
    (repository / "blobs").mkdir()
    (folder / "weights").mkdir()
    (folder / "config.json").rename(repository / "blobs" / "c0ffee")
    (folder / "config.json").symlink_to("../../blobs/c0ffee")
    (folder / "model.safetensors").rename(folder / "weights" / "all")
    (folder / "model.safetensors").symlink_to("weights/all")
    (tmp_path / "mine").symlink_to(folder)  # the person's own word
    for place in (folder, tmp_path / "mine"):
        spec = resolve(ground(job(place)), Basis(400))
        (file,) = weight_files(spec)
        assert [*read_span(file.location, 0, file.size_bytes)] == [(folder / "weights" / "all").read_bytes()]


def test_a_folder_that_becomes_a_link_after_it_was_looked_at_is_not_followed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "secret").write_text("{}")
    (folder / "more.json").symlink_to("sub/secret")
    (tmp_path / "secret").write_text(SECRET)
    looked = os.path.realpath

    def look(path: Any, **named: Any) -> str:
        found = looked(path, **named)
        if str(path).endswith("more.json"):
            (folder / "sub").rename(folder / "before")
            (folder / "sub").symlink_to(tmp_path)
        return str(found)

    monkeypatch.setattr(os.path, "realpath", look)
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        open_own(folder / "more.json")


@pytest.mark.parametrize("content", [b"", b"12345678 and more"])
def test_a_file_that_gives_other_bytes_than_its_size_says_or_more_than_allowed_is_refused(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of /proc have 0 bytes and give thousands; one that somebody appends to has no end."""
    (tmp_path / "x").write_bytes(content)
    (tmp_path / "long").write_bytes(bytes(101))
    sized = os.fstat

    def eight_bytes(file: int) -> os.stat_result:
        found = list(sized(file))
        return os.stat_result([*found[:6], 8, *found[7:]])

    assert read_own(tmp_path / "x", 100) == content
    with pytest.raises(NotOwn, match="it has more than 100 bytes"):
        read_own(tmp_path / "long", 100)
    monkeypatch.setattr(os, "fstat", eight_bytes)
    with pytest.raises(NotOwn, match="it has 8 bytes and gives others"):
        read_own(tmp_path / "x", 100)


class Heard:
    """A shell and a scheduler that has all files."""

    quiet = True
    live = False

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def call(self, _method: str, _request: object) -> pb.ShardList:
        return pb.ShardList()


def test_submit_shows_the_names_of_the_files_that_it_sends(folder: Path) -> None:
    heard: Any = Heard()
    spec = resolve(ground(job(folder)), Basis(400))
    upload_weights(heard, heard, spec)
    assert "weights: model.safetensors" in heard.lines
    assert named(["model/b\x1b[1m.txt", "a"]) == "a, b [1m.txt"
    assert named([f"{at:03}" for at in range(50)]).endswith("039 and 10 more")


def test_what_lies_in_a_folder_that_may_not_be_looked_into_is_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer's folder of another user "had no tokenizer.json"."""
    (tmp_path / "a").write_text("x")
    assert is_there(tmp_path / "a")
    assert not is_there(tmp_path / "b")
    assert not is_there(tmp_path / "a" / "b")

    def refuse(path: object, **_: object) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(Path, "lstat", refuse)  # tests may run as root, who may look
    assert is_there(tmp_path / "b")
