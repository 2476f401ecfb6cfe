"""Ten situations that teach what a job's brain does: stories.txt plays them, tests/transcripts has each as it went.

`python -m tests.support.stories` writes the transcripts anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from scheduler.brain.replay import replay
from scheduler.brain.transcript import Transcript
from tests.support.brain import Player
from tests.support.situations import Situation, beside

FOLDER = Path(__file__).parent.parent / "transcripts"
STORIES = {story.title: story for story in beside(__file__)}


def recorded(title: str) -> list[str]:
    """The lines of the story's transcript."""
    player = Player()
    STORIES[title].run(player.play)
    lines: list[str] = player.swarm.transcript
    return lines


def path_of(story: Situation) -> Path:
    return FOLDER / f"{story.title.replace(' ', '_')}.txt"


def text_of(story: Situation) -> str:
    """What the story teaches, then each input with what the brain decides, out of its transcript."""
    transcript = Transcript(recorded(story.title))

    def lines() -> Iterator[str]:
        yield f"{story.text.partition(chr(10))[0].removeprefix('# ')}\n"
        for step in replay(transcript, transcript.brain()):
            assert step.is_same
            yield from step.lines()

    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for told in STORIES.values():
        path_of(told).write_text(text_of(told), encoding="utf-8")
