"""Whatever the texts: every kind of source gives the same tokens, and the layout follows from the texts alone."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data.batches import TokenData
from swarm.data.documents import find_sources
from swarm.data.shards import write_shards
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.spec import parse_job

LENGTH = 8
# A file of text that holds bytes of 0 is refused as binary.
TEXTS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30), min_size=1, max_size=12
)


def tokens_of(source: Path, out: Path, packing: bool) -> list[int]:
    data = {"source": str(source), "sequence_length": LENGTH, "packing": packing}
    spec = parse_job({"name": "t", "model": {"config": {"num_hidden_layers": 1}}, "data": data})
    manifest = write_shards(spec, out, find_sources(spec.data), ByteTokenizer(), lambda done, total: None)
    row = TokenData.open([shard.path for shard in manifest.shards], manifest.token_dtype)
    return row.read(0, row.tokens).tolist()


@settings(max_examples=40, deadline=None)
@given(TEXTS, st.booleans())
def test_all_sources_give_the_row_that_the_texts_define(texts: list[str], packing: bool) -> None:
    texts.append("enough for a sample")
    expected: list[int] = []
    for text in filter(None, texts):
        expected += [*text.encode(), ByteTokenizer.END_OF_TEXT]
        if not packing:
            expected += [ByteTokenizer.END_OF_TEXT] * (-len(expected) % LENGTH)
    if not packing:
        expected.append(ByteTokenizer.END_OF_TEXT)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = folder / "files"
        files.mkdir()
        for number, text in enumerate(texts):
            (files / f"{number:03d}.txt").write_bytes(text.encode())
        lines = "".join(json.dumps({"text": text}, ensure_ascii=len(text) % 2 == 0) + "\n" for text in texts)
        (folder / "a.jsonl").write_bytes(lines.encode())
        pq.write_table(pa.table({"text": texts}), folder / "a.parquet", row_group_size=3)
        for source in (files / "*.txt", folder / "a.jsonl", folder / "a.parquet"):
            assert tokens_of(source, folder / "out", packing) == expected, source
