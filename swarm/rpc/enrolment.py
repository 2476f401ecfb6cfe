"""How a stage server or a relay comes by its certificate, and keeps it young.

--join LINE       a token that an admin gave out         kept in DATA/pki: afterwards no flag is needed
this machine      the local admin of a scheduler here    the admin's profile vouches: no flag is needed
DATA/pki          what was got before                    renewed while the process lives, and after an absence
"""

from __future__ import annotations

import asyncio
import json
import platform
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import SystemRandom

from swarm.errors import (
    BadToken,
    Crowded,
    InvalidConfig,
    NotAdmitted,
    RetryElsewhere,
    Revoked,
    SchedulerUnreachable,
    SwarmError,
    WrongSwarm,
)
from swarm.pki.files import read_private, write_private
from swarm.pki.identity import Application, Identity, Wallet
from swarm.pki.joining import JOINS_FILE, join, renew_ended
from swarm.pki.names import Role, verb_of
from swarm.pki.profiles import find_profile
from swarm.pki.tokens import JoinLine
from swarm.process.logs import Logger
from swarm.rpc.members import renewed, vouched
from swarm.text import duration, is_loopback

LOOK_S = 30.0  # how often the certificate's age is looked at
LOOK_S_MIN = 0.2
CALL_S_MAX = 10.0
POLL_S = 0.2
FIRST_DIAL_PAUSE_S = 1.0
PROFILE_LOOKS_MAX = 100  # a scheduler that starts on this machine listens before its profile is written


