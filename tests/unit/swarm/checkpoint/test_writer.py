"""A checkpoint is complete or absent, and says what is wrong with it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import fsspec
import pytest
from safetensors.numpy import load, save

from swarm.checkpoint import reader
from swarm.checkpoint.reader import fault_of, list_checkpoints, newest, open_folder
from swarm.checkpoint.storage import LocalStorage, Storage, open_storage
from swarm.checkpoint.writer import CheckpointWriter, prune
from swarm.errors import CheckpointDamaged, CheckpointFailed, InvalidConfig, NotFound, StorageError
from swarm.hf.safetensors_header import parse_header
from swarm.types import JobId
from tests.support.checkpoints import (
    JOB,
    TOKENIZER,
    WITH_MEMORY,
    FlakyFiles,
    ForgetfulFiles,
    PowerCut,
    facts,
    hashes,
    spec,
    tensors,
    write,
)
from tests.support.effort import others

JOB_ID = JobId(JOB)


@pytest.fixture(params=["folder", "url"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "folder":
        return LocalStorage(tmp_path / "checkpoints")
    empty_memory()
    return open_storage("memory://bucket/checkpoints", WITH_MEMORY)


def empty_memory() -> Any:
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]
    return filesystem


def names(storage: Storage) -> list[str]:
    return [checkpoint.name for checkpoint in list_checkpoints(storage, JOB_ID)[0]]


def test_what_was_written_is_found_and_verifies(storage: Storage) -> None:
    assert newest(storage, JOB_ID).checkpoint is None
    made = write(storage, 4)
    found = newest(storage, JOB_ID).checkpoint
    assert found == made
    assert (made.name, made.step, made.timeline, made.loss, made.optimizer) == ("step-00000004", 4, 0, 1.5, "adamw")
    assert fault_of(made) == ""
    paths = {file.path for file in made.files}
    assert paths == {
        "model/config.json",
        "model/generation_config.json",
        "model/model-00001-of-00002.safetensors",
        "model/model-00002-of-00002.safetensors",
        "model/model.safetensors.index.json",
        "model/tokenizer.json",
        "optimizer/layer-0000.safetensors",
        "optimizer/layer-0001.safetensors",
        "trainer_state.json",
    }
    assert made.size_bytes == sum(file.size_bytes for file in made.files)
    whole = b"".join(made.chunks("model/model-00002-of-00002.safetensors"))
    assert load(whole)["model.layers.1.w"].tolist() == tensors(4, 1)["model.layers.1.w"].tolist()
    assert made.read("model/model-00002-of-00002.safetensors", 3, 9) == whole[3:9]
    state = made.trainer_state()
    assert (state["step"], state["data"]["sequences"], state["totals"]["tokens"]) == (4, 48, 400)
    with pytest.raises(NotFound):
        made.open("../secret")


def test_the_newest_is_of_the_newest_timeline_whatever_its_step(storage: Storage) -> None:
    for step, timeline in ((2, 0), (8, 0), (4, 1)):
        write(storage, step, timeline=timeline)
    assert names(storage) == ["step-00000002", "step-00000008", "step-00000004"]
    found = newest(storage, JOB_ID).checkpoint
    assert found is not None
    assert found.name == "step-00000004"


def test_a_step_that_is_taken_is_written_beside_and_an_equal_one_is_kept(storage: Storage) -> None:
    first = write(storage, 4)
    again = write(storage, 4)
    assert again == first
    assert names(storage) == ["step-00000004"]
    other = write(storage, 4, timeline=1, weights=5)
    assert other.name == "step-00000004.1"
    assert names(storage) == ["step-00000004", "step-00000004.1"]
    assert fault_of(first) == fault_of(other) == ""


def test_latest_names_the_one_before_a_withdrawn_one_and_goes_with_the_only_one(storage: Storage) -> None:
    for before in (False, True):
        if before:
            write(storage, 4)
        made = CheckpointWriter(storage, spec(), 8, "0")
        held = [tensors(8, stage) for stage in (0, 1)]
        for stage, part in enumerate(held):
            made.put(f"model/model-{stage + 1:05d}-of-00002.safetensors", save(part))
        made.publish(facts(8, 0, JOB), {stage: hashes(part) for stage, part in enumerate(held)}, TOKENIZER)
        assert "latest" in storage.names()
        made.withdraw()
        assert storage.names() == ["latest", "step-00000004"] * before
    with storage.open("latest")[0] as file:
        assert file.read() == b"step-00000004\n"


def test_a_checkpoint_of_another_job_does_not_count(storage: Storage) -> None:
    write(storage, 4, job="other-1")
    found, faults = list_checkpoints(storage, JOB_ID)
    assert found == []
    assert "belongs to job 'other-1'" in faults[0].reason
    assert newest(storage).checkpoint is not None


def test_old_ones_go_once_a_newer_one_was_read_back(storage: Storage) -> None:
    made = [write(storage, step) for step in (2, 4, 6, 8, 10, 12)]
    assert prune(storage, JOB_ID, made[1], keep_last=2) == [], "what is newer than the proven one stays"
    assert prune(storage, JOB_ID, made[-2], keep_last=2, keep_every_steps=4, protected={"step-00000002"}) == [
        "step-00000006"
    ]
    assert names(storage) == [f"step-{step:08d}" for step in (2, 4, 8, 10, 12)]
    assert prune(storage, JOB_ID, made[-1], keep_last=2) == ["step-00000008", "step-00000004", "step-00000002"]
    assert names(storage) == ["step-00000010", "step-00000012"]


def test_a_damaged_one_does_not_push_a_good_one_out(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    made = [write(storage, step) for step in (2, 4, 6)]
    (tmp_path / made[1].name / "optimizer" / "layer-0000.safetensors").write_bytes(b"")
    assert prune(storage, JOB_ID, made[2], keep_last=2) == []


def test_without_all_stages_nothing_is_published(storage: Storage) -> None:
    writer = CheckpointWriter(storage, spec(), 4, "0")
    writer.put("model/model-00001-of-00002.safetensors", b"abc")
    with pytest.raises(CheckpointFailed, match="model-00002-of-00002"):
        writer.publish(facts(4), {stage: hashes(tensors(4, stage)) for stage in (0, 1)}, {})
    assert names(storage) == []
    writer.discard()
    assert newest(storage, JOB_ID).skipped == ()


# Crashes --------------------------------------------------------------------------------------------------------------


def second_checkpoint(root: Path, files: FlakyFiles) -> None:
    """What a job does with its disk: clean, write, read back, prune; the first checkpoint must go."""
    storage = LocalStorage(root, files)
    storage.clean()
    made = write(storage, 8)
    assert fault_of(made) == ""
    prune(storage, JOB_ID, made, keep_last=1)


def fresh(tmp_path: Path, number: int) -> Path:
    root = tmp_path / f"{number}"
    write(LocalStorage(root, FlakyFiles()), 4)
    (root / "step-00000006.tmp-0").mkdir()
    (root / "step-00000006.tmp-0" / "left.bin").write_bytes(b"x")
    return root


def power_cut(*_: object) -> None:
    raise PowerCut


def fails(number: int) -> Callable[..., object]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


Act: TypeAlias = Callable[[], object]
# What becomes of an operation: by its name, what is done of it (nothing, a part, all), and how it ends.
STRIKES: dict[str, Callable[[Act, Act], object]] = {
    "before": power_cut,
    "torn": lambda do, torn: power_cut(torn()),
    "after": lambda do, torn: power_cut(do()),
    "ENOSPC": lambda do, torn: fails(errno.ENOSPC)(torn()),
    "EIO": fails(errno.EIO),
}


@pytest.mark.parametrize("kind", STRIKES)
def test_whatever_operation_is_the_last_the_newest_checkpoint_is_old_or_new_and_whole(
    tmp_path: Path, kind: str
) -> None:
    quiet = FlakyFiles()
    second_checkpoint(fresh(tmp_path, -1), quiet)
    assert quiet.count > 60
    seen = set()
    numbers: Iterable[int] = range(quiet.count)
    if kind == "after":  # a cut behind one operation is a cut before the next
        numbers = sorted({0, quiet.count - 1, *others(*numbers)})
    for number in numbers:
        root = fresh(tmp_path, number)
        flaky = FlakyFiles(number, STRIKES[kind])
        try:
            second_checkpoint(root, flaky)
            failure: BaseException | None = None
        except (PowerCut, CheckpointFailed, StorageError) as error:
            failure = error
        flaky.close()
        expected = {"ENOSPC": "disk_full", "EIO": "storage"}.get(kind)
        assert getattr(failure, "reason", None) == expected, quiet.log[number]
        after = LocalStorage(root, FlakyFiles())
        found = newest(after, JOB_ID)
        assert found.checkpoint is not None, (number, quiet.log[number])
        assert (root / "latest").read_text() in ("step-00000004\n", "step-00000008\n"), (number, quiet.log[number])
        step = found.checkpoint.step
        seen.add(step)
        for stage in (0, 1):
            content = b"".join(found.checkpoint.chunks(f"model/model-{stage + 1:05d}-of-00002.safetensors"))
            name = f"model.layers.{stage}.w"
            assert load(content)[name].tolist() == tensors(step, stage)[name].tolist()
        # And the next attempt succeeds and leaves nothing behind.
        after.clean()
        again = write(after, 12)
        prune(after, JOB_ID, again, keep_last=2)
        assert sorted(os.listdir(root)) == sorted(["latest", *names(after)])
        assert newest(after, JOB_ID).checkpoint == again
    assert seen == {4, 8}


def test_a_power_cut_at_any_moment_takes_nothing_that_a_checkpoint_needs(tmp_path: Path) -> None:
    """The disk keeps of files and folders only what was synced."""
    quiet = ForgetfulFiles(tmp_path / "quiet")
    (tmp_path / "quiet").mkdir()
    write(LocalStorage(tmp_path / "quiet" / "checkpoints", quiet), 4)
    first = quiet.count
    second_checkpoint(tmp_path / "quiet" / "checkpoints", quiet)
    seen = []
    for number in range(first, quiet.count + 1):
        top = tmp_path / f"{number}"
        top.mkdir()
        disk = ForgetfulFiles(top, number, power_cut)
        write(LocalStorage(top / "checkpoints", disk), 4)
        with suppress(PowerCut):
            second_checkpoint(top / "checkpoints", disk)
        disk.close()
        disk.lose()
        found = newest(LocalStorage(top / "checkpoints"), JOB_ID)
        assert found.checkpoint is not None, (quiet.log[number - 1], found.skipped)
        seen.append(found.checkpoint.step)
    assert seen == sorted(seen)
    assert set(seen) == {4, 8}


def test_the_number_of_points_is_more_than_two_hundred(tmp_path: Path) -> None:
    quiet = FlakyFiles()
    second_checkpoint(fresh(tmp_path, 0), quiet)
    assert quiet.count * len(STRIKES) > 200
    assert {"write", "sync", "sync_folder", "rename", "unlink", "create", "remove_folder"} <= set(quiet.log)
    # The manifest is the last file of the folder, and everything is durable before the rename shows it.
    rename = quiet.log.index("rename")
    assert quiet.log[rename - 2 : rename + 2] == ["sync", "sync_folder", "rename", "sync_folder"]


def test_what_is_being_removed_is_whole_or_no_checkpoint_at_all(tmp_path: Path) -> None:
    quiet = FlakyFiles()
    storage = LocalStorage(fresh(tmp_path, -1), quiet)
    storage.remove("step-00000004")
    for number in range(quiet.count):
        root = fresh(tmp_path, number)
        with pytest.raises(PowerCut):
            LocalStorage(root, FlakyFiles(number, power_cut)).remove("step-00000004")
        found, faults = list_checkpoints(LocalStorage(root), JOB_ID)
        assert faults == [], quiet.log[number]
        assert [fault_of(checkpoint) for checkpoint in found] in ([], [""]), quiet.log[number]
    empty_memory()
    url = open_storage("memory://bucket/checkpoints", WITH_MEMORY)
    made = write(url, 4)

    filesystem = url._filesystem  # type: ignore[attr-defined]  # an object store that goes away half-way
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filesystem, "rm", lambda *_, **__: fails(errno.ECONNRESET)())
        with pytest.raises(StorageError):
            url.remove(made.name)
    assert names(url) == []


# Damage ---------------------------------------------------------------------------------------------------------------


def test_every_truncated_or_flipped_file_is_named_and_the_one_before_is_used(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    write(storage, 4)
    made = write(storage, 8)
    home = tmp_path / made.name
    for file in made.files:
        path = home / file.path
        good = path.read_bytes()
        flipped = bytearray(good)
        flipped[len(good) // 2] ^= 1
        for bad in (good[:-1], good + b"x", bytes(flipped), b""):
            path.write_bytes(bad)
            assert Path(file.path).name in fault_of(made) or "trainer_state" in fault_of(made)
            if len(bad) != len(good):
                assert "bytes instead of" in fault_of(made, contents=False)
            found = newest(storage, JOB_ID)
            assert found.checkpoint is not None
            assert (found.checkpoint.step, [fault.name for fault in found.skipped]) == (4, [made.name])
            assert made.name in found.skipped_text()
        path.unlink()
        assert fault_of(made) != ""
        path.write_bytes(good)
    assert fault_of(made) == ""


def file_entry(path: object = "model/config.json", size_bytes: int = 1, sha256: str = "0" * 64) -> dict[str, object]:
    return {"path": path, "bytes": size_bytes, "sha256": sha256}


OUTSIDE = [file_entry(path) for path in ("../../etc/passwd", "/etc/passwd", "model/../../../etc/passwd", 7)]


@pytest.mark.parametrize(
    "change",
    [
        *({"format": value} for value in (2, "1")),
        *({"step": value} for value in (9, -1, True)),
        {"timeline": "x"},
        {"files": None},
        *({"files": [entry]} for entry in (*OUTSIDE, file_entry(size_bytes=-1), file_entry(sha256="zz"))),
        {"files": [file_entry()] * 2},
        *({"more": entry} for entry in OUTSIDE),
        {"weights_sha256": "nothing"},
        {"staleness": 7},
        {"loss": "high"},
        {"created_unix_s": {}},
        *(b"", b"[]", b"{", b"[" * 100_000, b'{"format": 1, "format": 1}', b"\xff\xfe", b"null"),
    ],
)
def test_a_manifest_that_says_something_odd_makes_no_checkpoint(
    tmp_path: Path, change: dict[str, object] | bytes
) -> None:
    storage = LocalStorage(tmp_path)
    write(storage, 4)
    made = write(storage, 8)
    path = tmp_path / made.name / "manifest.json"
    if isinstance(change, bytes):
        path.write_bytes(change)
    else:
        manifest = json.loads(path.read_text())
        if "more" in change:  # beside all that it named before
            change = {"files": [*manifest["files"], change["more"]]}
        path.write_text(json.dumps(manifest | change))
    found = newest(storage, JOB_ID)
    assert found.checkpoint is not None
    assert found.checkpoint.step == 4
    assert found.skipped[0].name == made.name
    assert made.name not in names(storage), "it is no checkpoint before any of its files is looked at"
    with pytest.raises(CheckpointDamaged):
        open_folder(tmp_path / made.name, print)


def test_nothing_is_written_or_removed_behind_a_link_that_was_planted_first(tmp_path: Path) -> None:
    """In a shared folder, a link with the name of a job was followed when writing, and what is temporary behind it
    was removed."""
    victim, shared = tmp_path / "victim", tmp_path / "shared"
    (victim / "work.tmp-1").mkdir(parents=True)
    (victim / "latest.tmp-0").write_text("mine")
    shared.mkdir()
    (shared / "job").symlink_to(victim)
    storage = LocalStorage(shared / "job", chosen=shared)
    attempts: list[Act] = [lambda: storage.begin("step-1", "x"), lambda: storage.point("step-1")]
    for attempt in (*attempts, storage.clean, lambda: storage.remove("work.tmp-1")):
        with pytest.raises(StorageError, match="job is a symbolic link"):
            attempt()
    assert sorted(path.name for path in victim.iterdir()) == ["latest.tmp-0", "work.tmp-1"]
    (shared / "job").unlink()
    draft = storage.begin("step-1", "x")
    (shared / "job" / "step-1.tmp-x").symlink_to(victim)
    with pytest.raises(StorageError, match="is a symbolic link"):
        draft.create("optimizer/a")
    storage.clean()
    (shared / "job" / "latest.tmp-0").symlink_to(victim / "latest.tmp-0")
    with pytest.raises(StorageError):
        storage.point("step-1")
    assert (victim / "latest.tmp-0").read_text() == "mine"
    assert (victim / "work.tmp-1").is_dir()


def test_a_folder_that_a_person_chose_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "disk")
    storage = LocalStorage(tmp_path / "checkpoints" / "job", chosen=tmp_path / "checkpoints")
    storage.begin("step-1", "x").publish(b"{}")
    assert storage.names() == ["step-1"]


def test_links_pipes_and_folders_in_the_place_of_files_are_refused(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "kept")
    made = write(storage, 8)
    path = tmp_path / "kept" / made.name / "model" / "config.json"
    elsewhere = tmp_path / "config.json"
    path.rename(elsewhere)
    for make in (lambda: path.symlink_to(elsewhere), lambda: os.mkfifo(path), path.mkdir):
        make()
        assert "config.json" in fault_of(made)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    elsewhere.rename(path)
    folder = tmp_path / "kept" / made.name / "model"
    folder.rename(tmp_path / "model")
    folder.symlink_to(tmp_path / "model")
    assert "symbolic link" in fault_of(made)


def test_contents_that_contradict_each_other_are_found_although_every_hash_agrees(tmp_path: Path) -> None:
    """Files of two steps, each with its own right hash, are still no checkpoint."""
    storage = LocalStorage(tmp_path)
    old, made = write(storage, 4), write(storage, 8)
    manifest = json.loads((tmp_path / made.name / "manifest.json").read_text())

    def with_file(name: str) -> str:
        entry = next(file for file in old.files if file.path == name)
        others = [file for file in manifest["files"] if file["path"] != name]
        mixed = manifest | {"files": [*others, {"path": name, "bytes": entry.size_bytes, "sha256": entry.sha256}]}
        before = (tmp_path / made.name / name).read_bytes()
        (tmp_path / made.name / name).write_bytes((tmp_path / old.name / name).read_bytes())
        (tmp_path / made.name / "manifest.json").write_text(json.dumps(mixed))
        fault = fault_of(list_checkpoints(storage, JOB_ID)[0][-1])
        (tmp_path / made.name / name).write_bytes(before)
        (tmp_path / made.name / "manifest.json").write_text(json.dumps(manifest))
        return fault

    assert "not those that the manifest names" in with_file("model/model-00001-of-00002.safetensors")
    assert "another step" in with_file("trainer_state.json")
    assert fault_of(list_checkpoints(storage, JOB_ID)[0][-1]) == ""


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<Q", 1 << 63),
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 0),
        struct.pack("<Q", 66) + b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}            ' + b"1234",
        b"PK\x03\x04 a pickle in disguise",
    ],
)
def test_a_file_that_is_no_safetensors_file_is_named_even_if_its_hash_agrees(tmp_path: Path, header: bytes) -> None:
    storage = LocalStorage(tmp_path)
    made = write(storage, 8)
    name = "optimizer/layer-0001.safetensors"
    (tmp_path / made.name / name).write_bytes(header)
    path = tmp_path / made.name / "manifest.json"
    manifest = json.loads(path.read_text())
    for file in manifest["files"]:
        if file["path"] == name:
            file |= {"bytes": len(header), "sha256": hashlib.sha256(header).hexdigest()}
    path.write_text(json.dumps(manifest))
    assert "layer-0001" in fault_of(list_checkpoints(storage, JOB_ID)[0][0])


def test_a_look_at_a_checkpoint_parses_no_header_and_its_check_no_long_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage server stored headers that took a thread of the scheduler hours, anew for each viewer who looked."""
    made = write(LocalStorage(tmp_path), 8)
    parsed: list[str] = []

    def parse(path: str, *given: Any) -> Any:
        parsed.append(path)
        return parse_header(path, *given)

    monkeypatch.setattr(reader, "parse_header", parse)
    assert fault_of(made, contents=False) == ""
    assert parsed == []
    assert fault_of(made) == ""
    assert len(parsed) == sum(file.path.endswith(".safetensors") for file in made.files)
    parsed.clear()
    monkeypatch.setattr(reader, "PART_HEADER_BYTES_MAX", 10)
    assert "longer than its tensors need" in fault_of(made)
    assert [path for path in parsed if not path.startswith("model/")] == []


