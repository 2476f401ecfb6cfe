"""A stage's state as files, read and written: weights, and in a checkpoint also the optimizer's state.

The files are keyed by parameter, never by stage, so any number of stages reads them. Their headers say where the
tensors lie, and a stage reads only the byte ranges that it needs:

    model/*.safetensors                 parameter                      any float dtype; becomes float32
    optimizer/embed.safetensors         parameter@state, and with      all before the layers; a tied weight
    optimizer/layer-0003.safetensors    staleness 1 parameter@previous one decoder layer
    optimizer/head.safetensors                                         final norm, untied head
    outer/...                           parameter@momentum             of islands, in files of the same names
    weights/...                         parameter@trained              of an island that is not level with others

`parameter@previous` is the weight of one version before; with islands model/ has the outer weights. `StateReading`
knows which bytes are needed and what they mean, but not where they come from (a file, Session.Fetch).

A peer cannot check the hash of a file that it reads in parts, so replicas of a stage compare the digests of what they
loaded. Optimizer files are read whole and checked.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from swarm.checkpoint.reader import (
    OPTIMIZER_FOLDER,
    OUTER_FOLDER,
    STATE_MARK,
    WEIGHTS_FOLDER,
    island_folder,
    without_island,
)
from swarm.errors import InvalidModel
from swarm.hf.fit import OTHER_MODEL, fit, own_head_unknown
from swarm.hf.model_folder import shard_name
from swarm.hf.own_files import open_own
from swarm.hf.pretrained import MODEL_FOLDER, WeightFile, hub_files, weight_files
from swarm.hf.safetensors_header import LENGTH_BYTES, StoredTensor, header_bytes, parse_header
from swarm.job.families import FAMILIES, HEAD
from swarm.job.outer import Part
from swarm.job.spec import JobSpec
from swarm.model.families import parameter_shapes
from swarm.types import Pieces
from swarm.wire.messages import ParameterHash, StateFile

PREVIOUS = "previous"  # stands where an optimizer state's name does: the weights of version - 1
MOMENTUM = "momentum"  # of outer steps
TRAINED = "trained"  # weights of an island
READ_BYTES = 1 << 20
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class InitialState:
    """The tensors that one stage starts from, by Hugging Face parameter name, on the CPU, float32.

    `previous` are the weights of version - 1 (staleness 1); empty: the same as `weights`. `optimizer` has the state of
    each parameter by name (swarm/model/optimizers.py); empty: start anew. `momentum`: of outer steps; empty: 0.
    `trained` are the island's own weights, where `weights` are the outer ones. A tied head is the embedding's entry.
    """

    version: int
    weights: Mapping[str, Tensor]
    previous: Mapping[str, Tensor] = field(default_factory=dict)
    optimizer: Mapping[str, dict[str, Tensor]] = field(default_factory=dict)
    momentum: Mapping[str, Tensor] = field(default_factory=dict)
    trained: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    path: str
    start: int
    stop: int


class StateReading:
    """Reads the starting state of one stage from `files`, whose order does not matter:

    for span in reading.spans():
        ...  # feed(bytes), in order, until the span is complete
    state = reading.state()

    InvalidModel names the file and the tensor. Memory: the tensors, one of them once more, and one header.
    """

    def __init__(self, spec: JobSpec, stage: int, files: Sequence[StateFile], version: int = 0) -> None:
        self._spec = spec
        self._version = version
        self._shapes = parameter_shapes(spec, stage)
        self._weight_files = [file for file in files if file.path.startswith(f"{MODEL_FOLDER}/") and _is_tensors(file)]
        self._optimizer_files = _in_folder(files, OPTIMIZER_FOLDER)
        of_islands = files if spec.has_outer_steps else ()
        outer, trained = (_in_folder(of_islands, folder) for folder in (OUTER_FOLDER, WEIGHTS_FOLDER))
        self._outer_files, self._trained_files = outer, trained
        self._sink: Callable[[bytes], object] = _nowhere
        self._weights: dict[str, Tensor] = {}
        self._states: dict[str, Tensor] = {}
        self._outer: dict[str, Tensor] = {}
        self._trained: dict[str, Tensor] = {}
        self.read_bytes = 0
        read = [*self._weight_files, *self._optimizer_files.values(), *outer.values(), *trained.values()]
        self.total_bytes = sum(file.size_bytes for file in read)

    def spans(self) -> Iterator[Span]:
        """The spans to read; the bytes of each must be fed before the next one is asked for."""
        yield from self._read_weights()
        for folder, files, into in (
            (OPTIMIZER_FOLDER, self._optimizer_files, self._states),
            (OUTER_FOLDER, self._outer_files, self._outer),
            (WEIGHTS_FOLDER, self._trained_files, self._trained),
        ):
            for name in sorted({part_file(self._spec, name) for name in self._shapes}) if files else ():
                yield from self._read_state(f"{folder}/{name}", files, into)
        self._sink = _nowhere

    def feed(self, chunk: bytes) -> None:
        self.read_bytes += len(chunk)
        self._sink(chunk)

    def state(self) -> InitialState:
        """The state, once every span was fed."""
        optimizer: dict[str, dict[str, Tensor]] = {}
        previous: dict[str, Tensor] = {}
        for key, tensor in self._states.items():
            name, _, state = key.rpartition(STATE_MARK)
            if state == PREVIOUS:
                previous[name] = tensor
            else:
                optimizer.setdefault(name, {})[state] = tensor
        if self._optimizer_files:
            optimizer = {name: optimizer.get(name, {}) for name in self._shapes}  # sgd keeps nothing
        if previous and (lacking := sorted(self._shapes.keys() - previous.keys())):
            raise InvalidModel(f"the checkpoint has previous weights, but not of {lacking[0]}")
        momentum = {key.rpartition(STATE_MARK)[0]: tensor for key, tensor in self._outer.items()}
        if momentum and (lacking := sorted(self._shapes.keys() - momentum.keys())):
            raise InvalidModel(f"the checkpoint has the momentum of outer steps, but not of {lacking[0]}")
        trained = {key.rpartition(STATE_MARK)[0]: tensor for key, tensor in self._trained.items()}
        if trained and (lacking := sorted(self._shapes.keys() - trained.keys())):
            raise InvalidModel(f"the checkpoint has weights of the island, but not of {lacking[0]}")
        return InitialState(self._version, self._weights, previous, optimizer, momentum, trained)

    def _read_weights(self) -> Generator[Span, None, None]:
        stored: list[StoredTensor] = []
        for file in self._weight_files:
            header = yield from self._header(file)
            stored += header.values()
        found = fit(self._spec, stored, parameter_shapes(self._spec), self._shapes.keys())
        wanted, embedding = dict(found.tensors), FAMILIES[self._spec.model.family].embedding_name
        if found.second_head is not None and embedding in wanted:
            wanted[HEAD] = found.second_head
        for span, tensors in _merged(wanted):
            filler = _Filler(span.start, tensors, self._weights)
            yield from self._pass(span, filler.feed)
        second = self._weights.pop(HEAD) if HEAD in wanted.keys() - self._shapes.keys() else None
        if second is not None and not torch.equal(second, self._weights[embedding]):
            raise own_head_unknown(wanted[HEAD], wanted[embedding])

    def _read_state(
        self, path: str, files: Mapping[str, StateFile], into: dict[str, Tensor]
    ) -> Generator[Span, None, None]:
        file = files.get(path)
        only = MOMENTUM if into is self._outer else TRAINED if into is self._trained else ""
        if file is None:
            raise InvalidModel(f"the checkpoint lacks {path}", hint="resume from another checkpoint")
        header = yield from self._header(file)
        wanted = {}
        for key, stored in header.items():
            name, at, state = key.rpartition(STATE_MARK)
            if not at or not state or (only and state != only):
                raise InvalidModel(f"{path} holds {key!r}, which is no parameter@state")
            if name not in self._shapes or (state == PREVIOUS and not self._spec.pipeline.staleness):
                continue  # another stage's, or not needed
            if only or state == PREVIOUS:
                _check(stored, self._shapes[name])
            if stored.dtype != "F32":
                raise InvalidModel(f"{key} of {path} is {stored.dtype}, optimizer state is F32")
            wanted[key] = stored
        filler = _Filler(0, wanted, into)
        digest = hashlib.sha256()

        def hashed(chunk: bytes) -> None:
            digest.update(chunk)
            filler.feed(chunk)

        yield from self._pass(Span(file.path, 0, file.size_bytes), hashed)
        if file.sha256 and digest.hexdigest() != file.sha256:
            raise InvalidModel(
                f"{path} has sha256 {digest.hexdigest()[:12]}…, expected was {file.sha256[:12]}…",
                hint="resume from another checkpoint: swarm checkpoints JOB --verify",
            )

    def _header(self, file: StateFile) -> Generator[Span, None, dict[str, StoredTensor]]:
        opening = yield from self._bytes(Span(file.path, 0, min(LENGTH_BYTES, file.size_bytes)))
        length = header_bytes(file.path, file.size_bytes, opening)
        header = yield from self._bytes(Span(file.path, LENGTH_BYTES, LENGTH_BYTES + length))
        return parse_header(file.path, file.size_bytes, header)

    def _bytes(self, span: Span) -> Generator[Span, None, bytes]:
        held = bytearray()
        yield from self._pass(span, held.extend)
        return bytes(held)

    def _pass(self, span: Span, sink: Callable[[bytes], object]) -> Generator[Span, None, None]:
        """Pass the bytes of a span on to `sink`."""
        before = self.read_bytes
        self._sink = sink
        if span.stop > span.start:
            yield span
        if self.read_bytes - before != span.stop - span.start:
            raise InvalidModel(f"{span.path} ended before byte {span.stop}: it changed while it was read")


def read_initial(spec: JobSpec, stage: int) -> InitialState | None:
    """The starting state of a stage of a new job, by the spec alone: a local folder, the hub, or None (random)."""
    if not spec.model.id or spec.model.init == "random":
        return None
    return read_files(spec, stage, weight_files(spec) or hub_files(spec, wanted_names(spec, stage)))


def read_files(spec: JobSpec, stage: int, files: Sequence[WeightFile], version: int = 0) -> InitialState:
    """The starting state of a stage from local files."""
    located = {file.path: file.location for file in files}
    reading = StateReading(spec, stage, [StateFile(file.path, file.size_bytes, "") for file in files], version)
    for span in reading.spans():
        for chunk in read_span(located[span.path], span.start, span.stop):
            reading.feed(chunk)
    return reading.state()


def read_span(path: Path, start: int, stop: int) -> Iterator[bytes]:
    """Bytes [start, stop) of a file in chunks; fewer if it is shorter. InvalidModel if it cannot be read."""
    try:
        with open_own(path) as file:
            file.seek(start)
            while start < stop and (chunk := file.read(min(READ_BYTES, stop - start))):
                start += len(chunk)
                yield chunk
    except OSError as error:
        raise InvalidModel(f"{path} cannot be read: {error.strerror or error}") from error


def files_of(
    spec: JobSpec, stage: int, state: InitialState, *, optimizer: bool, island: int = 0
) -> Iterator[tuple[str, Pieces]]:
    """Path and bytes of every file that this stage writes, one after the other: they are made when they are asked for.

    Files without a tensor (an optimizer without state, staleness 0) are left out. The first island writes the files
    that all islands share.
    """
    assert spec.pipeline.split != "auto", "resolve the spec first"
    if not island:
        yield f"model/{shard_name(stage, len(spec.pipeline.split))}", weights_file(state)
    if not optimizer:
        return
    files: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name in state.weights:
        part = part_file(spec, name)
        kept = files[f"{island_folder(island, OPTIMIZER_FOLDER)}/{part}"]
        kept |= {f"{name}{STATE_MARK}{key}": tensor for key, tensor in state.optimizer.get(name, {}).items()}
        if name in state.previous:
            kept[f"{name}{STATE_MARK}{PREVIOUS}"] = state.previous[name]
        if name in state.momentum and not island:
            files[f"{OUTER_FOLDER}/{part}"][f"{name}{STATE_MARK}{MOMENTUM}"] = state.momentum[name]
        if name in state.trained:
            own = f"{island_folder(island, WEIGHTS_FOLDER)}/{part}"
            files[own][f"{name}{STATE_MARK}{TRAINED}"] = state.trained[name]
    for path, tensors in sorted(files.items()):
        if tensors:
            yield path, _file(tensors)


def parameter_hashes(state: InitialState) -> tuple[ParameterHash, ...]:
    """sha256 of each weight's bytes, in order of name."""
    return tuple(
        ParameterHash(name, "float32", tuple(tensor.shape), hashlib.sha256(raw_bytes(tensor)).hexdigest())
        for name, tensor in sorted(state.weights.items())
    )


