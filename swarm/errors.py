"""The error tree: the class says what the caller can do, the attributes hold the facts, the text names the next move.

Every error that can reach a person has a stable code, a message, a hint and the exit code of the command that meets it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

INTERRUPTED = 130  # the exit code of a command that Ctrl-C ended, as shells have it
BUG_HINT = "this is a bug of swarm: report it"
_PACKAGES = ("client", "scheduler", "stage_server", "swarm")


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


def unforeseen(error: BaseException, doing: str = "") -> SwarmError:
    """An error of the swarm for an unforeseen exception: its type, its message and its place in our code."""
    at, part = "", error.__traceback__
    while part is not None:
        module = str(part.tb_frame.f_globals.get("__name__"))
        if module.partition(".")[0] in _PACKAGES:
            at = f", at {module}:{part.tb_lineno}"
        part = part.tb_next
    named = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    where = f"{doing}: " if doing else ""
    return SwarmError(f"{where}unexpected error: {named}{at}", hint=BUG_HINT)


class UsageError(SwarmError):
    """The command line is wrong; nothing was done."""

    code = "E0200"
    exit_code = 2


class InvalidConfig(SwarmError):
    """A job file or a setting is wrong; nothing was done."""

    code = "E0300"
    exit_code = 3


class NoHome(InvalidConfig):
    """The user has no home folder, or none that can be written, and nothing names another place."""

    code = "E0304"


class InvalidData(InvalidConfig):
    """The training data is missing, unreadable, too short or does not fit the model."""

    code = "E0301"


class InvalidModel(InvalidConfig):
    """The files of a model or checkpoint are missing, broken, or of another architecture."""

    code = "E0302"


class BadTranscript(InvalidConfig):
    """A file is no transcript of a job's brain, or a damaged one."""

    code = "E0303"


class NotCached(InvalidModel):
    """The local cache lacks the file, and the hub cannot be asked."""


class SchedulerUnreachable(SwarmError):
    """No scheduler answers at the address."""

    code = "E0400"
    exit_code = 4


class NotAdmitted(SwarmError):
    """The caller has not proved its identity."""

    code = "E0500"
    exit_code = 5


class BadToken(NotAdmitted):
    """A join token that is unknown, used up or too old, or not for this."""

    code = "E0501"


class WrongSwarm(NotAdmitted):
    """Somebody else answers at the address: not the swarm that the token or the certificate is of."""

    code = "E0502"


class RoleForbids(NotAdmitted):
    """The caller is known, and its role does not allow the call."""

    code = "E0503"


class Revoked(NotAdmitted):
    """The caller was a member, and is none any more."""

    code = "E0504"


class CertificateEnded(NotAdmitted):
    """The certificate has ended, and the scheduler does not renew it: its holder was away for too long."""

    code = "E0505"


class ClocksDiffer(NotAdmitted):
    """By the checking machine's clock, a certificate is not good yet, or no longer."""

    code = "E0506"


class AnotherAnswers(NotAdmitted):
    """A member of the swarm answers at the address, but not the one that was meant."""

    code = "E0507"


class NoPass(NotAdmitted):
    """A stage server has no pass for the job and stage of the one that it dials, or its pass has ended."""

    code = "E0508"


class NotOwner(NotAdmitted):
    """The caller may see the job, but another person submitted it."""

    code = "E0509"


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


class QuotaReached(NotAllowed):
    """A person has as much as one person may have."""

    code = "E1001"


class Crowded(NotAllowed):
    """As many do the same as may at a time; the next one may in a moment."""

    code = "E1002"


class JobFailed(SwarmError):
    """The job ended without success; the message names the stage or peer and why."""

    code = "E0100"


class JobEnded(JobFailed):
    """A followed job ended without success; `job_code` is the code that the scheduler gave."""

    def __init__(self, message: str, *, hint: str = "", job_code: str = "") -> None:
        super().__init__(message, hint=hint)
        self.job_code = job_code


class JobDidNotFit(JobEnded):
    """A followed job ended because a device had no memory left."""

    exit_code = OutOfMemory.exit_code


class NoProgress(SwarmError):
    """No step was committed for limits.no_progress_s."""

    code = "E0101"


class ProcessEnded(SwarmError):
    """A process of the swarm on this machine ended by itself."""

    code = "E0110"


# Between processes -----------------------------------------------------------------------------------------------


class RetryElsewhere(SwarmError):
    """This peer cannot do it; another replica of the same stage may."""

    code = "E1100"


class PeerUnavailable(RetryElsewhere):
    """The peer did not answer, or the connection to it broke."""

    code = "E1101"


class RelaySilent(PeerUnavailable):
    """The relay itself does not answer; it never leaves the process that dialled."""


class NoWay(PeerUnavailable):
    """No relay carries to the peer; the peer itself may be well."""

    code = "E1102"


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


class RoundBroken(SwarmError):
    """A member could not be reached, or did not deliver its slices in time: `accused`.

    `lacks_relay`: no relay that leads to it answers.
    """

    code = "E1302"

    def __init__(self, message: str, *, accused: str = "", lacks_relay: bool = False, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.accused = accused
        self.lacks_relay = lacks_relay


# What is stored ------------------------------------------------------------------------------------------------------


class DatabaseUnavailable(SwarmError):
    """The database could not be read, or refused a write, of which then nothing was committed."""

    code = "E1400"


class Fenced(SwarmError):
    """A newer scheduler has taken over this database; this one must stop."""

    code = "E1401"


class DatabaseRejected(SwarmError):
    """The database refuses the write itself; repeating it will not help."""

    code = "E1402"


class CheckpointFailed(SwarmError):
    """A checkpoint could not be written; earlier ones are untouched.

    `reason`: disk_full, storage, peer, timeout, internal.
    """

    code = "E1500"

    def __init__(self, message: str, *, hint: str = "", reason: str = "storage") -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class StorageError(SwarmError):
    """A file of a checkpoint could not be written, read or removed; `reason` is "disk_full" or "storage"."""

    code = "E1501"

    def __init__(self, message: str, *, hint: str = "", reason: str = "storage") -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class CheckpointDamaged(SwarmError):
    """A checkpoint is not what its manifest says, or has none that can be used."""

    code = "E1502"


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The plain exceptions in an exception, depth first: itself, or the members of a group."""
    if isinstance(error, BaseExceptionGroup):
        for child in error.exceptions:
            yield from leaves(child)
    else:
        yield error


def _family(error: type[SwarmError]) -> Iterator[type[SwarmError]]:
    yield error
    for child in error.__subclasses__():
        yield from _family(child)


# A class without a code of its own (JobEnded) has its base's and is not looked up by it.
ERROR_BY_CODE = {error.code: error for error in _family(SwarmError) if "code" in vars(error)}
