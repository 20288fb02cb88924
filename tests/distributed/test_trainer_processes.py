"""Expert and data parallelism on real process groups: the same numbers, and one honest failure.

`rank_program` runs every scenario once; the tests read what its processes wrote.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_olmo.policy.checkpoint import verify_checkpoint
from miles_olmo.policy.rank_messages import Message, decode, encode
from miles_olmo.policy.tensor_files import read_tensors

pytestmark = pytest.mark.process

SPREAD = ["1x2", "2x1", "2x2"]
"""data x expert"""
CASES = [
    "replay",
    "replay, recompute",
    "native",
    "native, recompute",
    "one rank",
    "one pack",
    "clipped",
    "three updates",
    "dense first layer",
    "olmoe",
]
BOUND = 1e-5
SAME_BITS = ("train/train_rollout_logprob_abs_diff_max", "router/native_mismatch")
"""Each token's logprob and route are those of one process, however it was packed and wherever its
experts are (see `miles_olmo.policy.numerics`)."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of all results; every scenario has ended as it should."""
    directory = tmp_path_factory.mktemp("ranks")
    program = Path(__file__).with_name("rank_program.py")
    ended = subprocess.run(
        [sys.executable, str(program), str(directory)],
        env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout
    codes = read(directory / "codes.json")
    faults = {"absent": [1, 1, 0], "killed": [0, -9, 0, 0], "hang": [0, 3, 0, 0]}
    for name, found in codes.items():
        assert found == faults.get(name, [0] * len(found)), f"{name}: {found}\n{ended.stdout}"
    return directory


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def largest_difference(one: dict, other: dict, prefix: str) -> float:
    """Largest difference of tensors with a prefix, relative to the largest value among them."""
    names = [name for name in one if name.startswith(prefix)]
    assert names and one.keys() == other.keys()
    largest = max(float(one[name].float().abs().max()) for name in names)
    return (
        max(float((one[name].float() - other[name].float()).abs().max()) for name in names)
        / largest
    )


@pytest.mark.parametrize("topology", SPREAD)
@pytest.mark.parametrize("case", CASES)
def test_logits_gradients_and_the_updated_weights_are_those_of_one_process(
    results: Path, case: str, topology: str
):
    one = read_tensors(results / f"{case}-1x1.safetensors")
    spread = read_tensors(results / f"{case}-{topology}.safetensors")
    assert torch.equal(one["logits"], spread["logits"])
    assert largest_difference(one, spread, "exp_avg.") <= BOUND  # the gradient, up to a factor
    assert largest_difference(one, spread, "weight.") <= BOUND


@pytest.mark.parametrize("topology", SPREAD)
@pytest.mark.parametrize("case", CASES)
def test_metrics_are_those_of_one_process(results: Path, case: str, topology: str):
    of_one = read(results / f"{case}-1x1.json")
    of_spread = read(results / f"{case}-{topology}.json")
    assert of_spread["counts"] == of_one["counts"]
    one, spread = of_one["metrics"], of_spread["metrics"]
    assert spread == pytest.approx(one, rel=BOUND, abs=1e-6)
    assert spread.keys() == one.keys()
    for name in SAME_BITS:
        assert spread[name] == one[name], name


@pytest.mark.parametrize("topology", SPREAD)
def test_bfloat16_differs_by_a_few_roundings(results: Path, topology: str):
    one = read_tensors(results / "bfloat16-1x1.safetensors")
    spread = read_tensors(results / f"bfloat16-{topology}.safetensors")
    assert torch.equal(one["logits"], spread["logits"])
    assert largest_difference(one, spread, "exp_avg.") <= 0.01


@pytest.mark.parametrize("topology", SPREAD)
@pytest.mark.parametrize("case", [*CASES, "bfloat16"])
def test_processes_that_hold_the_same_weights_hold_the_same_bits(
    results: Path, case: str, topology: str
):
    assert read(results / f"{case}-{topology}.json")["agree"]


@pytest.mark.parametrize("topology", SPREAD)
def test_a_warm_up_and_its_steps_back_are_those_of_one_process(results: Path, topology: str):
    one = read(results / "warmup-1x1.json")
    spread = read(results / f"warmup-{topology}.json")
    assert spread == [pytest.approx(values, rel=BOUND) for values in one]
    assert spread[1:3] == spread[3:5]


def test_publications_and_checkpoints_have_the_bytes_of_one_process(results: Path):
    one, spread = results / "files-1x1", results / "files-2x2"
    same = [path.relative_to(one) for path in (one / "publish").iterdir()]
    same += [
        Path("checkpoints/step-000000") / name
        for name in ("weights.safetensors", "optimizer.safetensors")
    ]
    assert len(same) > 3
    for path in same:
        assert (one / path).read_bytes() == (spread / path).read_bytes(), path


def test_a_checkpoint_is_complete_and_names_its_topology(results: Path):
    state = verify_checkpoint(results / "resume" / "checkpoints" / "step-000001")
    assert state.topology == {"data": 2, "expert": 2}


def test_a_resume_continues_bit_for_bit_with_the_generators_of_every_process(results: Path):
    assert read(results / "resumed.json") == read(results / "went-on.json")
    ranks = [read(results / f"resumed-{rank}.json") for rank in range(4)]
    assert ranks == [read(results / f"went-on-{rank}.json") for rank in range(4)]
    assert len({draw for _, draw in ranks}) == 4


def test_a_resume_with_another_topology_is_refused(results: Path):
    error = read(results / "other-topology.json")
    assert error["code"] == "E403"
    assert "{'data': 2, 'expert': 2}" in error["what"]


def noticed(results: Path, kind: str, rank: int) -> tuple[dict[str, Any], float]:
    """What a process said, and how many seconds after the broken step had begun."""
    failure, moment = read(results / f"{kind}-{rank}.json")
    return failure, moment - read(results / f"{kind}-started.json")


def test_an_error_of_one_process_is_its_own_with_the_sample_ids_and_ends_the_others(results: Path):
    failure, _ = noticed(results, "nan", 1)
    assert failure["code"] == "E315"
    assert failure["details"]["sample_ids"]
    for rank in (0, 2, 3):
        failure, seconds = noticed(results, "nan", rank)
        assert failure["code"] == "E300"
        assert seconds < 30  # of a timeout of 60


def test_the_death_of_one_process_ends_the_others_before_any_timeout(results: Path):
    for rank in (0, 2, 3):
        failure, seconds = noticed(results, "killed", rank)
        assert failure["code"] == "E300"
        assert seconds < 30  # of a timeout of 60


def test_a_process_that_hangs_is_named_by_those_that_waited_for_it(results: Path):
    waited_in_vain = []
    for rank in (0, 2, 3):
        failure, seconds = noticed(results, "hang", rank)
        assert failure["code"] in ("E300", "E301")
        assert seconds < 3 + 3 + 4  # the timeout, the roll call, and room for a loaded machine
        if failure["code"] == "E301":
            waited_in_vain.append(failure["details"]["missing"])
    assert waited_in_vain and all(missing == [1] for missing in waited_in_vain)


def test_a_process_that_does_not_start_is_named(results: Path):
    named = [read(results / f"absent-{rank}.json") for rank in (0, 1)]
    # The leader's store may be gone before the other has asked it who is missing.
    assert named[0]["code"] == "E301" and named[0]["details"]["missing"] == [2]
    assert named[1]["code"] in ("E300", "E301")


def test_a_message_arrives_as_it_was_sent():
    tensors = {
        "empty": torch.zeros(0, 3),
        "odd": torch.arange(3, dtype=torch.uint8),
        "bits": torch.tensor([True, False]),
        "half": torch.randn(5).bfloat16(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "strided": torch.arange(12).view(3, 4).T,
    }
    received = decode(encode(Message({"a": [1, None, "ü"]}, tensors)))
    assert received.values == {"a": [1, None, "ü"]}
    assert received.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert received.tensors[name].dtype == tensor.dtype
        assert torch.equal(received.tensors[name], tensor)
