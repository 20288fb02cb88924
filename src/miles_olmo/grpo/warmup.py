"""Supervised warm-up: enough skill that sampling finds rewards, not so much that RL has no room.

Plain next-token cross entropy on the ground truths (mean over the batch's response tokens), AdamW,
until greedy accuracy on held-out prompts lies in a band. A measurement above the band goes back to
the last one below it and continues with half the learning rate and more frequent measurements:
fixed step counts do not transfer between models and seeds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from miles_olmo.algo.pack import Pack
from miles_olmo.algo.packing import pack_lengths
from miles_olmo.base.errors import TrainingError
from miles_olmo.base.seeds import derive_seed
from miles_olmo.grpo.shares import EMPTY, deal, packs_of_parts, packs_parts
from miles_olmo.grpo.work import Work
from miles_olmo.manifest.models import Optimizer, Warmup
from miles_olmo.policy.family import FamilyAdapter
from miles_olmo.policy.optimizer import PolicyOptimizer
from miles_olmo.policy.rank_messages import Message
from miles_olmo.policy.ranks import ALONE, Ranks
from miles_olmo.tasks.order import prompt_index

MAX_STEPS_BACK = 8
"""How often an overshoot is taken back before the band is called unreachable."""


@dataclass(frozen=True)
class WarmupResult:
    """Where the warm-up ended."""

    accuracy: float
    """Greedy accuracy, inside the band."""
    steps: int
    """Optimizer steps taken, those taken back included."""
    steps_back: int
    """Overshoots taken back."""


Example = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of a prompt and of its answer, stop token last."""


@dataclass(frozen=True)
class Snapshot:
    """A state that an overshoot goes back to."""

    module: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    num_updates: int


@dataclass(frozen=True)
class SupervisedShare:
    """What one process does of one step."""

    packs: tuple[Pack, ...]
    num_passes: int
    """Of every process; see `miles_olmo.grpo.shares`."""
    num_tokens: int
    """Trained tokens of the whole batch: the denominator of the loss."""
    learning_rate: float

    def message(self) -> Message:
        packs, tensors = packs_parts(self.packs)
        values = {
            "packs": packs,
            "num_passes": self.num_passes,
            "num_tokens": self.num_tokens,
            "learning_rate": self.learning_rate,
        }
        return Message(values, tensors)

    @classmethod
    def of_message(cls, message: Message) -> SupervisedShare:
        """Inverse of `message`."""
        values = dict(message.values)
        packs = packs_of_parts(values.pop("packs"), message)
        return cls(packs=packs, **values)


