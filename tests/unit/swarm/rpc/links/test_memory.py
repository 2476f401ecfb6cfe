"""swarm.rpc.links.memory: each byte belongs to one tensor at a time, and nothing is read but what was offered."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import CorruptFrame, Refused
from swarm.rpc.links import memory as module
from swarm.rpc.links.frames import CHUNK_BYTES, decode
from swarm.rpc.links.memory import (
    FILE_BYTES,
    HEAD_BYTES,
    LEAST_BYTES,
    LENT_MAX,
    TAKEN_MAX,
    WORD_BYTES,
    Extents,
    FileCount,
    LentMemory,
    TakenMemory,
    lent_files,
)
from swarm.wire import frame_pb2

CONTENT = memoryview(bytes(range(256)) * (LEAST_BYTES // 256))
MIB = memoryview(bytes(1 << 20))


class Ends:
    """Both ends of one link."""

    def __init__(self) -> None:
        self.lent_files, self.taken_files = FileCount(LENT_MAX), FileCount(TAKEN_MAX)
        self.lent, self.taken = LentMemory(self.lent_files), TakenMemory(self.taken_files)
        self.others: list[int] = []  # descriptors of other files
        self.lent.begin()
        assert self.lent.write(1, CONTENT) is None  # nothing was taken yet
        offer = self.lent.offer()
        assert offer is not None
        self.offer = frame_pb2.Memory.FromString(offer)

    def shake_hands(self) -> Ends:
        self.taken.take(self.offer.SerializeToString())
        self.lent.answered(is_taken=True)
        return self

    def opened(self, descriptor: int) -> int:
        self.others.append(descriptor)
        return descriptor

    def close(self) -> None:
        self.lent.close()
        self.taken.close()
        for descriptor in self.others:
            os.close(descriptor)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()
    assert (made.lent_files.count, made.taken_files.count) == (0, 0)


# Extents --------------------------------------------------------------------------------------------------------------

STEPS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=60)  # (tensor, size; 0: answered)


@given(STEPS)
@settings(max_examples=300)
def test_no_byte_belongs_to_two_tensors_and_each_is_free_again_once(steps: list[tuple[int, int]]) -> None:
    start, stop = 7, 107
    extents, owners = Extents(start, stop), dict.fromkeys(range(start, stop), -1)
    for tensor, size in steps:
        if size == 0:
            extents.release(tensor)
            owners = {place: -1 if owner == tensor else owner for place, owner in owners.items()}
            continue
        free = "".join("." if owners[place] == -1 else "x" for place in range(start, stop))
        found = extents.take(tensor, size)
        if found is None:
            assert "." * size not in free
            continue
        assert found == start + free.index("." * size), "the first that fits, so that little memory is ever touched"
        owners |= dict.fromkeys(range(found, found + size), tensor)
    for tensor in range(6):
        extents.release(tensor)
    assert extents.take(9, stop - start) == start


# What is written is read ----------------------------------------------------------------------------------------------


def test_a_payload_is_read_as_it_was_written(ends: Ends) -> None:
    ends.shake_hands()
    for sequence in range(3):
        start = ends.lent.write(sequence, CONTENT)
        assert start is not None
        assert ends.taken.read(start, len(CONTENT)) == CONTENT
        ends.lent.release(sequence)
    assert ends.lent.written_bytes == 3 * len(CONTENT)


def test_what_was_read_is_the_receivers_own_whatever_the_sender_writes_then(ends: Ends) -> None:
    """Checked and used is one copy: the sender can write at any time."""
    ends.shake_hands()
    start = ends.lent.write(1, CONTENT)
    assert start is not None
    read = ends.taken.read(start, len(CONTENT))
    os.pwrite(ends.offer.descriptor, bytes(len(CONTENT)), start)
    assert read == CONTENT
    assert read.readonly
    assert ends.taken.read(start, len(CONTENT)) == bytes(len(CONTENT))


def test_what_is_small_or_finds_no_room_travels_in_a_message(ends: Ends) -> None:
    ends.shake_hands()
    assert ends.lent.write(0, CONTENT[1:]) is None
    starts = [ends.lent.write(sequence, MIB) for sequence in range(FILE_BYTES >> 20)]
    assert starts[-1] is None  # the head takes a part of the last one's place
    assert None not in starts[:-1]
    ends.lent.release(5)
    assert ends.lent.write(99, MIB) == starts[5]


def test_an_offer_is_made_once_and_nothing_is_written_behind_a_refusal_or_the_end(ends: Ends) -> None:
    """The number of its descriptor may be another file's by then."""
    assert ends.lent.write(2, CONTENT) is None
    assert ends.lent.offer() is None
    other = Ends()
    for end in (lambda: other.lent.answered(is_taken=False), ends.shake_hands, ends.lent.close):
        end()
    for made in (ends, other):
        assert made.lent.write(1, CONTENT) is None
        assert made.lent.offer() is None
        assert made.lent_files.count == 0
    with pytest.raises(Refused):
        other.taken.take(other.offer.SerializeToString())


def denied(*_: object) -> int:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (module.sys, "platform", "darwin"),
        (module.os, "memfd_create", denied),
        (module.os, "ftruncate", denied),
        (LentMemory, "begin", lambda lent: None),  # through a proxy or a relay
        (sys.modules[__name__], "CONTENT", CONTENT[1:]),
    ],
    ids=["no Linux", "no memory", "no room", "not straight", "small"],
)
def test_where_no_file_can_be_made_or_used_nothing_is_offered(
    place: object, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, value)
    files = FileCount(1)
    lent = LentMemory(files)
    lent.begin()
    assert lent.write(1, CONTENT) is None
    assert lent.offer() is None
    assert files.count == 0


