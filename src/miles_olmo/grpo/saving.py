"""Checkpoints during a run, and the export at its end."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from miles_olmo.base.rundir import RunDirectory
from miles_olmo.grpo.collapse_alarm import AlarmState
from miles_olmo.grpo.source import SampleSource
from miles_olmo.grpo.state import RunState
from miles_olmo.grpo.work import Work
from miles_olmo.manifest.models import Manifest
from miles_olmo.policy.checkpoint import (
    TrainerState,
    checkpoint_fingerprint,
    load_checkpoint,
    load_weights,
    newest_complete,
    save_checkpoint,
    verify_checkpoint,
)
from miles_olmo.policy.export_tokenizer import ExportTokenizer
from miles_olmo.policy.family import FamilyAdapter
from miles_olmo.policy.initial_weights import load_initial_weights
from miles_olmo.policy.optimizer import PolicyOptimizer
from miles_olmo.policy.rank_messages import Message
from miles_olmo.policy.ranks import ALONE, Ranks
from miles_olmo.records.receipts import ReceiptLog, json_safe

REFERENCE = "reference"
"""Directory of a run that holds the reference policy, as a checkpoint."""


@dataclass(frozen=True)
class Saver:
    """Saves and restores everything that a run continues from; the leader's side of each."""

    module: nn.Module
    adapter: FamilyAdapter
    optimizer: PolicyOptimizer
    manifest: Manifest
    run: RunDirectory
    plan_digest: str
    receipts: ReceiptLog
    tokenizer: Path
    """Goes into the export."""
    ranks: Ranks = ALONE
    attempt: int = 1

    def save(self, state: RunState, source: SampleSource) -> None:
        """Write a checkpoint of the finished step.

        Raises:
            CheckpointError: E402, it could not be written; the previous one is untouched.
        """
        path = self._save_to(self.run.checkpoints, state, source, self.manifest.checkpoint.keep)
        self.receipts.append("checkpoint-saved", {"step": state.step, "path": path.name})

    def restore_newest(self, state: RunState, source: SampleSource) -> bool:
        """Continue from the newest complete checkpoint, if there is one.

        Raises:
            CheckpointError: it is of another topology, shape or format.
        """
        newest = newest_complete(self.run.checkpoints)
        for skipped in newest.skipped:
            body = {"path": skipped.path.name, "reason": skipped.reason}
            self.receipts.append("checkpoint-skipped", body)
        if newest.path is None:
            return False
        fingerprint = checkpoint_fingerprint(newest.path)
        self._announce(Work.LOAD, newest.path, fingerprint=fingerprint)
        saved = load_checkpoint(
            newest.path,
            self.module,
            self.optimizer,
            self.adapter,
            topology=topology_of(self.manifest),
        )
        state.step, state.version = saved.step, saved.version
        state.alarm = AlarmState.from_json(saved.alarm)
        source.restore(dict(saved.cursor))
        counters = {"counters": json_safe(saved.cursor.get("counters", {}))}
        self.receipts.append(
            "resumed",
            {"attempt": self.attempt, "step": saved.step, "path": newest.path.name, **counters},
        )
        return True

    def start_from(self, checkpoint: Path) -> None:
        """Take the weights, and only the weights, of `model.checkpoint`."""
        self.ranks.announce(Work.START_FROM, Message({"path": str(checkpoint)}))
        load_initial_weights(checkpoint, self.module, self.adapter)
        self.optimizer.refresh_masters()

    def save_reference(self, state: RunState, source: SampleSource) -> None:
        """Keep the policy of this moment as the reference of the KL penalty."""
        self._save_to(self.run.root / REFERENCE, state, source, keep=1)

    def load_reference(self) -> nn.Module:
        """The frozen reference policy.

        Raises:
            CheckpointError: the run has none, or it is damaged.
        """
        path = self.run.root / REFERENCE / "step-000000"
        verify_checkpoint(path)
        self._announce(Work.LOAD_REFERENCE, path)
        return reference_of(self.module, self.adapter, path, verified=True)

    def export(self, state: RunState) -> None:
        """Write the Hugging Face export if the manifest asks for one.

        Raises:
            CheckpointError: its logits differ from the trainer's, or it could not be written.
        """
        if not self.manifest.checkpoint.export:
            return
        data = self.manifest.data
        self.ranks.announce(Work.EXPORT)
        figures = self.adapter.export(
            self.module,
            self.manifest.model,
            ExportTokenizer(self.tokenizer, data.eos_token, data.bos_token),
            self.run.export,
            plan_digest=self.plan_digest,
            step=state.step,
        )
        self.receipts.append(
            "exported", {"step": state.step, "logits_check": figures["logits_check"]}
        )

    def _save_to(self, directory: Path, state: RunState, source: SampleSource, keep: int) -> Path:
        train = self.manifest.train
        trainer = TrainerState(
            step=state.step,
            version=state.version,
            num_updates=self.optimizer.num_updates,
            cursor=source.state(),
            alarm=state.alarm.as_json(),
            topology=topology_of(self.manifest),
            plan_digest=self.plan_digest,
            schedule={
                **train.schedule.model_dump(),
                "num_updates": train.steps * train.updates_per_step,
            },
        )
        self.ranks.announce(Work.SAVE)
        return save_checkpoint(
            directory,
            trainer,
            self.module,
            self.optimizer,
            self.adapter,
            keep=keep,
            ranks=self.ranks,
        )

    def _announce(self, work: Work, path: Path, **values: str) -> None:
        self.ranks.announce(work, Message({"path": str(path), **values}))


def topology_of(manifest: Manifest) -> dict[str, int]:
    """Trainer processes, as a checkpoint records them."""
    parallel = manifest.train.parallel
    return {"data": parallel.data, "expert": parallel.expert}


def reference_of(
    module: nn.Module, adapter: FamilyAdapter, checkpoint: Path, *, verified: bool
) -> nn.Module:
    """A frozen copy of a policy with the weights of a checkpoint.

    Raises:
        CheckpointError: as `load_weights`.
    """
    reference = copy.deepcopy(module).requires_grad_(False)
    load_weights(checkpoint, reference, adapter, verified=verified)
    return reference
