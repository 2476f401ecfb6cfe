"""The scheduler as the client sees it: the calls of the Jobs service, with deadlines and errors for people."""

from __future__ import annotations

import json
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from client.records import Checkpoint, Job, Peer, Step, has_date, record
from client.sending import Sending
from client.shell import Shell
from swarm.errors import (
    ERROR_BY_CODE,
    CorruptFrame,
    Crowded,
    IncompatibleVersion,
    NotAdmitted,
    SchedulerUnreachable,
    SwarmError,
    WrongSwarm,
)
from swarm.limits import PLACE_WAIT_S
from swarm.pki.identity import Identity
from swarm.pki.joining import renew_ended
from swarm.pki.names import scheduler_of
from swarm.pki.profiles import find_profile, memberships, profile_folder
from swarm.rpc.channel import connect_sync, translate, with_times
from swarm.rpc.members import renewed
from swarm.text import printable
from swarm.types import PROTOCOL_VERSION
from swarm.wire import jobs_pb2 as pb
from swarm.wire import jobs_pb2_grpc, members_pb2_grpc

# Uploads and streams may take longer than a plain call. Each ends with its connection, and keep-alive notices within
# seconds that a connection is dead.
CHUNK_BYTES = 1 << 20
# A shard may take this long per MiB (64 kbit/s), and never less than the deadline.
SECONDS_PER_MIB = 128.0
# Calls for which the scheduler reads whole checkpoints, or removes files, may take this long.
READING_S_MAX = 3600.0
READING = ("Resume", "Remove", "Collect")  # beside some of Submit and Checkpoints
PROBE_S_MAX = 5.0
REDIAL_S = 0.5
CROWDED_S_MAX = 2 * PLACE_WAIT_S  # that a call waits for a place where it cannot say so
MEMBERSHIPS_TOLD_MAX = 3

Reply = TypeVar("Reply", bound=Message)
T = TypeVar("T")


def printed(reply: Reply) -> Reply:
    """The reply with every text made safe to show: other people chose the names of jobs and stage servers."""
    for field, value in reply.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if field.message_type is not None:
            for part in value if field.is_repeated else (value,):
                printed(part)
        elif field.type == field.TYPE_STRING and field.name != "spec_json":  # JSON, which nobody prints as it is
            if field.is_repeated:
                value[:] = map(printable, value)
            else:
                setattr(reply, field.name, printable(value))
    return reply


def dial(shell: Shell, timeout_s: float = 0.0) -> Scheduler:
    """A connection to the scheduler of the shared flags; a call has `timeout_s`, by default the flags' timeout."""
    return Scheduler(shell.scheduler, timeout_s or shell.timeout_s, identity_for(shell), lambda: identity_for(shell))


def identity_for(shell: Shell) -> Identity | None:
    """The identity that this person shows to the scheduler of the flags; None with --insecure.

    A certificate that is getting old is renewed on the way, also one that has ended while its holder was away. Raises
    SchedulerUnreachable, NotAdmitted, CertificateEnded.
    """
    if shell.insecure:
        return None
    address = shell.scheduler
    identity = find_profile(address)
    if identity is None:
        if not _listens(address):
            raise _nobody(address)
        raise NotAdmitted(
            f"no certificate for the scheduler at {address}",
            hint="join first: swarm login --join LINE, which an admin prints with swarm token create; "
            f"or name another: {_another(address)}; for one that was started with --insecure, add --insecure here too",
        )
    if time.time() >= identity.ends_unix_s:
        identity = _after_absence(address, identity, shell.timeout_s)
    elif time.time() >= identity.renews_unix_s:
        try:
            identity = renewed(address, identity, shell.timeout_s)
            identity.save(profile_folder(address))
        except SwarmError as error:
            shell.say(f"the certificate for {address} was not renewed: {error.message}")
    return identity


def _after_absence(address: str, ended: Identity, timeout_s: float) -> Identity:
    """A certificate in the place of one that has ended; kept.

    Commands that a script starts at the same time ask for one each: who is too many takes what another one got.
    """
    folder, late_s = profile_folder(address), time.monotonic() + timeout_s
    while True:
        try:
            identity = renew_ended(address, folder, ended)
        except SchedulerUnreachable as error:
            if not _listens(address):
                raise _nobody(address) from error
            raise
        except Crowded:
            if time.monotonic() >= late_s:
                raise
            time.sleep(REDIAL_S)
            found = find_profile(address)
            if found is not None and time.time() < found.ends_unix_s:
                return found
        else:
            identity.save(folder)
            return identity


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S_MAX):
            return True
    except OSError:
        return False