def weights_file(state: InitialState) -> Pieces:
    """The weights as a safetensors file, float32, Hugging Face names."""
    return _file(state.weights)


def _file(tensors: Mapping[str, Tensor]) -> Pieces:
    """A safetensors file of float32 tensors, byte for byte as the library makes it, but without a copy of them."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    contents, end = [], 0
    for name, tensor in sorted(tensors.items()):
        assert tensor.dtype == torch.float32, name
        contents.append(raw_bytes(tensor))
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return Pieces(len(text).to_bytes(LENGTH_BYTES, "little"), text, *contents)


def wanted_names(spec: JobSpec, stage: int) -> frozenset[str]:
    """The names under which files may hold the tensors of a stage: the parameters', with and without the trunk."""
    family = FAMILIES[spec.model.family]
    names = set(parameter_shapes(spec, stage))
    names |= {name.removeprefix(f"{family.trunk}.") for name in names}
    has_head = HEAD in names or (spec.tied and family.embedding_name in names)
    return frozenset(names | {HEAD, family.head_in_files} if has_head else names)


def part_file(spec: JobSpec, name: str) -> str:
    """The name of the files of a checkpoint that hold state of a parameter (a tied head: of the embedding)."""
    match place_of(spec, name):
        case Part.EMBEDDING:
            return "embed.safetensors"
        case Part.HEAD:
            return "head.safetensors"
        case layer:
            return f"layer-{layer:04d}.safetensors"


