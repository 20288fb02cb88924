"""AdamW over a policy, with float32 moments and master weights, and a step that refuses NaN.

Variant: decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101), `torch.optim.AdamW`,
global gradient-norm clipping before it. Weight decay acts on matrices only; norms, gains and biases
are left alone. Parameters below float32 are updated in float32 master copies and rounded
once per update, since small updates vanish in bfloat16.

Several processes: each holds the moments of the weights it holds. Gradients are added up over the
processes first (`gradient_sum`), so all of them take the same step. Left out: moments that are spread
over data replicas.

State that a checkpoint needs exists from the start, for every parameter, also for one that never
had a gradient: names never depend on what happened in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from miles_olmo.base.errors import CheckpointError, TrainingError
from miles_olmo.manifest.models import Optimizer
from miles_olmo.policy.expert_shards import shards_of
from miles_olmo.policy.gradient_sum import GradientSum
from miles_olmo.policy.ranks import ALONE, Ranks

_FLAT_MATRICES = ("routed_experts_router.weight",)
"""OLMo-core stores the router's [E, D] matrix flat."""


class PolicyOptimizer:
    """AdamW that owns the order: refuse non-finite gradients, clip, step, round back."""

    def __init__(self, module: nn.Module, settings: Optimizer, ranks: Ranks = ALONE) -> None:
        self._settings = settings
        self._shards = shards_of(module)
        self._sum = GradientSum(ranks, self._shards)
        self._parameters = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        # Updated tensors: the parameter itself in float32, else a float32 copy of it.
        self._masters = {name: _master(p) for name, p in self._parameters.items()}
        self._adamw = torch.optim.AdamW(
            _groups(self._masters, self._parameters, settings),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,  # one pass over each tensor: half the time of an update on a CPU
        )
        for master in self._masters.values():
            self._adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
        self._num_updates = 0

    @property
    def num_updates(self) -> int:
        """Updates taken so far."""
        return self._num_updates

    def zero_gradients(self) -> None:
        """Forget accumulated gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self, learning_rate: float) -> float:
        """Update the policy from its accumulated gradients and forget them.

        A parameter without a gradient counts as one with a zero gradient: its moments decay.

        All ranks call this; the gradients of each are those of its own packs.

        Returns:
            The global gradient norm before clipping: every parameter of the policy once.

        Raises:
            TrainingError: E310, a gradient is NaN or infinite (details: `tensors`). Weights,
                moments and the update count are unchanged.
        """
        gradients = self._gradients()
        self._sum.over_ranks(gradients)
        norm = _global_norm(self._sum.squared_norms(gradients))
        scale = min(1.0, self._settings.max_grad_norm / (norm + 1e-6))
        for name, master in self._masters.items():
            # In place: memory for one more copy of all gradients costs more than the product.
            master.grad = gradients[name].mul_(scale) if scale < 1.0 else gradients[name]
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._num_updates += 1
        with torch.no_grad():
            for name, master in self._masters.items():
                master.grad = None
                if master is not self._parameters[name]:
                    self._parameters[name].copy_(master)
        self.zero_gradients()
        return norm

    def refresh_masters(self) -> None:
        """Take the masters from the policy's weights, after these were loaded."""
        with torch.no_grad():
            for name, master in self._masters.items():
                if master is not self._parameters[name]:
                    master.copy_(self._parameters[name])

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Moments and master weights by name: `exp_avg.<parameter>`, ...; the live tensors."""
        tensors = {}
        for name, master in self._masters.items():
            state = self._adamw.state[master]
            tensors[f"exp_avg.{name}"] = state["exp_avg"]
            tensors[f"exp_avg_sq.{name}"] = state["exp_avg_sq"]
            if master is not self._parameters[name]:
                tensors[f"master.{name}"] = master
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def whole_state_layout(self) -> dict[str, torch.Tensor]:
        """Names, shapes and dtypes of `whole_state_tensors`, on the meta device."""
        return {
            name: self._shards.whole_layout(_parameter_of(name), tensor)
            if self._shards
            else tensor.to("meta")
            for name, tensor in self.state_tensors().items()
        }

    def whole_state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`state_tensors` with all experts, on the leader; nothing elsewhere.

        All ranks iterate to the end; one tensor is gathered at a time.
        """
        for name, tensor in self.state_tensors().items():
            whole = self._shards.whole(_parameter_of(name), tensor) if self._shards else tensor
            if whole is not None:
                yield name, whole

    def own_state(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's part of a state with all experts; views of it."""
        if self._shards is None:
            return dict(whole)
        return {name: self._shards.own(_parameter_of(name), t) for name, t in whole.items()}

    def check_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse a state that is not this optimizer's.

        Raises:
            CheckpointError: E404, names, shapes or dtypes differ.
        """
        own = self.state_tensors()
        wrong = sorted(own.keys() ^ tensors.keys()) or [
            name
            for name, tensor in own.items()
            if (tensor.shape, tensor.dtype) != (tensors[name].shape, tensors[name].dtype)
        ]
        if wrong:
            raise CheckpointError(
                "E404",
                f"{len(wrong)} optimizer tensors do not fit this policy, first '{wrong[0]}'",
                why="the moments belong to a policy of another shape or dtype",
                fix="resume with the [model] table that the checkpoint was written with",
                tensors=wrong,
            )

    def load_state(self, tensors: Mapping[str, torch.Tensor], num_updates: int) -> None:
        """Continue exactly where `state_tensors` was taken, after `num_updates` updates.

        Raises:
            CheckpointError: E404, see `check_state`; nothing has been changed.
        """
        self.check_state(tensors)
        with torch.no_grad():
            for name, tensor in self.state_tensors().items():
                tensor.copy_(tensors[name])
        for master in self._masters.values():
            self._adamw.state[master]["step"].fill_(num_updates)
        self._num_updates = num_updates

    def _gradients(self) -> dict[str, torch.Tensor]:
        """float32 gradient of every parameter; zeros where there is none."""
        return {
            name: torch.zeros_like(self._masters[name])
            if parameter.grad is None
            else parameter.grad.detach().to(torch.float32)
            for name, parameter in self._parameters.items()
        }


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay acts on a parameter: matrices, however stored, but no norm's gains."""
    parts = name.split(".")
    is_norm = len(parts) > 1 and "norm" in parts[-2]
    return not is_norm and (parameter.ndim >= 2 or name.endswith(_FLAT_MATRICES))


def _master(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.dtype == torch.float32:
        return parameter
    return parameter.detach().to(torch.float32, copy=True).requires_grad_()


def _groups(
    masters: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor], settings: Optimizer
) -> list[dict]:
    groups = [
        {"params": [], "weight_decay": settings.weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for name, master in masters.items():
        groups[0 if is_matrix(name, parameters[name]) else 1]["params"].append(master)
    return [group for group in groups if group["params"]]


def _parameter_of(state_name: str) -> str:
    return state_name.partition(".")[2]


def _global_norm(squared_norms: Mapping[str, torch.Tensor]) -> float:
    """2-norm over all gradients, from the squares of their norms in float64.

    Raises:
        TrainingError: E310.
    """
    squares = torch.stack(list(squared_norms.values())).cpu()
    if not bool(torch.isfinite(squares).all()):
        finite = torch.isfinite(squares).tolist()
        bad = [name for name, is_finite in zip(squared_norms, finite, strict=True) if not is_finite]
        raise TrainingError(
            "E310",
            f"the gradient of {len(bad)} tensors is NaN or infinite, first '{bad[0]}'",
            why="an update with it would destroy the policy",
            fix="lower train.optimizer.learning_rate or max_grad_norm and resume",
            tensors=bad,
        )
    return float(squares.sum().sqrt())
