"""Checkpoints: bit-identical continuation, and what happens when a save or a file goes wrong."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from miles_olmo.base.errors import CheckpointError
from miles_olmo.manifest.models import Optimizer, Schedule
from miles_olmo.policy import atomic_directory as atomic
from miles_olmo.policy import checkpoint as checkpoints
from miles_olmo.policy.checkpoint import (
    TrainerState,
    load_checkpoint,
    load_weights,
    newest_complete,
    save_checkpoint,
)
from miles_olmo.policy.optimizer import PolicyOptimizer
from miles_olmo.policy.schedule import learning_rate

from .conftest import Tensors, build_module

TOPOLOGY = {"data": 1, "expert": 1}
SETTINGS = Optimizer(learning_rate=0.01, weight_decay=0.1)


class Trainer:
    """A real policy with its optimizer; gradients come from the global generator."""

    def __init__(self, **shape) -> None:
        self.module = build_module(num_layers=1, **shape)
        self.optimizer = PolicyOptimizer(self.module, SETTINGS)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for parameter in self.module.parameters():
                parameter.grad = torch.randn_like(parameter)
            self.optimizer.step(
                learning_rate(self.optimizer.num_updates, 0.01, Schedule(kind="cosine"), 10)
            )

    def save(self, directory: Path, step: int, keep: int = 2) -> Path:
        state = TrainerState(
            step=step,
            version=step,
            num_updates=self.optimizer.num_updates,
            cursor={"low_water": step * 16, "in_flight": [3, 7]},
            topology=TOPOLOGY,
            plan_digest="d" * 64,
            schedule={"kind": "cosine", "num_updates": 10},
        )
        return save_checkpoint(directory, state, self.module, self.optimizer, Tensors(), keep=keep)

    def load(self, path: Path, **topology) -> TrainerState:
        return load_checkpoint(
            path, self.module, self.optimizer, Tensors(), topology={**TOPOLOGY, **topology}
        )

    def state(self) -> dict[str, torch.Tensor]:
        tensors = self.module.state_dict() | self.optimizer.state_tensors()
        return {name: tensor.clone() for name, tensor in tensors.items()}


def _equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.fixture
def saved(tmp_path) -> tuple[Path, Trainer]:
    """A directory with step-000010, and the trainer that wrote it."""
    torch.manual_seed(5)
    trainer = Trainer()
    trainer.train(3)
    trainer.save(tmp_path / "checkpoints", 10)
    return tmp_path / "checkpoints", trainer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_continues_bit_for_bit(tmp_path, dtype):
    torch.manual_seed(5)
    trainer = Trainer(dtype=dtype)
    trainer.train(3)
    path = trainer.save(tmp_path, 80)
    trainer.train(3)
    draws = (torch.rand(3), random.random(), np.random.random())
    other = Trainer(dtype=dtype, seed=9)
    state = other.load(path)
    other.train(3)
    assert _equal(other.state(), trainer.state())
    assert torch.equal(torch.rand(3), draws[0])
    assert (random.random(), np.random.random()) == draws[1:]
    assert (state.step, state.version, state.num_updates) == (80, 80, 3)
    assert state.cursor == {"low_water": 1280, "in_flight": [3, 7]}
    assert state.plan_digest == "d" * 64


def test_a_checkpoint_holds_no_pickle_and_standard_safetensors(saved):
    from safetensors.torch import load_file

    path = saved[0] / "step-000010"
    assert sorted(entry.name for entry in path.iterdir()) == [
        "complete.json",
        "optimizer.safetensors",
        "random.safetensors",
        "state.json",
        "weights.safetensors",
    ]
    weights = load_file(path / "weights.safetensors")
    published = dict(Tensors().publication_tensors(saved[1].module))
    assert _equal(weights, published)


def test_only_the_newest_are_kept(saved):
    directory, trainer = saved
    for step in (20, 30, 40):
        trainer.save(directory, step)
    assert sorted(entry.name for entry in directory.iterdir()) == ["step-000030", "step-000040"]
    assert newest_complete(directory).path == directory / "step-000040"


def test_a_step_can_be_saved_again(saved):
    directory, trainer = saved
    trainer.train(1)
    path = trainer.save(directory, 10)
    other = Trainer(seed=9)
    other.load(path)
    assert _equal(other.state(), trainer.state())
    assert [entry.name for entry in directory.iterdir()] == ["step-000010"]


def _killed_in_a_save(trainer: Trainer, directory: Path, owner, name: str, call: int) -> None:
    """Save step 20 in a child that kills itself with SIGKILL at a call of `owner.name`."""
    child = os.fork()
    if child == 0:
        original, calls = getattr(owner, name), iter(range(1000))

        def deadly(*arguments, **keywords):
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **keywords)

        setattr(owner, name, deadly)
        try:
            trainer.save(directory, 20, keep=1)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (checkpoints, "write_tensors", 0),
        (checkpoints, "write_tensors", 1),
        (checkpoints, "write_tensors", 2),
        (checkpoints.json, "dumps", 4),  # between state.json and complete.json
        (atomic, "_sync_tree", 0),
        (atomic, "_swap", 0),
    ],
    ids=["first file", "second file", "third file", "completion", "sync", "rename"],
)
def test_a_kill_during_a_save_leaves_the_previous_checkpoint_in_force(saved, owner, name, call):
    directory, trainer = saved
    _killed_in_a_save(trainer, directory, owner, name, call)
    hidden = [entry.name for entry in directory.iterdir() if entry.name.startswith(".")]
    assert len(hidden) == 1
    newest = newest_complete(directory)
    assert (newest.path, newest.skipped) == (directory / "step-000010", ())
    other = Trainer(seed=9)
    other.load(newest.path)
    assert _equal(other.state(), trainer.state())
    trainer.save(directory, 30)  # the next save clears the leftover
    assert sorted(e.name for e in directory.iterdir()) == ["step-000010", "step-000030"]


def test_a_kill_after_the_rename_leaves_the_new_checkpoint(saved):
    directory, trainer = saved
    _killed_in_a_save(trainer, directory, checkpoints, "remove_directory", 0)
    assert newest_complete(directory).path == directory / "step-000020"


def _in_child(action) -> dict:
    """Run `action` in a forked child and return the JSON it makes."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "w") as file:
            json.dump(action(), file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text)