def place_of(spec: JobSpec, name: str) -> int | Part:
    """Where in the model a parameter lies: the index of its decoder layer, or the part before or behind the layers."""
    family = FAMILIES[spec.model.family]
    layer = re.match(rf"{re.escape(family.trunk)}\.{re.escape(family.layers)}\.(\d+)\.", name)
    if layer is not None:
        return int(layer.group(1))
    behind = name == HEAD or name.startswith(f"{family.trunk}.{family.final_norm}.")
    return Part.HEAD if behind else Part.EMBEDDING


def _in_folder(files: Sequence[StateFile], folder: str) -> dict[str, StateFile]:
    """The files of a folder, by the path that they have in a checkpoint of one island."""
    return {path: file for file in files if (path := without_island(file.path)).startswith(f"{folder}/")}


def _is_tensors(file: StateFile) -> bool:
    return file.path.endswith(".safetensors")


def _nowhere(_chunk: bytes) -> None:
    raise AssertionError("bytes were fed that no span asked for")


def _check(stored: StoredTensor, shape: tuple[int, ...]) -> None:
    if stored.shape != shape:
        raise InvalidModel(
            f"tensor {stored.name} of {stored.path} has shape {list(stored.shape)}, this model needs {list(shape)}",
            hint=OTHER_MODEL,
        )