def test_a_folder_is_opened_by_itself_or_as_the_newest_of_several(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    write(storage, 4)
    made = write(storage, 8)
    assert open_folder(tmp_path / "step-00000004", print).step == 4
    told: list[str] = []
    assert open_folder(tmp_path, told.append).step == 8
    assert told == []
    (tmp_path / made.name / "model" / "config.json").write_text("{}")
    assert open_folder(tmp_path, told.append).step == 4
    assert told[0].startswith(f"{made.name} was skipped: ")
    with pytest.raises(CheckpointDamaged, match=r"config\.json"):
        open_folder(tmp_path / made.name, print)
    with pytest.raises(NotFound):
        open_folder(tmp_path / "nowhere", print)


@pytest.mark.parametrize("name", ["s3://x", "a://b", "c::d", "what?", "a%41b", "e#f", "x/y://z"])
def test_a_folder_that_looks_like_a_url_is_a_folder(name: str, tmp_path: Path) -> None:
    made = write(open_storage(f"{tmp_path}/{name}/runs"), 4)
    assert (tmp_path / name / "runs" / made.name / "manifest.json").is_file()
    assert open_storage("x/y://z").where == "x/y:/z"
    with pytest.raises(InvalidConfig, match="martian"):
        open_storage("martian://x/y")


def test_on_an_object_store_a_step_without_a_manifest_is_no_checkpoint_and_goes() -> None:
    filesystem = empty_memory()
    storage = open_storage("memory://bucket/cut", WITH_MEMORY)
    write(storage, 4)
    filesystem.pipe("/bucket/cut/step-00000006/model/config.json", b"{}")
    found = newest(storage, JOB_ID)
    assert found.checkpoint is not None
    assert (found.checkpoint.step, [fault.name for fault in found.skipped]) == (4, ["step-00000006"])
    made = write(storage, 8)
    assert prune(storage, JOB_ID, made, keep_last=2) == ["step-00000006"]
    assert filesystem.cat("/bucket/cut/latest") == b"step-00000008\n"
