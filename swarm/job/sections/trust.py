"""The section [trust] of a job file: how far a job believes what its replicas compute."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from swarm.job.sections.base import Section


class TrustSection(Section):
    """How replicas are checked. By default everybody is believed, and nothing is sent or computed for it."""

    # The share of hops that another replica computes again: 0 = off, about 0.02 on machines of others.
    spot_check: Annotated[float, Field(ge=0, le=1)] = 0.0
    # The share of steps of which one replica's sum is computed once more by another: 0 = off.
    recount: Annotated[float, Field(ge=0, le=1)] = 0.0
    # Whether other replicas of a stage say by hash what one of them hands over for a checkpoint.
    second_hash: bool = False
    # The share of rounds of averaging of which one slice is reduced once more, by another member: 0 = off.
    second_owner: Annotated[float, Field(ge=0, le=1)] = 0.0

    @property
    def hashes_hops(self) -> bool:
        """Whether replicas say by hash what they took and made at each hop."""
        return self.spot_check > 0.0 or self.recount > 0.0

    def check(self, *, reproducible: bool, compresses_slices: bool) -> None:
        """ValueError if the job cannot be checked."""
        if self.hashes_hops and not reproducible:
            name, share = ("spot_check", self.spot_check) if self.spot_check else ("recount", self.recount)
            raise ValueError(
                f"trust.{name} = {share:g} compares results bit for bit, which differ from replica to "
                f"replica without training.reproducible = true: set that, or leave trust.{name} out"
            )
        if self.second_owner and compresses_slices:
            raise ValueError(
                f"trust.second_owner = {self.second_owner:g} compares means with the sums that they are made of, which "
                'compression changes: set averaging.compression = "none", or leave trust.second_owner out'
            )
