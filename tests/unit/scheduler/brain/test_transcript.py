"""A recorded brain decides the same again; a file that is no transcript gets an error that says where and why."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from scheduler.brain.inputs import Happened, ReplicaRecord, Start, Tick
from scheduler.brain.replay import replay
from scheduler.brain.transcript import Transcript, ended
from swarm.errors import BadTranscript
from swarm.types import EvaluationBatch
from swarm.wire.messages import Accumulated, Evaluated, Route
from tests.support.brain import A, Swarm
from tests.support.situations import Situation
from tests.support.stories import FOLDER, STORIES, path_of, recorded, text_of


@pytest.mark.parametrize("story", STORIES.values(), ids=str)
def test_the_brain_does_in_each_situation_what_its_text_says(story: Situation) -> None:
    text = text_of(story)
    assert text == path_of(story).read_text(encoding="utf-8"), "if it is meant: python -m tests.support.stories"


def test_each_situation_has_a_text_and_each_text_a_situation() -> None:
    assert set(map(path_of, STORIES.values())) == set(FOLDER.glob("*.txt"))


def test_an_input_is_replayed_at_the_time_at_which_it_came() -> None:
    transcript = Transcript(recorded("a straggler"))
    brain = transcript.brain()
    steps = list(replay(transcript, brain))
    assert [step.recorded.at_s for step in steps][-2:] == [200.0, 200.0]
    assert brain.story(0, 0)[1].startswith(
        "200.000 s stage 0 taken from b: b has had forward of 0.0 at stage 0 for 199 s"
    )
    assert all(step.is_same for step in steps)


def test_a_number_that_json_lacks_is_the_same_when_it_is_read() -> None:
    swarm = Swarm.loaded({A: 0}, microbatches=1)
    ((_, route),) = swarm.pop(Route)
    swarm.hear(A, Accumulated(route.microbatch, 0, 1, False, math.inf, 0.1, 0.2, -math.inf))
    swarm.hear(A, Evaluated(EvaluationBatch(0, 1, 0), 1, math.nan))
    assert all("Infinity" not in line and "NaN" not in line for line in swarm.transcript)
    *_, first, second = Transcript(swarm.transcript)
    assert isinstance(first.happened, Happened)
    assert isinstance(first.happened.event, Accumulated)
    assert (first.happened.event.loss, first.happened.event.wait_s) == (math.inf, -math.inf)
    assert isinstance(second.happened, Happened)
    assert isinstance(second.happened.event, Evaluated)
    assert math.isnan(second.happened.event.loss)


def test_an_input_at_which_the_brain_raised_is_the_last_of_the_transcript() -> None:
    swarm = Swarm({A: 0})
    with pytest.raises(AssertionError, match="cannot turn"):
        swarm.tell(Start((ReplicaRecord(A, 1, "at a", 0),)), 2.0)
    *_, last = Transcript(swarm.transcript)
    assert isinstance(last.happened, Start)
    assert last.digest is None
    transcript = Transcript(swarm.transcript)
    *_, step = replay(transcript, transcript.brain())
    assert step.is_same, "it raises again"
    assert "cannot turn" in step.error


def test_where_recording_stopped_is_known_once_it_is_read() -> None:
    lines = [*recorded("one microbatch")[:3], ended("the file is full"), "no JSON, and not read any more"]
    transcript = Transcript(lines)
    assert [type(line.happened).__name__ for line in transcript] == ["Start", "Happened"]
    assert transcript.ended == "the file is full"


def changed(line: int, change: Callable[[Any], object]) -> list[str]:
    lines = list(recorded("one microbatch"))
    value = json.loads(lines[line])
    lines[line] = json.dumps(change(value) or value)
    return lines


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ([], "line 1: it is no JSON"),
        (["{}"], "line 1: it does not begin"),
        (changed(0, lambda head: head.update(transcript=2)), "line 1: it does not begin"),
        (changed(0, lambda head: head.update(seed="x")), "the seed is no number"),
        (changed(0, lambda head: head.update(seed=7)), "line 1: seed: 7 is no str"),
        (changed(0, lambda head: head["settings"].update(steps="two")), "BrainSettings.steps: 'two' is no int"),
        (changed(0, lambda head: head["settings"].update(routing="any")), "BrainSettings.routing: 'any' is none of"),
        (changed(0, lambda head: head["settings"].pop("split") and None), "BrainSettings lacks split"),
        (changed(0, lambda head: head["settings"].update(more=1)), "BrainSettings has no more"),
        (changed(0, lambda head: head["settings"].update(units=[1])), "is no object"),
        (changed(2, lambda line: line[:3]), "line 3: it is not [at_s, input, answers, digest]"),
        (changed(2, lambda line: [True, *line[1:]]), "line 3: at_s: True is no float"),
        (changed(2, lambda line: [1.0, {"is": "Explode"}, [], None]), "line 3: 'Explode' is not known here"),
        (changed(2, lambda line: [1.0, 5, [], None]), "line 3: 5 is not known here"),
        (changed(2, lambda line: line[1]["event"].update(stage=True)), "Loaded.stage: True is no int"),
        (changed(2, lambda line: line[1]["event"].update(units=3)), "Loaded.units: 3 is no list"),
        (changed(2, lambda line: [*line[:2], [["tokens_of", 1]], None]), "line 3: answers: not 3 values"),
        ([*recorded("one microbatch")[:4], '[1.0, {"is": '], "line 5: it is no JSON"),
        ([*recorded("one microbatch")[:4], "[" * 100_000], "line 5: it is no JSON"),
    ],
)  # fmt: skip
def test_a_damaged_transcript_is_refused_with_the_line_and_the_reason(lines: list[str], fault: str) -> None:
    def read() -> None:
        transcript = Transcript(lines)
        transcript.brain()
        list(transcript)

    with pytest.raises(BadTranscript) as caught:
        read()
    assert fault in caught.value.message


def test_a_brain_that_asks_for_what_the_recorded_one_did_not_is_told_so() -> None:
    lines = [json.dumps([*json.loads(line)[:2], [], ""]) if line.startswith("[") else line
             for line in recorded("one microbatch")]  # fmt: skip
    transcript = Transcript(lines)
    with pytest.raises(BadTranscript, match=r"asks for tokens_of\(0\)"):
        list(replay(transcript, transcript.brain()))


def test_time_alone_is_an_input_too() -> None:
    swarm = Swarm({A: 0})
    swarm.tell(Tick(), 4.5)
    *_, last = Transcript(swarm.transcript)
    assert (last.at_s, last.happened) == (4.5, Tick())
