"""Runs every scenario on real process groups and writes what came out: `DIRECTORY`.

One process imports everything and forks the ranks of one scenario after another (see `forked`).
Results are JSON and safetensors files; the tests compare them.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "grpo")]

from forked import run_ranks  # noqa: E402
from test_learner import manifest, sampled_groups  # noqa: E402

from miles_olmo.base.errors import MilesError  # noqa: E402
from miles_olmo.base.files import write_json  # noqa: E402
from miles_olmo.base.rundir import RunDirectory  # noqa: E402
from miles_olmo.grpo.follower import Follower  # noqa: E402
from miles_olmo.grpo.learner import Learner  # noqa: E402
from miles_olmo.grpo.saving import Saver  # noqa: E402
from miles_olmo.grpo.state import RunState  # noqa: E402
from miles_olmo.grpo.warmup import SupervisedTrainer  # noqa: E402
from miles_olmo.grpo.work import Work  # noqa: E402
from miles_olmo.manifest.models import Manifest, Warmup  # noqa: E402
from miles_olmo.policy.adapter import adapter_for  # noqa: E402
from miles_olmo.policy.optimizer import PolicyOptimizer  # noqa: E402
from miles_olmo.policy.publication import write_publication  # noqa: E402
from miles_olmo.policy.ranks import Ranks  # noqa: E402
from miles_olmo.policy.tensor_files import write_tensors  # noqa: E402
from miles_olmo.records.receipts import ReceiptLog, failure_body  # noqa: E402
from miles_olmo.wire.trajectory import ScoredGroup  # noqa: E402

TOPOLOGIES = ((1, 1), (1, 2), (2, 1), (2, 2))
LOSSES = {
    "train__packing__max_tokens": 24,  # several packs, not a multiple of the processes
    "train__optimizer__max_grad_norm": 1e9,
    "train__load_balancing_loss": {"mode": "global", "coefficient": 0.01},
    "train__z_loss": {"mode": "global", "coefficient": 0.01},
}
CASES: dict[str, dict[str, Any]] = {
    "replay": {},
    "replay, recompute": {"train__recompute": "block"},
    "native": {"train__replay__enabled": False},
    "native, recompute": {"train__replay__enabled": False, "train__recompute": "block"},
    "one rank": {},
    "one pack": {"train__packing__max_tokens": 512},
    "clipped": {"train__optimizer__max_grad_norm": 1e-3},
    "three updates": {
        "train__updates_per_step": 3,
        "algorithm__importance_sampling": {"enabled": True, "cap": 2.0},
        "algorithm__kl": {"coefficient": 0.5, "estimator": "k3"},
    },
    "dense first layer": {
        "model__shape__dense_layers_indices": [0],
        "model__shape__dense_hidden_size": 32,
    },
    "olmoe": {
        "model__family": "olmoe",
        "model__shape__shared_expert_hidden_size": 0,
        "model__shape__num_key_value_heads": 2,
        "model__shape__use_head_qk_norm": False,
    },
    "bfloat16": {"model__dtype": "bfloat16"},
}


def build(settings: Manifest, ranks: Ranks) -> Learner:
    adapter = adapter_for(settings.model.family)
    module = adapter.build(
        settings.model, settings.train, device=torch.device("cpu"), seed=0, ranks=ranks
    )
    optimizer = PolicyOptimizer(module, settings.train.optimizer, ranks)
    learner = Learner(module, adapter, optimizer, settings, ranks=ranks)
    if learner.needs_reference:
        learner.reference = adapter.build(
            settings.model, settings.train, device=torch.device("cpu"), seed=1, ranks=ranks
        ).requires_grad_(False)
    return learner


def supervised(learner: Learner) -> SupervisedTrainer:
    examples = [((1, 3 + i % 5), (4 + i % 7, 2)) for i in range(12)]
    warmup = Warmup(batch_size=8)
    return SupervisedTrainer(
        learner.module, learner.adapter, examples, warmup, 0, 12, learner.ranks
    )


def through_first_experts(groups: list[ScoredGroup]) -> list[ScoredGroup]:
    """The same samples, every token recorded on experts 0 and 1, which live on one rank."""

    def forced(segment):
        routes = segment.routes.copy()
        routes[routes >= 0] = 0
        routes[..., 1][routes[..., 1] >= 0] = 1
        return replace(segment, routes=routes)

    return [
        replace(
            group,
            trajectories=tuple(
                replace(t, segments=tuple(map(forced, t.segments))) for t in group.trajectories
            ),
        )
        for group in groups
    ]


def digest(tensors: dict[str, torch.Tensor]) -> str:
    sha256 = hashlib.sha256()
    for name in sorted(tensors):
        sha256.update(name.encode() + tensors[name].detach().contiguous().numpy().tobytes())
    return sha256.hexdigest()


def follow(learner: Learner) -> None:
    Follower(learner, partial(supervised, learner)).follow()


# Scenarios. Each runs in every rank; the leader writes the results.


def updates(directory: Path, groups: list[ScoredGroup], ranks: Ranks) -> None:
    """One training step, from the same weights, in every case."""
    first = through_first_experts(groups)
    for case, changes in CASES.items():
        learner = build(manifest(**{**LOSSES, **changes}), ranks)
        ids_BT = torch.arange(24).view(2, 12)
        logits = learner.adapter.logits(learner.module, ids_BT)
        metrics = {}
        if ranks.is_leader:
            metrics = learner.update(first if case == "one rank" else groups)
            ranks.announce(Work.STOP)
        else:
            follow(learner)
        moments = dict(learner.optimizer.whole_state_tensors())
        weights = dict(learner.adapter.publication_tensors(learner.module))
        agree = replicas_agree(learner)
        if ranks.is_leader:
            counts = learner.expert_counts_LE.tolist()
            stem = f"{case}-{ranks.data}x{ranks.expert}"
            write_json(
                directory / f"{stem}.json", {"metrics": metrics, "agree": agree, "counts": counts}
            )
            tensors = {"logits": logits, **{f"weight.{n}": t for n, t in weights.items()}}
            write_tensors(directory / f"{stem}.safetensors", {**tensors, **moments})


def replicas_agree(learner: Learner) -> bool:
    """Whether ranks that hold the same weights hold the same bits."""
    ranks, shards = learner.ranks, learner.module.expert_shards
    state = learner.module.state_dict()
    cut = {n: t for n, t in state.items() if shards is not None and shards.is_cut(n)}
    common = {n: t.float() for n, t in state.items() if n not in cut}
    own = [digest(common), digest({n: t.float() for n, t in cut.items()})]
    numbers = torch.tensor([[int(text[i : i + 8], 16) for i in range(0, 64, 8)] for text in own])
    everybody = ranks.gather_everywhere(numbers)
    return all(
        torch.equal(other[0], everybody[0][0])
        and torch.equal(other[1], everybody[rank % ranks.expert][1])
        for rank, other in enumerate(everybody)
    )


class Cursor:
    """Stands for a sample source; a checkpoint only stores what it says."""

    def state(self) -> dict[str, Any]:
        return {"position": 7, "in_flight": []}

    def restore(self, state: dict[str, Any]) -> None:
        assert state == self.state()


def saver_of(directory: Path, learner: Learner) -> Saver:
    directory.mkdir(exist_ok=True)
    run = RunDirectory(directory)
    return Saver(
        learner.module,
        learner.adapter,
        learner.optimizer,
        learner.manifest,
        run,
        "digest",
        ReceiptLog(run.receipt_log("trainer"), "trainer"),
        directory / "tokenizer.json",
        learner.ranks,
    )


def of_topology(ranks: Ranks) -> dict[str, int]:
    return {"train__parallel__data": ranks.data, "train__parallel__expert": ranks.expert}


def files(directory: Path, ranks: Ranks) -> None:
    """What a policy with its first weights looks like on disk."""
    learner = build(manifest(**of_topology(ranks)), ranks)
    if not ranks.is_leader:
        follow(learner)
        return
    root = directory / f"files-{ranks.data}x{ranks.expert}"
    ranks.announce(Work.PUBLISH)
    write_publication(learner.module, learner.adapter, root / "publish", 0)
    saver_of(root, learner).save(RunState(), Cursor())
    ranks.announce(Work.STOP)


def save_and_go_on(directory: Path, groups: list[ScoredGroup], ranks: Ranks) -> None:
    """A step, a checkpoint, two more steps."""
    learner = build(manifest(**LOSSES, **of_topology(ranks)), ranks)
    torch.manual_seed(100 + ranks.rank)
    if ranks.is_leader:
        learner.update(groups)
        saver_of(directory / "resume", learner).save(RunState(step=1, version=1), Cursor())
        draw = torch.rand(1).item()
        metrics = [learner.update(groups) for _ in range(2)]
        ranks.announce(Work.STOP)
        write_json(directory / "went-on.json", metrics)
    else:
        follow(learner)
        draw = torch.rand(1).item()
    weights = digest(learner.module.state_dict())
    write_json(directory / f"went-on-{ranks.rank}.json", [weights, draw])


def resume(directory: Path, groups: list[ScoredGroup], ranks: Ranks) -> None:
    """The same two steps from the checkpoint, in new processes."""
    learner = build(manifest(**LOSSES, **of_topology(ranks)), ranks)
    with torch.no_grad():
        for parameter in learner.module.parameters():
            parameter.zero_()
    if ranks.is_leader:
        state = RunState()
        assert saver_of(directory / "resume", learner).restore_newest(state, Cursor())
        assert state == RunState(step=1, version=1)
        draw = torch.rand(1).item()
        metrics = [learner.update(groups) for _ in range(2)]
        ranks.announce(Work.STOP)
        write_json(directory / "resumed.json", metrics)
    else:
        follow(learner)
        draw = torch.rand(1).item()
    weights = digest(learner.module.state_dict())
    write_json(directory / f"resumed-{ranks.rank}.json", [weights, draw])


def other_topology(directory: Path, ranks: Ranks) -> None:
    learner = build(manifest(**of_topology(ranks)), ranks)
    try:
        saver_of(directory / "resume", learner).restore_newest(RunState(), Cursor())
    except MilesError as error:
        write_json(directory / "other-topology.json", failure_body(error))


def warm_up(directory: Path, ranks: Ranks) -> None:
    """Three supervised steps, of which the last two are taken back and repeated."""
    learner = build(manifest(**LOSSES), ranks)
    if not ranks.is_leader:
        follow(learner)
    else:
        trainer = supervised(learner)
        metrics = [trainer.step(0)]
        kept = trainer.snapshot()
        metrics += [trainer.step(1), trainer.step(2)]
        trainer.restore(kept)
        metrics += [trainer.step(1), trainer.step(2)]
        learner.take_weights()
        ranks.announce(Work.STOP)
        write_json(directory / f"warmup-{ranks.data}x{ranks.expert}.json", metrics)


def fault(directory: Path, kind: str, groups: list[ScoredGroup], ranks: Ranks) -> None:
    """Rank 1 breaks in its second step; everybody else writes down what they noticed, and when."""
    learner = build(manifest(**LOSSES), ranks)
    if ranks.rank == 1:
        break_in_second_step(learner, kind)
    failure: dict[str, Any] = {}
    try:
        if ranks.is_leader:
            for _ in range(2):
                started = time.time()
                learner.update(groups)
        else:
            follow(learner)
    except MilesError as error:
        failure = failure_body(error)
    write_json(directory / f"{kind}-{ranks.rank}.json", [failure, time.time()])
    if ranks.is_leader:
        write_json(directory / f"{kind}-started.json", started)
        if kind == "hang":  # the store's server is this process: the others still ask it
            time.sleep(5)


def break_in_second_step(learner: Learner, kind: str) -> None:
    learn = learner.learn

    def broken(shares):
        if learner.optimizer.num_updates == 0:
            return learn(shares)
        if kind == "nan":
            with torch.no_grad():
                learner.module.lm_head.w_out.weight[3, 0] = float("nan")
        elif kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "hang":
            time.sleep(9)
            os._exit(3)
        return learn(shares)

    learner.learn = broken


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    groups = sampled_groups()
    seconds: dict[str, float] = {}
    codes: dict[str, list[int]] = {}

    def run(name: str, data: int, expert: int, body, **options: Any) -> None:
        started = time.monotonic()
        codes[name] = run_ranks(data, expert, body, **options)
        seconds[name] = time.monotonic() - started

    for data, expert in TOPOLOGIES:
        run(f"updates {data}x{expert}", data, expert, partial(updates, directory, groups))
        run(f"warm-up {data}x{expert}", data, expert, partial(warm_up, directory))
    for data, expert in ((1, 1), (2, 2)):
        run(f"files {data}x{expert}", data, expert, partial(files, directory))
    run("went on", 2, 2, partial(save_and_go_on, directory, groups))
    run("resumed", 2, 2, partial(resume, directory, groups))
    run("other topology", 1, 1, partial(other_topology, directory))
    absent = {"absent": 2, "meeting_seconds": 1.0, "errors": directory / "absent"}
    run("absent", 1, 3, lambda ranks: None, **absent)
    for kind in ("nan", "killed", "hang"):
        run(
            kind,
            2,
            2,
            partial(fault, directory, kind, groups),
            timeout_seconds=3.0 if kind == "hang" else 60.0,
            peaceful=False,
        )
    write_json(directory / "codes.json", codes)
    write_json(directory / "seconds.json", seconds)
    print(json.dumps(seconds, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
