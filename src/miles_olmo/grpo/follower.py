"""A trainer process that is not the leader: it holds its part of the policy and does as announced.

It samples nothing, writes no file and knows no step; the leader's loop decides all of that. Every
method here is one side of a collective whose other side is the leader's method of the same work, so
both must run the same operations in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from miles_olmo.grpo.learner import Learner
from miles_olmo.grpo.saving import reference_of, topology_of
from miles_olmo.grpo.shares import shares_of_message
from miles_olmo.grpo.warmup import Snapshot, SupervisedShare, SupervisedTrainer
from miles_olmo.grpo.work import Work
from miles_olmo.policy.checkpoint import assist_save, load_checkpoint
from miles_olmo.policy.initial_weights import load_initial_weights
from miles_olmo.policy.publication import assist_publication
from miles_olmo.policy.rank_messages import Message


@dataclass
class Follower:
    """Everything a process needs for its part of the work."""

    learner: Learner
    make_supervised: Callable[[], SupervisedTrainer | None]
    """Called when the leader begins a warm-up; None without one in the manifest."""
    _supervised: SupervisedTrainer | None = None
    _snapshot: Snapshot | None = None

    def follow(self) -> None:
        """Work until the leader says that the run is over.

        Raises:
            TrainingError: E300, E301, another process is gone or does not come; E310, E315, with
                the sample ids, as `Learner.learn`.
        """
        work_of = self._work()
        while True:
            name, message = self.learner.ranks.next_work()
            if name == Work.STOP:
                return
            work_of[Work(name)](message)

    def _work(self) -> Mapping[Work, Callable[[Message], object]]:
        learner = self.learner
        module, adapter, optimizer = learner.module, learner.adapter, learner.optimizer
        return {
            Work.LEARN: lambda message: learner.learn(shares_of_message(message)),
            Work.SUPERVISE: self._supervise,
            Work.KEEP: self._keep,
            Work.GO_BACK: self._go_back,
            Work.REFRESH: self._refresh,
            Work.PUBLISH: lambda _: assist_publication(module, adapter),
            Work.SAVE: lambda _: assist_save(module, optimizer, adapter, learner.ranks),
            Work.LOAD: self._load,
            Work.START_FROM: self._start_from,
            Work.LOAD_REFERENCE: self._load_reference,
            Work.EXPORT: lambda _: adapter.assist_export(module, learner.manifest.model),
        }

    @property
    def supervised(self) -> SupervisedTrainer:
        """Made when it is first needed: a resumed run has no warm-up, and it holds moments."""
        if self._supervised is None:
            self._supervised = self.make_supervised()
        assert self._supervised is not None, "the leader has a warm-up and this process has none"
        return self._supervised

    def _supervise(self, message: Message) -> None:
        self.supervised.learn(SupervisedShare.of_message(message))

    def _keep(self, message: Message) -> None:
        self._snapshot = self.supervised.snapshot()

    def _go_back(self, message: Message) -> None:
        assert self._snapshot is not None
        self.supervised.restore(self._snapshot)

    def _refresh(self, message: Message) -> None:
        """The warm-up is over."""
        self._supervised = self._snapshot = None
        self.learner.optimizer.refresh_masters()

    def _load(self, message: Message) -> None:
        learner = self.learner
        load_checkpoint(
            Path(message.values["path"]),
            learner.module,
            learner.optimizer,
            learner.adapter,
            topology=topology_of(learner.manifest),
            rank=learner.ranks.rank,
            fingerprint=message.values["fingerprint"],
        )

    def _start_from(self, message: Message) -> None:
        path = Path(message.values["path"])
        load_initial_weights(path, self.learner.module, self.learner.adapter)
        self.learner.optimizer.refresh_masters()

    def _load_reference(self, message: Message) -> None:
        path = Path(message.values["path"])
        self.learner.reference = reference_of(
            self.learner.module, self.learner.adapter, path, verified=True
        )