class Enrolment:
    """The identity of `name`, in `folder` and in `wallet`."""

    def __init__(
        self,
        name: str,
        folder: Path,
        wallet: Wallet,
        log: Logger,
        wall_s: Callable[[], float] = time.time,
        role: Role = Role.STAGE_SERVER,
    ) -> None:
        self._role = role
        self._words = role.replace("-", " ")
        self._name = name
        self._folder = folder
        self._wallet = wallet
        self._log = log
        self._wall_s = wall_s
        self._scheduler = ""
        stored = Identity.load(folder)
        if stored is not None and self._is_ours(stored):
            wallet.identity = stored

    @property
    def scheduler(self) -> str:
        """The address that came with the token; "" if none did."""
        try:
            return (self._folder / "scheduler").read_text().strip()
        except OSError:
            return ""

    async def join(self, line: JoinLine) -> None:
        """Join with a token, unless this was done before. BadToken, WrongSwarm, SchedulerUnreachable.

        A revoked member still has a certificate that looks good, and comes back with a newer token. The line may name
        an authority of before. A member that was away until its certificate ended may start with its old line: if the
        token is used up, `admit` asks for a younger certificate.
        """
        held = self._wallet.identity
        has_ended = held is not None and self._wall_s() >= held.ends_unix_s
        used = self._folder / "token"
        if held is not None and not has_ended and used.exists() and used.read_text() == line.id:
            return
        # Kept until it has its certificate: a token takes the same key again if the answer was lost.
        kept = self._folder / "joining.pem"
        application = Application(self._name, read_private(kept) if kept.exists() else b"")
        write_private(kept, application.key_pem)
        try:
            joined = await asyncio.to_thread(
                join, line, self._name, application, self._wall_s, verb=verb_of(self._role)
            )
        except (BadToken, WrongSwarm) as error:
            # A swarm that proved to be the line's, and is not the one of the certificate, is meant.
            if held is None or (isinstance(error, BadToken) and line.pin != held.pin):
                raise
            self._log.warning("the token was not needed, or is none", reason=error.message)
            return
        if not self._is_ours(joined.identity):
            raise NotAdmitted(
                f"the token is for {joined.identity.principal}, not for {self._words} {self._name}",
                hint=f"it needs: swarm token create --role {self._role}",
            )
        await self._keep(joined.identity)
        write_private(self._folder / "scheduler", joined.scheduler.encode())
        write_private(self._folder / JOINS_FILE, line.address.encode())
        write_private(used, line.id.encode())
        kept.unlink()
        self._log.info("joined", peer=self._name, scheduler=joined.scheduler, cluster=joined.identity.cluster)

    async def admit(self, scheduler: str) -> None:
        """Get a certificate that the scheduler at this address accepts.

        NotAdmitted if no profile or token vouches for this process, and if the scheduler does not renew a certificate
        that has ended; SchedulerUnreachable if the scheduler does not answer.
        """
        self._scheduler = scheduler
        held, admin = self._wallet.identity, self._profile(scheduler)
        ended: Identity | None = None
        if held is not None and self._wall_s() >= held.ends_unix_s:
            held, ended = None, held
        if held is not None and (admin is None or admin.cluster == held.cluster):
            return
        if admin is None and ended is not None and await self._came_back(scheduler, ended):
            return
        if admin is None:
            admin = await self._profile_that_comes(scheduler)
        if admin is None:
            if ended is not None:
                ended.check(self._wall_s())
            raise NotAdmitted(
                f"no certificate for the scheduler at {scheduler}",
                hint=f"join first: swarm {self._role} --join LINE; an admin prints LINE with: "
                f"swarm token create --role {self._role}",
            )
        try:
            identity = await asyncio.to_thread(vouched, scheduler, admin, self._role, self._name, CALL_S_MAX)
        except SwarmError as error:
            if held is not None:
                return  # the profile is of another swarm that was at this address, or nobody answers at all
            if isinstance(error, NotAdmitted):
                raise
            raise SchedulerUnreachable(f"the scheduler at {scheduler} gave no certificate: {error}") from error
        await self._keep(identity)
        self._log.info("the local admin vouched", peer=self._name, scheduler=scheduler, cluster=identity.cluster)

    async def _came_back(self, scheduler: str, ended: Identity) -> bool:
        """Whether the scheduler gave a younger certificate in the place of the one that has ended.

        SchedulerUnreachable also if it may give one a moment later: who waits for a scheduler waits for that too. False
        only on the scheduler's own machine, where an admin's profile may vouch a moment later.
        """
        away = duration(self._wall_s() - ended.ends_unix_s)
        self._log.info("asking for a new certificate", reason=f"{ended.principal}: the last one ended {away} ago")
        try:
            identity = await asyncio.to_thread(renew_ended, scheduler, self._folder, ended, self._wall_s)
        except (Crowded, RetryElsewhere) as error:
            told = f"the scheduler at {scheduler} gave no certificate yet: {error.message}"
            raise SchedulerUnreachable(told, hint=error.hint) from error
        except SwarmError as error:
            if isinstance(error, Revoked) or not is_loopback(scheduler.rpartition(":")[0]):
                raise
            self._log.warning("certificate not renewed", reason=error.message)
            return False
        await self._keep(identity)
        self._log.info("certificate renewed", peer=self._name, scheduler=scheduler)
        return True

    def _profile(self, scheduler: str) -> Identity | None:
        """The profile of an admin of this machine whose word counts now; one that cannot be read is none."""
        try:
            found = find_profile(scheduler)
        except InvalidConfig as error:
            self._log.warning("a profile cannot be used", reason=str(error))
            return None
        if found is None or found.principal.role is not Role.ADMIN or self._wall_s() >= found.ends_unix_s:
            return None
        return found

    async def renew(self) -> None:
        """Renew the certificate in time, for ever. Revoked ends the process."""
        pause_s = 0.0
        while True:
            held = self._wallet.identity
            due_s = 0.0 if held is None else held.renews_unix_s - self._wall_s()
            await asyncio.sleep(max(pause_s, min(LOOK_S, max(LOOK_S_MIN, due_s))))
            pause_s = 0.0
            held = self._wallet.identity
            if held is None or not self._wallet.is_due or not self._scheduler:
                continue
            try:
                if self._wall_s() >= held.ends_unix_s:  # too late, unless the local admin vouches once more
                    await self.admit(self._scheduler)
                else:
                    await self._keep(await asyncio.to_thread(renewed, self._scheduler, held, CALL_S_MAX))
                    self._log.info("certificate renewed", peer=self._name)
                pause_s = held.life_s / 10  # also where the clocks differ by more than a certificate's life
            except Revoked:
                raise
            except SwarmError as error:
                pause_s = min(LOOK_S, held.life_s / 10)
                self._log.warning("certificate not renewed yet", reason=error.message)

    async def _profile_that_comes(self, scheduler: str) -> Identity | None:
        """The profile of a scheduler that is just starting here; SchedulerUnreachable if none listens."""
        host, _, port = scheduler.rpartition(":")
        try:
            async with asyncio.timeout(CALL_S_MAX):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
        except (OSError, TimeoutError) as error:
            raise SchedulerUnreachable(f"no scheduler answers at {scheduler}: {error or 'no answer in time'}") from None
        for _ in range(PROFILE_LOOKS_MAX):
            if (found := self._profile(scheduler)) is not None:
                return found
            await asyncio.sleep(POLL_S)
        return None

    async def _keep(self, identity: Identity) -> None:
        self._wallet.identity = identity
        try:
            await asyncio.to_thread(identity.save, self._folder)
        except InvalidConfig as error:
            self._log.error("the certificate is not on disk", reason=error.message)

    def _is_ours(self, identity: Identity) -> bool:
        principal = identity.principal
        if principal.role is self._role and principal.name != self._name:
            raise InvalidConfig(
                f"the certificate in {self._folder} is for {principal}, this {self._words} is {self._name}",
                hint=f"give each {self._words} its own --data-dir",
            )
        return principal.role is self._role


async def once_reached(find: Callable[[], Awaitable[str]], log: Logger) -> str:
    """What `find` returns once it stops raising SchedulerUnreachable; its other errors."""
    while True:
        try:
            return await find()
        except SchedulerUnreachable as error:
            log.warning("scheduler not reached", reason=error.message)
            await asyncio.sleep(FIRST_DIAL_PAUSE_S)


def tell_host(log: Logger, host: str) -> None:
    """Log where a process listens that no flag placed."""
    log.info("listens at this machine's address on the way to the scheduler", host=host, otherwise="--listen HOST:PORT")


def own_name(data_dir: Path) -> str:
    """The name of the process that keeps its data there: made at the first start. InvalidConfig."""
    path = data_dir / "peer.json"
    try:
        if path.exists():
            name = json.loads(path.read_text())["peer"]
            if isinstance(name, str) and re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", name):
                return name
        host = re.sub(r"[^a-z0-9]+", "-", platform.node().lower()).strip("-")[:40] or "peer"
        name = f"{host}-{SystemRandom().randbytes(3).hex()}"
        path.write_text(json.dumps({"peer": name}) + "\n")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidConfig(
            f"{path} cannot be used: {error}", hint="give another --data-dir, or delete the file for a new identity"
        ) from error
    return name
