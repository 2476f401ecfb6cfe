"""The error tree: a class says what the caller can do, its attributes hold the facts, its text names the next move.

Every error that can reach a person has a stable code, a message, a hint and the exit code of the command that meets it.
"""

from __future__ import annotations

from typing import ClassVar


class SwarmError(Exception):
    """An error with a cause that a person can read and, where there is one, a next move."""

    code: str = "E0000"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(SwarmError):
    """The command line is wrong; nothing was done."""

    code = "E0200"
    exit_code = 2


class InvalidConfig(SwarmError):
    """A job file or a setting is wrong; nothing was done."""

    code = "E0300"
    exit_code = 3


class InvalidData(InvalidConfig):
    """The training data is missing, unreadable, too short or does not fit the model."""

    code = "E0301"


class InvalidModel(InvalidConfig):
    """The files of a model or checkpoint are missing, broken, or not those of the architecture."""

    code = "E0302"


class SchedulerUnreachable(SwarmError):
    """No scheduler answers at the address."""

    code = "E0400"
    exit_code = 4


class IncompatibleVersion(SwarmError):
    """The two sides speak different protocol versions."""

    code = "E0600"
    exit_code = 6


class NotFound(SwarmError):
    """The job, peer or checkpoint does not exist."""

    code = "E0700"
    exit_code = 7


class DeadlinePassed(SwarmError):
    """The other side did not answer in time."""

    code = "E0800"
    exit_code = 8


class OutOfMemory(SwarmError):
    """The model or a microbatch does not fit the device."""

    code = "E0900"
    exit_code = 9


class NotAllowed(SwarmError):
    """The action is not allowed in the present state."""

    code = "E1000"
    exit_code = 10


class JobFailed(SwarmError):
    """The job ended without success; the message names the stage or peer and why."""

    code = "E0100"
    exit_code = 1


# Between processes -----------------------------------------------------------------------------------------------


class RetryElsewhere(SwarmError):
    """This peer cannot do it; another replica of the same stage may."""

    code = "E1100"


class PeerUnavailable(RetryElsewhere):
    """The peer did not answer, or the connection to it broke."""

    code = "E1101"


class Refused(SwarmError):
    """The message contradicts what the receiver knows; repeating it unchanged will not help."""

    code = "E1200"


class StaleMessage(Refused):
    """The message belongs to an older epoch, incarnation, timeline, attempt or round."""

    code = "E1201"


class CorruptFrame(Refused):
    """The bytes do not match their checksum, header or schema; the sender may send them again."""

    code = "E1202"


class SetMismatch(Refused):
    """A replica's accumulated set is not the one that the ledger expects."""

    code = "E1203"


class ReplicaDiverged(SwarmError):
    """Two replicas of one stage hold different weights after the same commit; training must not go on."""

    code = "E1300"


class GradientRange(SwarmError):
    """A gradient contribution is not finite or leaves the fixed-point range."""

    code = "E1301"


ERROR_BY_CODE: dict[str, type[SwarmError]] = {}


def _register(error: type[SwarmError]) -> None:
    ERROR_BY_CODE[error.code] = error
    for child in error.__subclasses__():
        _register(child)


_register(SwarmError)
