"""The section [trust] of a job file: how far a job believes what its replicas compute."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from swarm.job.sections.base import Section


class TrustSection(Section):
    """How replicas are checked. By default everybody is believed, and nothing is sent or computed for it."""

    # The share of hops that another replica computes again: 0 = off, about 0.02 on machines of others.
    spot_check: Annotated[float, Field(ge=0, le=1)] = 0.0
    # So many first hops of each replica that another has yet to compute again, all of them: 0 = off.
    newcomer_hops: Annotated[int, Field(ge=0, le=10**6)] = 0
    # Whether a hop is computed again whose output or gradient is much larger or smaller than they usually are.
    norm_band: bool = False
    # The share of steps of which one replica's sum is computed once more by another: 0 = off.
    recount: Annotated[float, Field(ge=0, le=1)] = 0.0
    # Whether other replicas of a stage say by hash what one of them hands over for a checkpoint.
    second_hash: bool = False
    # The share of rounds of averaging of which one slice is reduced once more, by another member: 0 = off.
    second_owner: Annotated[float, Field(ge=0, le=1)] = 0.0

    # Whether fewer than half of a stage's replicas may be of one inviter: of those who joined with one person's tokens.
    inviter_quota: bool = False

    @property
    def hashes_hops(self) -> bool:
        """Whether replicas say by hash what they took and made at each hop."""
        return self.spot_check > 0.0 or self.recount > 0.0 or self.newcomer_hops > 0 or self.norm_band

    def per_inviter(self, min_replicas: int) -> int:
        """How many replicas of a stage may be of one inviter; 0: any number.

        It follows from the least number of replicas, so it is a minority still when others have left.
        """
        return (min_replicas - 1) // 2 if self.inviter_quota else 0

    def check(self, *, reproducible: bool, compresses_slices: bool, min_replicas: int) -> None:
        """ValueError if the job cannot be checked."""
        if self.inviter_quota and not self.per_inviter(min_replicas):
            raise ValueError(
                f"trust.inviter_quota = true leaves no inviter a minority of {min_replicas} replicas: set "
                "limits.min_replicas = 3 or more, or leave trust.inviter_quota out"
            )
        if self.hashes_hops and not reproducible:
            names = ("spot_check", "newcomer_hops", "norm_band", "recount")
            name = next(name for name in names if getattr(self, name))
            value = "true" if name == "norm_band" else f"{getattr(self, name):g}"
            raise ValueError(
                f"trust.{name} = {value} compares results bit for bit, which differ from replica to "
                f"replica without training.reproducible = true: set that, or leave trust.{name} out"
            )
        if self.second_owner and compresses_slices:
            raise ValueError(
                f"trust.second_owner = {self.second_owner:g} compares means with the sums that they are made of, which "
                'compression changes: set averaging.compression = "none", or leave trust.second_owner out'
            )
