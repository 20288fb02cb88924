"""Putting the trainer's weights on the engines, and knowing that they arrived."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from miles_olmo.base.rundir import RunDirectory
from miles_olmo.grpo.work import Work
from miles_olmo.manifest.models import Publish
from miles_olmo.policy.family import FamilyAdapter
from miles_olmo.policy.publication import prune_publications, write_publication
from miles_olmo.policy.ranks import ALONE, Ranks
from miles_olmo.rollout.client import FleetClient
from miles_olmo.wire.publication import Publication


@dataclass
class Publisher:
    """Owns the policy's version counter as the engines see it.

    Order of one publication: write all tensors and their checksums; engines pause; they take the
    files; each confirms the version; they resume. Nothing is sampled in between (barrier).
    """

    module: nn.Module
    adapter: FamilyAdapter
    fleet: FleetClient
    run: RunDirectory
    settings: Publish
    ranks: Ranks = ALONE
    version: int = -1
    """Newest version that every engine has confirmed."""
    _audited: bool = field(default=False)

    async def publish(self, version: int) -> Publication:
        """Publish the module's weights as `version`.

        The first publication of a process is audited: every engine reports the checksum of every
        tensor it serves, and each must equal what was sent.

        Raises:
            EngineError: an engine refused, or serves something else.
            CheckpointError: the weights are not finite, or the disk is full.
        """
        self.ranks.announce(Work.PUBLISH)
        publication = write_publication(
            self.module, self.adapter, self.run.publication(version), version
        )
        await self.fleet.publish(publication)
        self.version = version
        if not self._audited:
            await self.fleet.audit(publication)
            self._audited = True
        prune_publications(self.run.publication(version).parent, keep=self.settings.keep)
        return publication
