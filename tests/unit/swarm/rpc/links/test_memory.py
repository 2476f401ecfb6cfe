"""swarm.rpc.links.memory: each byte belongs to one tensor at a time, and nothing is read but what was offered."""

from __future__ import annotations

import os
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
WHOLE = [(HEAD_BYTES, FILE_BYTES)]


class Ends:
    """Both ends of one link."""

    def __init__(self) -> None:
        self.lent_files, self.taken_files = FileCount(LENT_MAX), FileCount(TAKEN_MAX)
        self.lent, self.taken = LentMemory(self.lent_files), TakenMemory(self.taken_files)
        self.lent.begin()
        assert self.lent.write(1, CONTENT) is None  # nothing was taken yet
        offer = self.lent.offer()
        assert offer is not None
        self.offer = frame_pb2.Memory.FromString(offer)

    def shake_hands(self) -> Ends:
        self.taken.take(self.offer.SerializeToString())
        self.lent.answered(is_taken=True)
        return self

    def close(self) -> None:
        self.lent.close()
        self.taken.close()


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


def test_an_offer_is_made_once_and_only_for_a_large_payload(ends: Ends) -> None:
    assert ends.lent.write(2, CONTENT) is None
    assert ends.lent.offer() is None
    other = LentMemory(ends.lent_files)
    other.begin()
    assert other.write(1, CONTENT[1:]) is None
    assert other.offer() is None
    assert ends.lent_files.count == 1


def test_a_link_through_a_proxy_or_a_relay_offers_nothing() -> None:
    lent = LentMemory(FileCount(1))
    assert lent.write(1, CONTENT) is None
    assert lent.offer() is None


def test_a_refused_offer_leaves_no_file_and_is_not_repeated(ends: Ends) -> None:
    ends.lent.answered(is_taken=False)
    assert ends.lent_files.count == 0
    assert ends.lent.write(1, CONTENT) is None
    assert ends.lent.offer() is None
    with pytest.raises(Refused):
        ends.taken.take(ends.offer.SerializeToString())


def test_nothing_is_written_behind_the_end_of_a_link(ends: Ends) -> None:
    """The number of its descriptor may be another file's by then."""
    ends.shake_hands()
    ends.lent.close()
    assert ends.lent.write(1, CONTENT) is None


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


@pytest.mark.parametrize("refusing", ["memfd_create", "ftruncate"])
def test_where_no_file_can_be_made_nothing_is_offered(refusing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    files = FileCount(1)
    lent = LentMemory(files)
    lent.begin()
    monkeypatch.setattr(module.os, refusing, refuse)
    assert lent.write(1, CONTENT) is None
    assert lent.offer() is None
    assert files.count == 0


def test_elsewhere_than_on_linux_nothing_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.sys, "platform", "darwin")
    lent = LentMemory(FileCount(1))
    lent.begin()
    assert lent.write(1, CONTENT) is None
    assert lent.offer() is None


# What others offer ----------------------------------------------------------------------------------------------------


def test_a_file_with_another_word_is_not_read(ends: Ends) -> None:
    """A member that knows the numbers of somebody else's file does not know its word."""
    strangers = Ends()
    claim = frame_pb2.Memory()
    claim.CopyFrom(ends.offer)
    claim.descriptor = strangers.offer.descriptor
    with pytest.raises(Refused, match="word"):
        ends.taken.take(claim.SerializeToString())
    strangers.close()


@pytest.mark.parametrize("length", [0, 1, WORD_BYTES - 1, WORD_BYTES + 1])
def test_a_word_of_another_length_opens_nothing(ends: Ends, length: int) -> None:
    word = (bytes(ends.offer.word) * 2)[:length]
    ends.offer.word = word
    ends.offer.host = module._host(word)
    with pytest.raises(Refused, match="another host"):
        ends.taken.take(ends.offer.SerializeToString())