def _failed_save(trainer: Trainer, directory: Path) -> dict:
    try:
        trainer.save(directory, 20)
    except CheckpointError as error:
        return error.as_json()
    return {"code": "saved"}


@pytest.mark.parametrize("limit", [1_000, 20_000, 60_000])
def test_a_file_that_cannot_be_written_whole_removes_the_partial_checkpoint(saved, limit):
    directory, trainer = saved

    def save_with_a_file_size_limit() -> dict:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        return _failed_save(trainer, directory)

    error = _in_child(save_with_a_file_size_limit)
    assert error["code"] == "E402"
    assert "could not be written" in error["what"] and error["why"] and error["fix"]
    assert [entry.name for entry in directory.iterdir()] == ["step-000010"]
    assert newest_complete(directory).path == directory / "step-000010"


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no permission to mount a small tmpfs; the file size limit covers the path")
    try:
        trainer = Trainer()
        trainer.save(disk, 10)
        (disk / "ballast").write_bytes(b"x" * 100_000)
        assert _failed_save(trainer, disk)["code"] == "E402"
        assert sorted(entry.name for entry in disk.iterdir()) == ["ballast", "step-000010"]
        assert newest_complete(disk).path == disk / "step-000010"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [_truncate, _flip_a_bit, Path.unlink])
