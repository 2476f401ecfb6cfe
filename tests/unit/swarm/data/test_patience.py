"""swarm.data.patience: what takes long is said, and a second Ctrl-C ends it at once."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarm.data import patience as module
from swarm.data.corpus import Corpus, open_corpus, tokenise
from swarm.data.patience import patience
from swarm.data.tokenizer import ByteTokenizer, Ids
from swarm.errors import INTERRUPTED
from tests.support.texts import job
from tests.support.tokenizer import write_tokenizer

# Four million ways to read the next letters, at each of a hundred thousand letters: it takes hours.
ENDLESS = {"type": "Split", "pattern": {"Regex": r"(?:a|a){22}\d"}, "behavior": "Isolated", "invert": False}
SUBMIT = """
import sys
from swarm.data import patience
patience.PIECE_S = patience.HEARD_S = 0.2
from swarm.data.corpus import tokenise
from swarm.job.spec import parse_job
from swarm.process.temporary import temporary_folder
with temporary_folder("swarm-tokens-") as folder:
    model = {"config": {"num_hidden_layers": 1}, "tokenizer": sys.argv[2]}
    data = {"source": sys.argv[1], "sequence_length": 8}
    tokenise(parse_job({"name": "t", "model": model, "data": data}), folder)
"""


def test_a_second_ctrl_c_ends_rules_that_never_end(tmp_path: Path) -> None:
    """Python hears Ctrl-C when the library is back, which may be never."""
    folder = write_tokenizer(tmp_path / "endless")
    rules = json.loads((folder / "tokenizer.json").read_text()) | {"pre_tokenizer": ENDLESS}
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"text": "a" * 100_000}) + "\n" + json.dumps({"text": "b"}) + "\n")
    command = [sys.executable, "-c", SUBMIT, str(source), str(folder)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True) as process:
        try:
            assert process.stderr is not None
            late = process.stderr.readline()
            assert f"{source}, line 1 to 2: " in late
            assert late.endswith("s so far; Ctrl-C twice ends it at once\n")
            process.send_signal(signal.SIGINT)
            while "Ctrl-C once more ends it at once" not in process.stderr.readline():
                assert process.poll() is None, "the first one waits for the library"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == INTERRUPTED
        finally:
            process.kill()
    assert [path.name for path in tmp_path.glob("swarm-tokens-*/*")], "what the next process removes"


class Slow(ByteTokenizer):
    """Its rules take until a minute has been waited for."""

    def __init__(self, waited: Callable[[], object]) -> None:
        self._waited = waited

    def encode_batch(self, texts: Any) -> list[Ids]:
        self._waited()
        return super().encode_batch(texts)


def test_rules_that_take_a_minute_are_waited_for_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "a.txt"
    source.write_text("some text of a few words")
    spec = job(source, tokenizer="byte")
    plain = tokenise(spec, tmp_path / "out")
    now_s, said = [0.0], threading.Event()
    monkeypatch.setattr(module, "monotonic", lambda: now_s[0])
    speak = module.Patience._speak

    def spoken(waiting: module.Patience) -> None:
        is_late = now_s[0] > module.PIECE_S
        speak(waiting)
        if is_late:
            said.set()

    def minutes() -> None:
        now_s[0] += 121.0
        assert said.wait(60)

    monkeypatch.setattr(module.Patience, "_speak", spoken)
    monkeypatch.setattr(select, "select", lambda read, write, other, wait_s: _soon(read))
    slow = tokenise(spec, tmp_path / "out", None, Corpus(open_corpus(spec).sources, Slow(minutes)))
    assert slow == plain
    assert f"{source}, byte 0: 121 s so far; Ctrl-C twice ends it at once\n" in capsys.readouterr().err


_select = select.select


def _soon(read: Any) -> Any:
    """As if the time to wait had passed."""
    return _select(read, [], [], 0.01)


def test_work_that_begins_anew_in_time_is_silent(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "PIECE_S", 5.0)
    with patience() as waiting:
        for _ in range(3):
            waiting.begin(lambda: "a piece")
            waiting._speak()
    assert capsys.readouterr().err == ""


def test_the_first_ctrl_c_is_an_interrupt_and_handlers_of_others_are_left_alone() -> None:
    with pytest.raises(KeyboardInterrupt), patience():
        signal.raise_signal(signal.SIGINT)
    assert signal.set_wakeup_fd(-1) == -1
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with patience():
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
