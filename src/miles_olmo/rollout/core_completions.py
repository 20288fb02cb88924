"""`/v1/completions` of the core engine: vLLM's fields in, vLLM's answer out.

Every field is either honoured exactly or refused: a sampler that ignored `top_p` would return
logprobs of another distribution than the caller believes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miles_olmo.base.errors import EngineError
from miles_olmo.wire.generation import SampledSequence, SamplingRequest
from miles_olmo.wire.protocol import encode_routes

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1, None),
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "repetition_penalty": (1, None),
    "stream": (False, None),
    "echo": (False, None),
    "stop": (None, []),
    "routed_experts_prompt_start": (0, None),
}
"""Fields of vLLM that are accepted only with a value that changes nothing."""

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one engine accepts."""

    vocab_size: int
    """Token ids are below this."""
    max_sequence_tokens: int
    """Longest prompt plus response."""
    model_name: str = "policy"
    """Name in `/v1/models` and in answers."""
    max_samples: int = 1024
    """Most samples of one request."""
    max_body_bytes: int = 16 * 2**20
    """Longest request body."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A validated request."""

    samples: tuple[SamplingRequest, ...]
    """One per sample; sample i has seed + i, as in vLLM."""
    logprobs: bool
    """Return the sampled tokens' logprobs."""
    token_ids: bool
    """Return prompt and response ids."""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.samples[0].prompt_ids


def parse_completion(body: Any, limits: EngineLimits) -> CompletionRequest:
    """Validate the JSON body of `/v1/completions`.

    Raises:
        EngineError: E204, a field is unknown, malformed or not supported; E205, ids or lengths
            are outside the model's limits.
    """
    if not isinstance(body, dict):
        raise _refused("the body is not a JSON object", "send one object")
    fields = dict(body)
    for name, accepted in NEUTRAL.items():
        value = fields.pop(name, None)
        if not any(value is one or (value == one and type(value) is not bool) for one in accepted):
            raise _refused(
                f"{name} = {value!r} is not supported", f"leave {name} out, or send {accepted[0]!r}"
            )
    model = fields.pop("model", limits.model_name)
    if model != limits.model_name:
        raise _refused(f"model {model!r} is not served", f"send {limits.model_name!r}")
    prompt = _prompt(fields.pop("prompt", None), limits)
    num_samples = _integer(fields, "n", 1, limits.max_samples, default=1)
    max_tokens = _integer(fields, "max_tokens", 1, None)
    seed = _integer(fields, "seed", 0, MAX_SEED - num_samples)
    temperature = fields.pop("temperature", 1.0)
    if type(temperature) not in (int, float) or not 0 <= temperature <= sys.float_info.max:
        raise _refused(f"temperature = {temperature!r} is not a number >= 0", "send 1.0")
    stop_ids = _ids("stop_token_ids", fields.pop("stop_token_ids", None) or [], limits)
    ignore_stop = _boolean(fields, "ignore_eos")
    if ignore_stop and stop_ids:
        raise _refused("ignore_eos and stop_token_ids contradict each other", "send one of the two")
    logprobs = fields.pop("logprobs", None)
    if logprobs is not None and (type(logprobs) is not int or logprobs != 0):
        raise _refused(
            f"logprobs = {logprobs!r} asks for alternatives to the sampled token", "send 0"
        )
    token_ids = _boolean(fields, "return_token_ids")
    if fields:
        raise _refused(f"unknown field {sorted(fields)[0]!r}", "leave it out")
    if len(prompt) + max_tokens > limits.max_sequence_tokens:
        raise EngineError(
            "E205",
            f"a prompt of {len(prompt)} tokens and max_tokens = {max_tokens} exceed the longest "
            f"sequence of {limits.max_sequence_tokens}",
            why="the model has no positions beyond it",
            fix="shorten the prompt or lower max_tokens",
        )
    samples = tuple(
        SamplingRequest(prompt, max_tokens, float(temperature), seed + index, stop_ids, ignore_stop)
        for index in range(num_samples)
    )
    return CompletionRequest(samples, logprobs is not None, token_ids)


def completion_answer(
    request: CompletionRequest,
    sequences: Sequence[SampledSequence | None],
    version: int,
    model_name: str,
    request_id: str,
) -> dict[str, Any]:
    """vLLM's answer, plus `weight_version`. The engine has no tokenizer: `text` stays empty."""
    num_sampled = sum(len(sequence.token_ids) for sequence in sequences if sequence)
    num_prompt = len(request.prompt_ids)
    return {
        "id": request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model_name,
        "weight_version": version,
        "choices": [_choice(request, index, sequence) for index, sequence in enumerate(sequences)],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        },
    }


def _choice(
    request: CompletionRequest, index: int, sequence: SampledSequence | None
) -> dict[str, Any]:
    token_ids: tuple[int, ...] = sequence.token_ids if sequence else ()
    logprobs: tuple[float, ...] = sequence.logprobs if sequence else ()
    finish_reason = sequence.finish_reason if sequence else "abort"
    return {
        "index": index,
        "text": "",
        "finish_reason": finish_reason,
        "stop_reason": token_ids[-1] if token_ids and finish_reason == "stop" else None,
        "logprobs": {
            "tokens": [f"token_id:{token}" for token in token_ids],
            "token_logprobs": logprobs,
        }
        if request.logprobs
        else None,
        "prompt_token_ids": request.prompt_ids if request.token_ids else None,
        "token_ids": token_ids if request.token_ids else None,
        "routed_experts": encode_routes(sequence.routes) if sequence else None,
    }


def _prompt(prompt: Any, limits: EngineLimits) -> tuple[int, ...]:
    if not isinstance(prompt, list) or not prompt:
        raise _refused("prompt is not a list of token ids", "send at least one token id")
    return _ids("prompt", prompt, limits)


def _ids(name: str, ids: Any, limits: EngineLimits) -> tuple[int, ...]:
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        raise _refused(f"{name} is not one list of token ids", "send integers")
    outside = next((token for token in ids if not 0 <= token < limits.vocab_size), None)
    if outside is not None:
        raise EngineError(
            "E205",
            f"{name} holds token id {outside}",
            why=f"the vocabulary has {limits.vocab_size} tokens",
            fix="check that tokenizer and model fit",
        )
    return tuple(ids)


def _integer(
    fields: dict[str, Any], name: str, low: int, high: int | None, default: int | None = None
) -> int:
    value = fields.pop(name, default)
    if type(value) is not int or value < low or (high is not None and value > high):
        span = f">= {low}" if high is None else f"in {low}..{high}"
        raise _refused(f"{name} = {value!r} is not an integer {span}", f"send {name}")
    return value


def _boolean(fields: dict[str, Any], name: str) -> bool:
    value = fields.pop(name, False)
    if type(value) is not bool:
        raise _refused(f"{name} = {value!r} is not true or false", f"send {name} as a boolean")
    return value


def _refused(what: str, fix: str) -> EngineError:
    return EngineError("E204", what, why="the core engine cannot honour it", fix=fix)
