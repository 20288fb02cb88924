"""The adapter of olmo3moe as the rest of the system sees it."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models

from miles_olmo.base.errors import TrainingError
from miles_olmo.policy.adapter import adapter_for
from miles_olmo.policy.export_tokenizer import ExportTokenizer
from tests.policy.policies import ADAPTER, engine, generate, model_of, pack_of, policy, requests


def test_families_have_adapters_and_others_are_refused():
    assert adapter_for("olmo3moe").name == "olmo3moe"
    with pytest.raises(TrainingError) as caught:
        adapter_for("olmo2")
    assert caught.value.code == "E331"


def test_weights_survive_the_way_to_another_module():
    one, two = policy(seed=0), policy(seed=1)
    ADAPTER.load_tensors(two, dict(ADAPTER.publication_tensors(one)))
    expected = one.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in two.state_dict().items())
    wanted = requests(3)
    pack = pack_of(wanted, generate(engine(seed=0), wanted))
    logprobs_T = ADAPTER.forward(two, pack, temperature=1.0).logprobs_T
    assert torch.equal(logprobs_T[pack.mask_T], pack.behaviour_logprobs_T[pack.mask_T])


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_exports_agree_with_the_policys_logits(tmp_path, router):
    changes = {"router": router, "normalize_expert_weights": router == "sigmoid"}
    vocabulary = {f"t{token}": token for token in range(46)} | {"<bos>": 46, "<eos>": 47}
    Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = ExportTokenizer(tmp_path / "tokenizer.json", eos_token="<eos>", bos_token="<bos>")
    report = ADAPTER.export(
        policy(**changes),
        model_of(**changes),
        tokenizer,
        tmp_path / "export",
        plan_digest="0" * 64,
        step=3,
    )
    assert report["logits_check"]["max_abs_difference"] <= report["logits_check"]["bound"]
    assert (tmp_path / "export" / "config.json").exists()