@dataclass
class SupervisedTrainer:
    """Cross entropy on `prompt + ground truth + stop token`, in a seeded order."""

    module: nn.Module
    adapter: FamilyAdapter
    examples: Sequence[Example]
    settings: Warmup
    seed: int
    max_pack_tokens: int
    ranks: Ranks = ALONE
    learning_rate: float = field(init=False)
    optimizer: PolicyOptimizer = field(init=False)

    def __post_init__(self) -> None:
        self.learning_rate = self.settings.learning_rate
        settings = Optimizer(learning_rate=self.learning_rate)
        self.optimizer = PolicyOptimizer(self.module, settings, self.ranks)

    def step(self, index: int) -> dict[str, float]:
        """One optimizer step on batch `index`; its metrics."""
        size, order_seed = self.settings.batch_size, derive_seed(self.seed, "warmup")
        rows = [
            prompt_index(index * size + row, len(self.examples), seed=order_seed, shuffle=True)
            for row in range(size)
        ]
        examples = [self.examples[row] for row in rows]
        lengths = [len(prompt) + len(answer) for prompt, answer in examples]
        packs = [
            supervised_pack([examples[member] for member in members], members)
            for members in pack_lengths(lengths, self.max_pack_tokens)
        ]
        num_tokens = sum(len(answer) for _, answer in examples)
        num_passes = -(-len(packs) // self.ranks.world)
        shares = [
            SupervisedShare(own, num_passes, num_tokens, self.learning_rate)
            for own in deal(packs, self.ranks.world)
        ]
        if self.ranks.world > 1:
            self.ranks.announce(Work.SUPERVISE, [share.message() for share in shares])
        return self.learn(shares[0])

    def learn(self, share: SupervisedShare) -> dict[str, float]:
        """This process's part of one optimizer step; metrics of the whole batch."""
        total = 0.0
        self.optimizer.zero_gradients()
        device = next(self.module.parameters()).device
        for pack in [pack.to(device) for pack in share.packs]:
            output = self.adapter.forward(self.module, pack, temperature=1.0)
            loss = -output.logprobs_T[pack.mask_T].sum() / share.num_tokens
            loss.backward()
            total += loss.item()
        for _ in range(share.num_passes - len(share.packs)):
            output = self.adapter.forward(self.module, EMPTY.to(device), temperature=1.0)
            output.logprobs_T.sum().backward()
        if self.ranks.world > 1:
            own = torch.tensor(total, dtype=torch.float64)
            total = float(torch.stack(self.ranks.gather_everywhere(own)).sum())
        norm = self.optimizer.step(share.learning_rate)
        return {
            "train/loss": total,
            "train/grad_norm": norm,
            "train/learning_rate": share.learning_rate,
        }

    def snapshot(self) -> Snapshot:
        """Weights and optimizer, copied; every process keeps its own part."""
        self.ranks.announce(Work.KEEP)
        return Snapshot(
            _cloned(self.module.state_dict()),
            _cloned(self.optimizer.state_tensors()),
            self.optimizer.num_updates,
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Back to where the snapshot, the last one, was taken."""
        self.ranks.announce(Work.GO_BACK)
        self.module.load_state_dict(dict(snapshot.module))
        self.optimizer.load_state(snapshot.optimizer, snapshot.num_updates)


async def warm_up(
    trainer: SupervisedTrainer,
    *,
    measure: Callable[[], Awaitable[float]],
    report: Callable[[int, dict[str, float]], None],
) -> WarmupResult:
    """Train in place until `measure()`, the greedy accuracy, lies in the band.

    Raises:
        TrainingError: E350, the band was not reached within the manifest's bounds.
    """
    settings, interval = trainer.settings, trainer.settings.evaluate_every
    accuracy = await measure()
    report(0, {"eval/accuracy": accuracy})
    below, steps_back, step, since_measure = trainer.snapshot(), 0, 0, 0
    while not settings.min_accuracy <= accuracy <= settings.max_accuracy:
        if step == settings.max_steps or steps_back > MAX_STEPS_BACK:
            raise _not_reached(settings, accuracy, step)
        values = trainer.step(step)
        step, since_measure = step + 1, since_measure + 1
        if since_measure == interval or step == settings.max_steps:
            since_measure = 0
            accuracy = await measure()
            values["eval/accuracy"] = accuracy
            if accuracy > settings.max_accuracy:
                trainer.restore(below)
                trainer.learning_rate, interval = trainer.learning_rate / 2, max(1, interval // 2)
                steps_back += 1
            elif accuracy < settings.min_accuracy:
                below = trainer.snapshot()
        report(step, values)
    return WarmupResult(accuracy, step, steps_back)


def supervised_pack(examples: Sequence[Example], members: list[int]) -> Pack:
    """A pack of `(prompt ids, answer ids)`; only answer tokens are trained."""
    ids = [token for prompt, answer in examples for token in (*prompt, *answer)]
    mask = [trained for p, a in examples for trained in [False] * len(p) + [True] * len(a)]
    zeros = torch.zeros(len(ids), dtype=torch.float32)
    return Pack(
        ids_T=torch.tensor(ids, dtype=torch.int64),
        document_lengths=tuple(len(prompt) + len(answer) for prompt, answer in examples),
        sequence_indices=tuple(members),
        mask_T=torch.tensor(mask, dtype=torch.bool),
        advantages_T=zeros,
        behaviour_logprobs_T=zeros,
        routes_TLK=None,
    )


def _cloned(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _not_reached(settings: Warmup, accuracy: float, step: int) -> TrainingError:
    return TrainingError(
        "E350",
        f"the warm-up stands at accuracy {accuracy:.3f} after {step} steps, outside "
        f"[{settings.min_accuracy}, {settings.max_accuracy}]",
        why="RL would start with too few rewards, or with too little left to learn",
        fix="raise warmup.max_steps, change warmup.learning_rate, or widen the band",
    )
