"""`python -m scheduler.brain.replay FILE`: give a brain the inputs of a recorded one.

Prints each input with the decisions, and each difference from the recording. `--story STEP:INDEX` prints the
story of one microbatch instead, `--against FILE` the first input at which another transcript differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import zip_longest
from typing import Any

from scheduler.brain.inputs import Happened, Input, ReplicaRecord
from scheduler.brain.job import JobBrain
from scheduler.brain.outputs import Note, Output, Released, Send
from scheduler.brain.transcript import Recorded, Transcript, digest
from swarm.errors import BadTranscript, SwarmError, UsageError
from swarm.types import EvaluationBatch, Hop, Microbatch, Round
from swarm.wire.messages import Member, ParameterHash, ParameterNorm, UnitSize

TEXT_CHARACTERS_MAX = 200


@dataclass(frozen=True, slots=True)
class ReplayedInput:
    """One recorded input, and the decisions now."""

    recorded: Recorded
    outputs: list[Output]
    error: str = ""  # that the brain raised

    @property
    def is_same(self) -> bool:
        return self.recorded.digest == (None if self.error else digest(self.outputs))

    def lines(self) -> Iterator[str]:
        """The input, and under it the decisions."""
        yield f"{self.recorded.at_s:.3f} s  {spell_input(self.recorded.happened)}"
        yield from (f"    {line}" for line in map(spell_output, self.outputs) if line)
        if self.error:
            yield f"    raises {self.error}"


def replay(transcript: Transcript, brain: JobBrain) -> Iterator[ReplayedInput]:
    """Take the brain through all that is recorded, up to an error."""
    for recorded in transcript:
        try:
            yield ReplayedInput(recorded, brain.step(recorded.happened, recorded.at_s))
        except BadTranscript:
            raise
        except Exception as error:  # a fault of the brain is what a replay is for
            yield ReplayedInput(recorded, [], repr(error))
            return


def tell(transcript: Transcript, say: Callable[[str], object]) -> bool:
    """Say all inputs and outputs; whether all was decided as recorded."""
    steps, others = 0, 0
    for step in replay(transcript, transcript.brain()):
        steps += 1
        for line in step.lines():
            say(line)
        if not step.is_same:
            others += 1
            say(f"    DIFFERS: recorded as {step.recorded.digest}")
    if transcript.ended:
        say(f"the recording ends here: {transcript.ended}")
    say(f"{steps} inputs, {f'{others} decided otherwise' if others else 'all decided as recorded'}")
    return not others


def story(transcript: Transcript, step: int, index: int) -> list[str]:
    """The longest story of a microbatch that the brain gave."""
    brain, found = transcript.brain(), list[str]()
    for _ in replay(transcript, brain):
        now = brain.story(step, index)
        found = now if len(now) >= len(found) else found
    return found


def first_difference(one: Transcript, other: Transcript) -> Iterator[str]:
    """The first input or decision in which two transcripts differ; empty if they do not."""
    pairs = zip_longest(replay(one, one.brain()), replay(other, other.brain()))
    for number, (mine, yours) in enumerate(pairs, start=1):
        if mine is None or yours is None or list(mine.lines()) != list(yours.lines()):
            yield f"input {number}:"
            for name, step in (("-", mine), ("+", yours)):
                yield from (f"{name} {line}" for line in (step.lines() if step else ("(has ended)",)))
            return


def main(arguments: Sequence[str]) -> int:
    """0: as recorded; 1: not so."""
    parser = argparse.ArgumentParser(prog="python -m scheduler.brain.replay", description="Replay a recorded brain.")
    parser.add_argument("file", help="jobs/JOB/brain-*.jsonl in the scheduler's data folder")
    parser.add_argument("--story", metavar="STEP:INDEX", help="tell the story of one microbatch")
    parser.add_argument("--against", metavar="FILE", help="show the first difference to another transcript")
    chosen = parser.parse_args(arguments)
    try:
        with open(chosen.file, encoding="utf-8") as file:
            transcript = Transcript(file)
            if chosen.against:
                with open(chosen.against, encoding="utf-8") as other:
                    differences = list(first_difference(transcript, Transcript(other)))
                print("\n".join(differences or ["no difference"]))
                return int(bool(differences))
            if chosen.story:
                print("\n".join(story(transcript, *_microbatch(chosen.story)) or ["nothing is known of it"]))
                return 0
            return int(not tell(transcript, print))
    except (OSError, UnicodeDecodeError) as error:
        raise BadTranscript(f"{chosen.file}: {error}") from None


def _microbatch(text: str) -> tuple[int, int]:
    step, _, index = text.partition(":")
    if not (step.isdecimal() and index.isdecimal()):
        raise UsageError(f"a microbatch is STEP:INDEX, not {text!r}")
    return int(step), int(index)


# Inputs and outputs as short lines for people -----------------------------------------------------------------------


def spell_input(happened: Input) -> str:
    if isinstance(happened, Happened):
        return f"{happened.peer} says {spell(happened.event)}"
    return spell(happened)


def spell_output(output: Output) -> str:
    """The output in words; empty if another output says the same."""
    match output:
        case Send(peer=peer, command=command):
            return f"to {peer}: {spell(command)}"
        case Note(level=level, message=message):
            return f"{level}: {message}"
        case Released():
            return ""  # Send(Release) came before
    return spell(output)


def spell(value: Any) -> str:
    """A value, without the fields that have their defaults."""
    match value:
        case Microbatch(step=step, index=index):
            return f"{step}.{index}"
        case EvaluationBatch(version=version, index=index):
            return f"v{version}.{index}"
        case Hop(peer=peer, attempt=attempt):
            return f"{peer}#{attempt}" if attempt else str(peer)
        case Round(epoch=epoch, number=number):
            return f"{epoch}.{number}"
        case Member(peer=peer, start=start, stop=stop, group=group):
            return f"{peer}[{start}:{stop}]" + (f" of {group}" if group else "")
        case ReplicaRecord(peer=peer, stage=stage):
            return f"{peer} at stage {stage}"
        case UnitSize(unit=name, elements=number) | ParameterNorm(name=name, squared_norm=number):
            return f"{name}: {number:g}"
        case ParameterHash(name=name):
            return name
        case str():
            return value if len(value) <= TEXT_CHARACTERS_MAX else f"{value[:TEXT_CHARACTERS_MAX]}..."
        case float():
            return f"{value:.6g}"
        case Mapping():
            return f"{{{', '.join(f'{key}: {spell(one)}' for key, one in value.items())}}}"
        case tuple() | list():
            return f"[{' '.join(map(spell, value))}]"
        case set() | frozenset():
            return f"{{{' '.join(map(spell, sorted(value)))}}}"
    if not is_dataclass(value):
        return str(value)
    shown = [field for field in fields(value) if field.name not in ("job", "timeline", "spec_json")]
    given = [(field.name, getattr(value, field.name), field.default) for field in shown]
    named = [f"{name}={spell(held)}" for name, held, default in given if held != default]
    return f"{type(value).__name__}({', '.join(named)})"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SwarmError as error:
        print(f"error {error.code}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(0)  # the reader has seen enough
