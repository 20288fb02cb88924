"""The same weights choose the same tokens in OLMo-core, in the Hugging Face export and in vLLM."""

import json

import pytest
import torch

from miles_olmo.policy.adapter import adapter_for
from miles_olmo.policy.export_tokenizer import ExportTokenizer
from tests.model_zoo import ZOO, load_exported, random_prompts, write_tokenizer
from tests_vllm.engines import core_greedy, engine, policy_of

NUM_PROMPTS, NUM_TOKENS = 64, 12


@pytest.mark.parametrize("name", ZOO)
def test_core_export_and_vllm_agree_on_greedy_tokens(name, tmp_path):
    model, prompts = ZOO[name], random_prompts(NUM_PROMPTS, seed=5)
    module = policy_of(model, seed=3)
    adapter = adapter_for(model.family)
    core = core_greedy(model, module, prompts, NUM_TOKENS)
    tokenizer = ExportTokenizer(write_tokenizer(tmp_path / "tokenizer.json"), "<eos>", "<bos>")
    adapter.export(module, model, tokenizer, tmp_path / "export", plan_digest="0" * 64, step=0)
    exported = load_exported(model, tmp_path / "export")
    with engine(model, tmp_path / "engine") as subject:
        publish(subject, seed=3)
        differences = []
        for prompt, sampled in zip(prompts, core, strict=True):
            tokens, logprobs = subject.greedy(prompt, NUM_TOKENS)
            assert tokens == list(sampled.token_ids)
            assert tokens == greedy_of_export(exported, prompt)
            differences += [abs(a - b) for a, b in zip(logprobs, sampled.logprobs, strict=True)]
    assert max(differences) < 1e-4
    print(json.dumps({"model": name, "max logprob difference": max(differences)}))


def publish(subject, seed):
    import asyncio

    async def once():
        async with subject.client() as client:
            publication = subject.publication(1, seed)
            await client.publish(publication)
            await client.audit(publication)

    asyncio.run(once())


def greedy_of_export(exported, prompt):
    ids = torch.tensor([prompt])
    with torch.no_grad():
        answer = exported.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            use_cache=True,
            eos_token_id=None,
            pad_token_id=0,
        )
    return answer[0, len(prompt) :].tolist()