def _nobody(address: str) -> SchedulerUnreachable:
    return SchedulerUnreachable(
        f"no scheduler answers at {address}",
        hint=f"start one with: swarm up, or name another: {_another(address)}",
    )


def _another(address: str) -> str:
    """The flag that names another scheduler that this person joined."""
    joined = [other for other in memberships() if other != address]
    return " or ".join(f"--scheduler {other}" for other in joined[:MEMBERSHIPS_TOLD_MAX]) or "--scheduler HOST:PORT"


def _stranger(address: str) -> WrongSwarm:
    return WrongSwarm(
        f"what answers at {address} does not prove that it is the swarm of your certificate",
        hint="if its scheduler was set up anew, join again: swarm login --join LINE; "
        f"yours is in {profile_folder(address)}",
    )


class Scheduler:
    """A connection to the scheduler at `address`; use it as a context manager.

    Every method raises SchedulerUnreachable, DeadlinePassed, or the error that the scheduler answered with.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float,
        identity: Identity | None = None,
        renew: Callable[[], Identity | None] = lambda: None,
    ) -> None:
        """Without an identity it speaks plaintext, which only a scheduler with --insecure answers.

        `renew` gives a younger identity: a job may be followed for longer than a certificate lives.
        """
        self.address = address
        self.timeout_s = timeout_s
        self._renew = renew
        self._dial(identity)

    def _dial(self, identity: Identity | None) -> None:
        self._identity = identity
        server_name = "" if identity is None else scheduler_of(identity.cluster).dns
        self._channel = connect_sync(self.address, identity, server_name)
        # generated code has no types
        self._jobs: Any = jobs_pb2_grpc.JobsStub(self._channel)  # type: ignore[no-untyped-call]
        self._members: Any = members_pb2_grpc.MembersStub(self._channel)  # type: ignore[no-untyped-call]

    def _method(self, name: str) -> Any:
        """A method of Jobs or Members, on a connection whose certificate is young enough."""
        if self._identity is not None and time.time() >= self._identity.renews_unix_s:
            younger = self._renew()
            if younger is not None and younger is not self._identity:
                self._channel.close()
                self._dial(younger)
        return getattr(self._jobs, name, None) or getattr(self._members, name)

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def call(self, method: str, request: Message, timeout_s: float = 0.0) -> Any:
        """The reply of a method of Jobs or Members, safe to show."""
        timeout_s = timeout_s or self.timeout_s
        if method in READING:
            timeout_s = max(timeout_s, READING_S_MAX)
        with self._translated():
            return printed(self._method(method)(request, timeout=timeout_s))

    def _stream(self, method: str, request: Message, timeout_s: float | None = None) -> Iterator[Any]:
        return map(printed, self._method(method)(request, timeout=timeout_s))

    def check_protocol(self) -> pb.VersionReply:
        """The scheduler's version; IncompatibleVersion if it speaks another protocol than this client."""
        reply: pb.VersionReply = self.call("Version", pb.VersionRequest())
        if reply.protocol != PROTOCOL_VERSION:
            raise IncompatibleVersion(
                f"the scheduler at {self.address} ({reply.product}) speaks protocol {reply.protocol}, this client "
                f"{PROTOCOL_VERSION}",
                hint="install the same version of swarm on both sides",
            )
        return reply

    def put_shard(
        self, shard: pb.Shard, payload: Callable[[int], Iterable[bytes]], say: Callable[[str], None] = lambda _: None
    ) -> None:
        """Send one shard; `payload` gives its bytes from a byte on, in chunks of at most 1 MiB.

        It waits while too many are being sent, and `say` hears of that. If the line breaks while bytes arrive, it goes
        on from the byte that has arrived.
        """
        timeout_s = max(self.timeout_s, SECONDS_PER_MIB * shard.size_bytes / CHUNK_BYTES)
        sending = Sending(shard, payload)

        def replies() -> Iterator[pb.PutShardReply]:
            nonlocal sending
            sending = Sending(shard, payload)
            try:
                for reply in self._method("PutShard")(sending.chunks(), timeout=timeout_s):
                    if not reply.sha256:
                        sending.arrived(reply.held_bytes)
                    yield reply
            finally:
                sending.end()

        deque(self._lasting(replies, self.timeout_s, say, counts=lambda _: sending.has_progressed), maxlen=0)

    def job(self, method: str, request: Message, timeout_s: float = 0.0) -> Job:
        """The job that a method of Jobs answers with: Get, Submit, Cancel, Pause, Resume."""
        return record(Job, self.call(method, request, timeout_s))

    def submit(self, request: pb.SubmitRequest) -> Job:
        # From a checkpoint, sent along or of another job: the scheduler reads all of it first.
        reads = bool(request.files) or bool(json.loads(request.spec_json)["checkpoint"]["resume_from"])
        return self.job("Submit", request, max(READING_S_MAX, self.timeout_s) if reads else 0.0)

    def jobs(self, *, all: bool, state: str = "", limit: int) -> tuple[list[Job], list[str]]:
        """Jobs, the newest first, and what keeps the scheduler from its database or its broker."""
        reply: pb.JobList = self.call("List", pb.ListRequest(all=all, state=state, limit=limit))
        return [record(Job, view) for view in reply.jobs], list(reply.troubles)

    def get(self, job: str) -> Job:
        return self.job("Get", pb.JobRequest(job=job))

    def follow(self, job: str, say: Callable[[str], None]) -> Iterator[Job]:
        """The job now and after every change, until it ends, over as many connections as it takes; as `_lasting`."""
        for view in self._lasting(lambda: self._stream("Watch", pb.JobRequest(job=job)), self.timeout_s, say):
            seen = record(Job, view)
            yield seen
            if seen.has_ended:
                return
        raise SchedulerUnreachable(
            f"the scheduler at {self.address} ended the stream", hint=f"look again with: swarm status {job}"
        )

    def _lasting(
        self,
        begin: Callable[[], Iterator[T]],
        patience_s: float = 0.0,
        say: Callable[[str], None] | None = None,
        *,
        counts: Callable[[T], bool] | None = None,
    ) -> Iterator[T]:
        """A stream to its end, over as many calls as it takes; `begin` begins one that goes on behind what has come.

        SchedulerUnreachable once the scheduler has not answered for `patience_s`. With `counts`, only the items that it
        accepts are answers, and a failure before the first answer ends the stream. Where too many call, it waits for a
        place. `say` hears of both waits; without it, Crowded once the wait for a place has taken CROWDED_S_MAX.
        """
        has_come = counts is None
        lost_s: float | None = None
        crowded_s: float | None = None
        while True:
            try:
                with self._translated():
                    for item in begin():
                        crowded_s = None
                        if counts is None or counts(item):
                            has_come, lost_s = True, None
                        yield item
                return
            except Crowded as error:
                now_s = time.monotonic()
                if crowded_s is None and say is not None:
                    say(f"{error.message}; waiting for a place")
                lost_s, crowded_s = None, now_s if crowded_s is None else crowded_s
                if say is None and now_s - crowded_s > CROWDED_S_MAX:
                    raise
            except SchedulerUnreachable:
                now_s = time.monotonic()
                if not (has_come and patience_s):
                    raise
                if lost_s is None:
                    lost_s = now_s
                    if say is not None:
                        say(f"the scheduler does not answer; trying again for {patience_s:g} s")
                if now_s - lost_s > patience_s:
                    raise
            time.sleep(REDIAL_S)

    def checkpoints(self, job: str, *, verify: bool = False) -> list[Checkpoint]:
        """A job's checkpoints, oldest first; with `verify` the scheduler reads them all."""
        request = pb.CheckpointsRequest(job=job, verify=verify)
        reply: pb.CheckpointList = self.call(
            "Checkpoints", request, max(READING_S_MAX, self.timeout_s) if verify else 0.0
        )
        return [record(Checkpoint, view) for view in reply.checkpoints]

    def history(self, job: str, every: int = 0, after: int = 0) -> Iterator[Step]:
        """The committed steps of a job that count, oldest first; with `every` = N only every N-th and the last.

        With `after`, only those behind that step.
        """
        behind = after

        def steps() -> Iterator[Step]:
            nonlocal behind
            for reply in self._stream("History", pb.HistoryRequest(job=job, every=every, after=behind), READING_S_MAX):
                for step in reply.steps:
                    behind = step.step
                    yield record(Step, step)

        return self._lasting(steps)

    def peers(self, *, state: str = "", stage: int = -1) -> list[Peer]:
        reply: pb.PeerList = self.call("Peers", pb.PeersRequest(state=state, stage=stage))
        return [record(Peer, view) for view in reply.peers]

    def drain(self, peer: str, reason: str, timeout_s: float) -> Iterator[pb.DrainView]:
        """Ask a stage server to hand its work over, and report progress until it serves no job."""
        request, ends_s = pb.DrainRequest(peer=peer, reason=reason), time.monotonic() + timeout_s
        return self._lasting(lambda: self._stream("Drain", request, max(0.0, ends_s - time.monotonic())))

    def probe(self, request: pb.ProbeRequest) -> pb.ProbeReply:
        """The scheduler's clock, bytes from it, and whether it can dial this machine."""
        reply: pb.ProbeReply = self.call("Probe", request)
        if not has_date(reply.unix_s):
            raise CorruptFrame(f"the clock of the scheduler at {self.address} shows no time")
        return reply

    def logs(self, request: pb.LogsRequest, say: Callable[[str], None] | None = None) -> Iterator[pb.LogEntry]:
        """The lines of a job's log; if they are followed, each once, over as many connections as it takes."""
        asked, follows = pb.LogsRequest(), request.follow
        asked.CopyFrom(request)

        def entries() -> Iterator[pb.LogEntry]:
            for entry in self._stream("Logs", asked, None if follows else self.timeout_s):
                asked.after = entry.number
                yield entry

        return self._lasting(entries, self.timeout_s if follows else 0.0, say)

    def pull(
        self, job: str, step: str = "latest", say: Callable[[str], None] = lambda _: None
    ) -> Iterator[pb.FileChunk]:
        """The files of a checkpoint's model folder. If the line breaks while they arrive, it goes on from there.

        It waits while too many pull or follow, and `say` hears of that.
        """
        seen, start, arrived_bytes = set[str](), 0, 0

        def chunks() -> Iterator[pb.FileChunk]:
            nonlocal step, start, arrived_bytes
            asked: SimpleQueue[pb.PullRequest | None] = SimpleQueue()
            start, arrived_bytes = start + arrived_bytes, 0
            asked.put(pb.PullRequest(job=job, step=step, start=start))
            try:
                for chunk in self._method("Pull")(iter(asked.get, None)):
                    if chunk.payload:
                        arrived_bytes += len(chunk.payload)
                        asked.put(pb.PullRequest(arrived=arrived_bytes))
                    elif start and chunk.header.path in seen:
                        continue
                    if chunk.HasField("header"):
                        seen.add(chunk.header.path)
                        step = str(chunk.header.step) if chunk.header.step else step
                    yield chunk
            finally:
                asked.put(None)

        return self._lasting(chunks, self.timeout_s, say, counts=lambda chunk: bool(chunk.payload))

    def _why_unreachable(self, found: SwarmError) -> SwarmError:
        was_shut = found.code == SchedulerUnreachable.code and (found.hint or "failed to connect" in found.message)
        if self._identity is None and was_shut and _listens(self.address):
            return NotAdmitted(f"what answers at {self.address} takes no plaintext", hint="leave --insecure out")
        if found.code == WrongSwarm.code:
            return _stranger(self.address)
        kind = ERROR_BY_CODE[found.code]
        return kind(found.message, hint=found.hint) if found.hint else _nobody(self.address)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            found = translate(error, self.address)
            found.message, found.hint = printable(found.message), printable(found.hint)
            if isinstance(found, SchedulerUnreachable):
                found = self._why_unreachable(with_times(found, self.address))
            raise found from error
        except RuntimeError as error:
            # A signal that comes while gRPC takes its lock back hides behind the failure to give it up.
            hidden: BaseException | None = error
            while hidden is not None and not isinstance(hidden, KeyboardInterrupt | SystemExit):
                hidden = hidden.__context__
            if hidden is None:
                raise
            raise hidden from None
