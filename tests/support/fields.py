"""Fields of protobuf messages, as bytes: also such as no message would be written with."""

from __future__ import annotations

from swarm.rpc.links.frames import encode_varint


def field(number: int, content: bytes) -> bytes:
    """A field that has a length: text, bytes or a message."""
    return encode_varint(number << 3 | 2) + encode_varint(len(content)) + content
