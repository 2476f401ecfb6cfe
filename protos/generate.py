"""Writes swarm/wire from protos/: what protoc and grpc make of them, and messages.py.

    python protos/generate.py FOLDER

In messages.py each message of session.proto and frame.proto is a frozen dataclass, so that what decides needs no
protobuf; `swarm.rpc.mapping` translates by field name. Its comments are those of the proto file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

PROTOS = Path(__file__).parent
SOURCES = ("session.proto", "frame.proto")
TYPES = {"Microbatch", "EvaluationBatch", "Round", "Hop"}  # swarm.types has them
# Between gRPC and the streams that read and write them; no value of their own.
PROTOBUF_ONLY = {
    *("StoreChunk", "StoreReply", "FetchCall", "FetchChunk", "StateChunk", "Asking"),
    *("Frames", "Frame", "Memory", "Receipts", "Receipt"),
}
NAMED = {  # fields by name
    "job": "JobId",
    "unit": "UnitName",
    **dict.fromkeys(("peer", "sender", "to", "owner", "verifier"), "PeerId"),
    "direction": "Direction",
    "cause": "RoundFault",
}
SCALARS = {
    **dict.fromkeys((FieldDescriptorProto.TYPE_UINT32, FieldDescriptorProto.TYPE_UINT64), "int"),
    FieldDescriptorProto.TYPE_INT32: "int",
    FieldDescriptorProto.TYPE_DOUBLE: "float",
    FieldDescriptorProto.TYPE_BOOL: "bool",
    FieldDescriptorProto.TYPE_STRING: "str",
    FieldDescriptorProto.TYPE_BYTES: "bytes",
}
ZEROS = {"int": "0", "float": "0.0", "bool": "False", "str": '""', "bytes": 'b""', "JobId": 'JobId("")'}
HEAD = '''"""The messages of session.proto and frame.proto as values; written by `make protos`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from swarm.types import '''


def messages(files: list[FileDescriptorProto]) -> str:
    """The text of messages.py."""
    classes, unions = [], []
    for file in files:
        comments = {tuple(location.path): location for location in file.source_code_info.location}
        for number, message in enumerate(file.message_type):
            if message.oneof_decl:
                kinds = "\n    | ".join(_last(part.type_name) for part in message.field if part.HasField("oneof_index"))
                unions.append(f"{message.name}: TypeAlias = (\n    {kinds}\n)\n")
            elif message.name not in TYPES | PROTOBUF_ONLY:
                words = comments[4, number].leading_comments
                fields = [
                    _field(part, _words(comments[4, number, 2, place].trailing_comments))
                    for place, part in enumerate(message.field)
                ]
                classes.append("\n".join(_class(message, words, fields)))
    body = "\n\n\n".join([*classes, "\n".join(unions)])
    names = TYPES | {kind for kind in NAMED.values() if kind in body}
    return HEAD + ", ".join(sorted(names)) + "\n\n\n" + body


def _class(message: DescriptorProto, words: str, fields: list[str]) -> Iterator[str]:
    lines = [line.strip() for line in words.strip().splitlines()]
    assert lines, f"{message.name} has no comment"
    yield "@dataclass(frozen=True, slots=True)"
    yield f"class {message.name}:"
    yield f'    """{lines[0]}' + ('"""' if not lines[1:] else "")
    if lines[1:]:
        yield from (f"    {line}".rstrip() for line in lines[1:])
        yield '    """'
    yield ""
    yield from fields


def _field(part: FieldDescriptorProto, words: str) -> str:
    """The line of a field; `words` may begin with its default."""
    is_message = part.type == FieldDescriptorProto.TYPE_MESSAGE
    kind = _last(part.type_name) if is_message else NAMED.get(part.name, SCALARS.get(part.type, ""))
    is_repeated = part.label == FieldDescriptorProto.LABEL_REPEATED
    line = f"    {part.name}: " + (f"tuple[{kind}, ...]" if is_repeated else kind)
    rule = re.fullmatch(r"default( [^:]+)?(?:: )?(.*)", words)
    value = (rule[1] or "").strip() or ("()" if is_repeated else ZEROS[kind]) if rule else ""
    if kind == "bytes":  # long, and a stamp is no part of what a message says
        given = [f"default={value}"] * bool(value) + ["repr=False"] + ["compare=False"] * (part.name == "stamp")
        value = f"field({', '.join(given)})"
    words = rule[2] if rule else words
    return line + f" = {value}" * bool(value) + f"  # {words}" * bool(words)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _words(comment: str) -> str:
    return " ".join(comment.split())


def main(folder: str) -> int:
    paths = [str(path.relative_to(PROTOS)) for path in sorted(PROTOS.glob("swarm/wire/*.proto"))]
    with TemporaryDirectory() as scratch:
        described = Path(scratch, "set")
        written = [f"--{kind}_out={folder}" for kind in ("python", "grpc_python", "pyi")]
        kept = [f"--descriptor_set_out={described}", "--include_source_info"]
        if code := protoc.main(["protoc", f"-I{PROTOS}", *written, *kept, *paths]):
            return int(code)
        files = FileDescriptorSet.FromString(described.read_bytes()).file
    named = {_last(file.name.replace("/", ".").removesuffix(".proto")): file for file in files}
    text = messages([named[source.removesuffix(".proto")] for source in SOURCES])
    Path(folder, "swarm", "wire", "messages.py").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