@pytest.mark.parametrize(
    "name", ["weights.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"]
)
def test_damage_to_any_file_is_found_and_the_older_checkpoint_is_used(saved, damage, name):
    directory, trainer = saved
    trainer.save(directory, 20)
    damage(directory / "step-000020" / name)
    newest = newest_complete(directory)
    assert newest.path == directory / "step-000010"
    (skipped,) = newest.skipped
    assert skipped.path == directory / "step-000020"
    assert name in skipped.reason and "E401" in skipped.reason
    before = trainer.state()
    with pytest.raises(CheckpointError, match=f"E401.*{name}"):
        trainer.load(skipped.path)
    assert _equal(trainer.state(), before)


@pytest.mark.parametrize("damage", [_truncate, Path.unlink])
def test_a_checkpoint_without_its_last_file_is_incomplete(saved, damage):
    directory, trainer = saved
    damage(directory / "step-000010" / "complete.json")
    assert newest_complete(directory).path is None
    assert "E400" in newest_complete(directory).skipped[0].reason
    with pytest.raises(CheckpointError, match="E400"):
        trainer.load(directory / "step-000010")


def test_any_flipped_bit_of_the_last_file_is_found(saved):
    directory, trainer = saved
    path = directory / "step-000010" / "complete.json"
    whole = path.read_bytes()
    before = trainer.state()
    for position in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        newest = newest_complete(directory)  # a changed space inside the JSON is harmless
        assert newest.path is None or json.loads(damaged) == json.loads(whole)
    assert _equal(trainer.state(), before)


def test_a_checkpoint_that_a_run_removed_meanwhile_is_not_called_damaged(saved, monkeypatch):
    directory, trainer = saved
    path, whole = directory / "step-000010", checkpoints.file_sha256
    with pytest.raises(CheckpointError, match="E407"):
        trainer.load(directory / "step-999999")

    def removed_between_two_files(file):
        if path.is_dir():
            atomic.remove_directory(path)
            return "of a file that is gone"
        return whole(file)

    monkeypatch.setattr(checkpoints, "file_sha256", removed_between_two_files)
    with pytest.raises(CheckpointError, match=r"E407.*checkpoint\.keep"):
        trainer.load(path)


def test_an_incomplete_checkpoint_does_not_count_as_kept(saved):
    directory, trainer = saved
    (trainer.save(directory, 20) / "complete.json").unlink()
    trainer.save(directory, 30)
    assert {path.name for path in directory.iterdir()} == {
        "step-000010",
        "step-000020",
        "step-000030",
    }


def test_another_topology_is_refused(saved):
    directory, trainer = saved
    with pytest.raises(CheckpointError) as caught:
        trainer.load(directory / "step-000010", expert=2)
    assert caught.value.code == "E403"
    assert caught.value.why and caught.value.fix


@pytest.mark.parametrize("shape", [{"width": 64}, {"shared": False}, {"dtype": "bfloat16"}])
def test_another_policy_is_refused_and_left_alone(saved, shape):
    other = Trainer(**shape)
    before = other.state()
    with pytest.raises(CheckpointError, match="E404"):
        other.load(saved[0] / "step-000010")
    with pytest.raises(CheckpointError, match="E404"):
        load_weights(saved[0] / "step-000010", other.module, Tensors())
    assert _equal(other.state(), before)


def test_moments_that_do_not_fit_leave_the_weights_alone(saved):
    other = Trainer(seed=9)
    other.module.lm_head.w_out.weight.requires_grad_(False)  # same weights, other moments
    other.optimizer = PolicyOptimizer(other.module, SETTINGS)
    before = other.state()
    with pytest.raises(CheckpointError, match=r"E404.*lm_head\.w_out"):
        other.load(saved[0] / "step-000010")
    assert _equal(other.state(), before)


def test_another_format_is_refused(saved):
    complete = saved[0] / "step-000010" / "complete.json"
    complete.write_text(complete.read_text().replace("checkpoint/v1", "checkpoint/v9"))
    with pytest.raises(CheckpointError, match=r"E405.*checkpoint/v9"):
        saved[1].load(saved[0] / "step-000010")


def test_a_run_without_checkpoints_has_no_newest(tmp_path):
    assert newest_complete(tmp_path / "none").path is None
