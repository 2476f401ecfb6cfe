"""Which checkpoint a model folder is of; tests/integration/test_client.py has real ones."""

from __future__ import annotations

from client.records import Checkpoint
from client.transfer.download import _arrived

LISTED = (
    Checkpoint(step=5, loss=3.0, weights_sha256="aa"),
    Checkpoint(step=5, loss=2.9, weights_sha256="bb"),  # of a later timeline
    Checkpoint(step=10, loss=2.0, weights_sha256="cc"),
)


def test_a_checkpoint_is_known_by_its_weights() -> None:
    assert _arrived(LISTED, "latest", "cc") == LISTED[2]
    assert _arrived(LISTED, "5", "aa") == LISTED[0]
    assert _arrived(LISTED, "5", "bb") == LISTED[1]


def test_of_one_that_is_gone_only_the_step_that_was_named_is_known() -> None:
    for named, step in (("7", 7), ("latest", 0)):
        gone = _arrived(LISTED, named, "dd")
        assert (gone.step, gone.loss == gone.loss) == (step, False)