def _merged(wanted: Mapping[str, StoredTensor]) -> Iterator[tuple[Span, dict[str, StoredTensor]]]:
    """The fewest spans that cover exactly these bytes."""
    in_order = sorted(wanted.items(), key=lambda item: (item[1].path, item[1].start))
    for path, items in groupby(in_order, key=lambda item: item[1].path):
        group: dict[str, StoredTensor] = {}
        start = stop = -1
        for name, stored in items:
            if group and stored.start != stop:
                yield Span(path, start, stop), group
                group = {}
            start = start if group else stored.start
            group[name] = stored
            stop = stored.stop
        yield Span(path, start, stop), group


def raw_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes, without a copy where it lies on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


class _Filler:
    """Cuts the bytes of a file, from `position` on, into tensors; those between are skipped."""

    def __init__(self, position: int, tensors: Mapping[str, StoredTensor], out: dict[str, Tensor]) -> None:
        self._position = position
        self._pending = sorted(tensors.items(), key=lambda item: item[1].start, reverse=True)
        self._raw = bytearray()
        self._out = out

    def feed(self, chunk: bytes) -> None:
        end = self._position + len(chunk)
        view = memoryview(chunk)
        while self._pending and self._pending[-1][1].start < end:
            name, stored = self._pending[-1]
            if not self._raw:
                self._raw = bytearray(stored.stop - stored.start)
            first, last = max(self._position, stored.start), min(end, stored.stop)
            self._raw[first - stored.start : last - stored.start] = view[first - self._position : last - self._position]
            if last < stored.stop:
                break
            self._out[name] = torch.frombuffer(self._raw, dtype=_DTYPES[stored.dtype]).reshape(stored.shape).float()
            self._pending.pop()
            self._raw = bytearray()
        self._position = end
