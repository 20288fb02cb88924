"""More prompt tokens at once than vLLM computes in one step."""

import asyncio

from miles_olmo.rollout.client import GroupRequest
from tests.model_zoo import VOCAB_SIZE

NUM_GROUPS, NUM_SAMPLES, PROMPT_TOKENS = 10, 6, 290


def groups():
    """Seeded groups whose prompts are 17,400 tokens together; a step of vLLM computes some 2,000."""
    prompts = [
        tuple(
            1 + (7 * group + 3 * position) % (VOCAB_SIZE - 2) for position in range(PROMPT_TOKENS)
        )
        for group in range(NUM_GROUPS)
    ]
    return [
        GroupRequest(index, prompt, NUM_SAMPLES, 8, 1.0, 11, (), ignore_stop=True)
        for index, prompt in enumerate(prompts)
    ]


def test_many_long_prompts_are_answered_as_each_of_them_alone(shared):
    async def work():
        async with shared.client(max_restarts=0, retries=0) as client:
            await client.publish(shared.publication(1, 1))
            together = await asyncio.gather(*(client.generate_group(g) for g in groups()))
            alone = [await client.generate_group(group) for group in groups()]
            return together, alone

    together, alone = asyncio.run(work())
    for at_once, one_by_one in zip(together, alone, strict=True):
        assert [t.ids for t in at_once] == [t.ids for t in one_by_one]