def test_without_memory_left_the_rest_travels_in_messages(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    ends.shake_hands()
    for write in (full, lambda descriptor, payload, start: len(payload) // 2):
        monkeypatch.setattr(module.os, "pwrite", write)
        assert ends.lent.write(1, CONTENT) is None
    monkeypatch.undo()
    assert ends.lent.write(2, CONTENT) is None


def test_a_ninth_link_waits_until_another_has_ended() -> None:
    files = FileCount(LENT_MAX)
    links = [LentMemory(files) for _ in range(LENT_MAX + 1)]
    for link in links:
        link.begin()
        link.write(1, CONTENT)
    assert [link.offer() is not None for link in links] == [True] * LENT_MAX + [False]
    links[0].close()
    links[-1].write(2, CONTENT)
    assert links[-1].offer() is not None
    for link in links:
        link.close()
        link.close()
    assert files.count == 0


@pytest.mark.parametrize(("gib", "files"), [(64, LENT_MAX), (2, 4), (0.25, 0)])
def test_all_files_together_are_a_small_part_of_the_machines_memory(
    gib: float, files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(total=int(gib * (1 << 30))))
    lent = lent_files()
    assert [lent.enter() for _ in range(files + 1)] == [True] * files + [False]


# What others offer ----------------------------------------------------------------------------------------------------


def spoilt(ends: Ends, how: object, patch: pytest.MonkeyPatch, folder: Path) -> None:
    """What the sender offers is another host's, another file, or hidden: a pipe would hang whoever opens it."""
    offer, readlink = ends.offer, os.readlink
    match how:
        case ("word", int(length)):
            offer.word = (bytes(offer.word) * 2)[:length]
            offer.host = module._host(offer.word)
        case "another host":
            patch.setattr(module, "_host", lambda word: bytes(16))
        case "another namespace":  # a link between them may be slow on purpose
            patch.setattr(os, "readlink", lambda path: "net:[1]" if path == "/proc/self/ns/net" else readlink(path))
        case "a file":
            (folder / "file").write_bytes(bytes(offer.word) + bytes(FILE_BYTES - WORD_BYTES))
            offer.descriptor = ends.opened(os.open(folder / "file", os.O_RDONLY))
        case "a pipe":
            offer.descriptor, _ = map(ends.opened, os.pipe())
        case "other memory":
            offer.descriptor = ends.opened(os.memfd_create("swarm-other"))
        case int(number):
            offer.process = offer.descriptor = number
        case "another size":
            os.ftruncate(offer.descriptor, FILE_BYTES - 1)
        case "another user":
            patch.setattr(module.os, "geteuid", lambda: os.getuid() + 1)
        case "hidden":
            patch.setattr(module.os, "open", denied)
        case "full":
            ends.taken = TakenMemory(FileCount(0))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        *[(("word", length), "another host") for length in (0, 1, WORD_BYTES - 1, WORD_BYTES + 1)],
        *[(how, "another host") for how in ("another host", "another namespace")],
        *[(how, "is no memory of a link") for how in ("a file", "a pipe", "other memory")],
        *[(how, "not to be had") for how in ("hidden", (1 << 64) - 1, 1 << 31)],
        *[(how, how) for how in ("another size", "another user")],
        ("full", "the limit"),
    ],
)
def test_what_is_not_this_links_memory_is_refused_and_not_opened(
    ends: Ends, how: object, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt(ends, how, monkeypatch, tmp_path)
    with pytest.raises(Refused, match=words):
        ends.taken.take(ends.offer.SerializeToString())


def test_a_file_with_another_word_is_not_read(ends: Ends) -> None:
    """A member that knows the numbers of somebody else's file does not know its word."""
    strangers = Ends()
    ends.offer.descriptor = strangers.offer.descriptor
    with pytest.raises(Refused, match="word"):
        ends.taken.take(ends.offer.SerializeToString())
    strangers.close()


def test_a_stream_offers_once_and_a_memory(ends: Ends) -> None:
    for offer in (b"\xff\xff", b"\x08"):
        with pytest.raises(CorruptFrame):
            TakenMemory(FileCount(1)).take(offer)
    ends.shake_hands()
    with pytest.raises(CorruptFrame, match="twice"):
        ends.taken.take(ends.offer.SerializeToString())
    ends.taken.close()
    ends.taken.close()
    assert ends.taken_files.count == 0


# What others say of extents -------------------------------------------------------------------------------------------


def test_an_extent_that_is_not_there_is_corrupt_and_kills_nobody(ends: Ends) -> None:
    """The word is outside as well: nobody needs it again."""
    with pytest.raises(CorruptFrame, match="not taken"):
        ends.taken.read(HEAD_BYTES, 1)
    ends.shake_hands()
    outside = [(0, 1), (0, HEAD_BYTES), (HEAD_BYTES - 1, 2), (FILE_BYTES - 1, 2), (FILE_BYTES, 1)]
    for start, size in (*outside, (1 << 62, CHUNK_BYTES), ((1 << 64) - 1, 1)):
        with pytest.raises(CorruptFrame, match="of a memory of"):
            ends.taken.read(start, size)
    os.ftruncate(ends.offer.descriptor, HEAD_BYTES + 10)
    with pytest.raises(CorruptFrame, match="cut"):
        ends.taken.read(HEAD_BYTES, 11)


@pytest.mark.parametrize(("size", "payload"), [(CHUNK_BYTES + 1, b""), ((1 << 64) - 1, b""), (4, b"abcd")])
def test_a_frame_has_one_payload_of_at_most_one_chunk(size: int, payload: bytes) -> None:
    frame = frame_pb2.Frame(sequence=1, extent_start=HEAD_BYTES, extent_bytes=size, payload=payload)
    with pytest.raises(CorruptFrame, match="in memory"):
        decode(frame.SerializeToString())