def test_another_host_opens_nothing(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_host", lambda word: bytes(16))
    with pytest.raises(Refused, match="another host"):
        ends.taken.take(ends.offer.SerializeToString())


def test_another_network_namespace_is_another_host(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link between them may be slow on purpose."""
    readlink = os.readlink
    monkeypatch.setattr(
        module.os, "readlink", lambda path: "net:[1]" if path == "/proc/self/ns/net" else readlink(path)
    )
    with pytest.raises(Refused, match="another host"):
        ends.taken.take(ends.offer.SerializeToString())


@pytest.mark.parametrize("what", ["file", "pipe", "other memory", "nothing"])
def test_a_descriptor_that_is_no_links_memory_is_not_opened(ends: Ends, what: str, tmp_path: Path) -> None:
    """A pipe would hang, and a device may do something as soon as it is opened."""
    opened: list[int] = []
    match what:
        case "file":
            path = tmp_path / "file"
            path.write_bytes(bytes(ends.offer.word) + bytes(FILE_BYTES - WORD_BYTES))
            opened.append(os.open(path, os.O_RDONLY))
        case "pipe":
            opened += os.pipe()
        case "other memory":
            opened.append(os.memfd_create("swarm-other"))
        case _:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    ends.offer.descriptor = opened[0]
    if what == "nothing":
        os.close(opened.pop())
    with pytest.raises(Refused):
        ends.taken.take(ends.offer.SerializeToString())
    for descriptor in opened:
        os.close(descriptor)


def test_a_file_of_another_size_or_user_is_not_read(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    os.ftruncate(ends.offer.descriptor, FILE_BYTES - 1)
    with pytest.raises(Refused, match="another size"):
        ends.taken.take(ends.offer.SerializeToString())
    os.ftruncate(ends.offer.descriptor, FILE_BYTES)
    monkeypatch.setattr(module.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(Refused, match="another user"):
        TakenMemory(FileCount(1)).take(ends.offer.SerializeToString())


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), FileNotFoundError(2, "No such file")])
def test_where_proc_hides_the_sender_the_offer_is_refused(
    ends: Ends, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden(*_: object) -> int:
        raise error

    monkeypatch.setattr(module.os, "open", hidden)
    with pytest.raises(Refused, match="not to be had"):
        ends.taken.take(ends.offer.SerializeToString())


def test_a_stream_offers_once(ends: Ends) -> None:
    ends.shake_hands()
    with pytest.raises(CorruptFrame, match="twice"):
        ends.taken.take(ends.offer.SerializeToString())


@pytest.mark.parametrize("offer", [b"\xff\xff", b"\x08"])
def test_an_offer_that_is_none_is_corrupt(ends: Ends, offer: bytes) -> None:
    with pytest.raises(CorruptFrame):
        ends.taken.take(offer)


@pytest.mark.parametrize("number", [(1 << 64) - 1, 1 << 31])
def test_numbers_of_processes_and_descriptors_may_be_any(ends: Ends, number: int) -> None:
    ends.offer.process = ends.offer.descriptor = number
    with pytest.raises(Refused):
        ends.taken.take(ends.offer.SerializeToString())


def test_files_of_others_are_few(ends: Ends) -> None:
    full = FileCount(1)
    first, second = TakenMemory(full), TakenMemory(full)
    first.take(ends.offer.SerializeToString())
    with pytest.raises(Refused, match="the limit"):
        second.take(ends.offer.SerializeToString())
    first.close()
    first.close()
    second.close()
    assert full.count == 0


# What others say of extents -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "size"),
    [
        (0, 1),
        (0, HEAD_BYTES),
        (HEAD_BYTES - 1, 2),
        (FILE_BYTES - 1, 2),
        (FILE_BYTES, 1),
        (1 << 62, CHUNK_BYTES),
        ((1 << 64) - 1, 1),
    ],
)
def test_an_extent_outside_of_the_file_is_corrupt(ends: Ends, start: int, size: int) -> None:
    """The word is outside as well: nobody needs it again."""
    ends.shake_hands()
    with pytest.raises(CorruptFrame, match="of a memory of"):
        ends.taken.read(start, size)


def test_an_extent_of_no_memory_is_corrupt(ends: Ends) -> None:
    with pytest.raises(CorruptFrame, match="not taken"):
        ends.taken.read(HEAD_BYTES, 1)


def test_a_sender_that_cuts_its_file_is_corrupt_and_kills_nobody(ends: Ends) -> None:
    ends.shake_hands()
    os.ftruncate(ends.offer.descriptor, HEAD_BYTES + 10)
    with pytest.raises(CorruptFrame, match="cut"):
        ends.taken.read(HEAD_BYTES, 11)


@pytest.mark.parametrize(
    "frame",
    [
        frame_pb2.Frame(sequence=1, extent_start=HEAD_BYTES, extent_bytes=CHUNK_BYTES + 1),
        frame_pb2.Frame(sequence=1, extent_start=HEAD_BYTES, extent_bytes=(1 << 64) - 1),
        frame_pb2.Frame(sequence=1, extent_start=HEAD_BYTES, extent_bytes=4, payload=b"abcd"),
    ],
)
def test_a_frame_has_one_payload_of_at_most_one_chunk(frame: frame_pb2.Frame) -> None:
    with pytest.raises(CorruptFrame, match="in memory"):
        decode(frame.SerializeToString())
