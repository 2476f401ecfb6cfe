"""The fragment of the model that a parameter belongs to; the parameters of a fragment are proposed and merged together.

    fragment of layer l: l mod P          P fragments; with one fragment all is in it
    embedding: fragment 0                 norm and head: fragment P - 1

Fragments are strided layers, so that each holds some of the model's depth. They are layers and not stages, because the
bits of a model must not depend on how it is cut.

Source: Streaming DiLoCo (arXiv 2501.18512), section 2.1, strided fragments. Decision: docs/decisions/045.
"""

from __future__ import annotations

import math
from enum import Enum

LAYERS_PER_FRAGMENT = 3  # of "auto", as in the paper


class Part(Enum):
    """The parts of a model outside its decoder layers."""

    EMBEDDING = "embedding"  # with learned positions; a tied weight too
    HEAD = "head"  # with the norm before it


def auto_fragments(layers: int) -> int:
    """How many fragments a model of `layers` decoder layers has if the job file does not say."""
    return math.ceil(layers / LAYERS_PER_FRAGMENT)


def fragment_of(place: int | Part, fragments: int) -> int:
    """The fragment (from 0) of a decoder layer, given by its index, or of another part of the model."""
    match place:
        case Part.EMBEDDING:
            return 0
        case Part.HEAD:
            return fragments - 1
        case layer:
            return layer % fragments
