"""Checks every answer of an engine before a token of it may be trained on.

Pure functions: JSON in, trajectories out. Each fault has its own code (E23x, routes E24x); nothing
is repaired, cut or padded.

Suffixes: P prompt tokens, N response tokens, R rows = P + N - 1, L layers, K experts per token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles_olmo.base.errors import EngineError
from miles_olmo.wire.protocol import decode_routes
from miles_olmo.wire.trajectory import NO_ROUTE, FinishReason, Segment, Trajectory

LOWEST_LOGPROB = -sys.float_info.max
"""Below it is minus infinity, or an integer that no float can hold."""

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """All samples of one prompt: one request, answered whole or not at all."""

    group_id: int
    """Position in the run's prompt order; also picks the engine."""
    prompt_ids: tuple[int, ...]
    """Token ids of the prompt, at least one."""
    num_samples: int
    """Answers wanted."""
    max_tokens: int
    """Budget of response tokens."""
    temperature: float
    """0 is greedy."""
    seed: int
    """Sample i uses seed + i."""
    stop_token_ids: tuple[int, ...]
    """Sampling ends after one of these."""
    ignore_stop: bool = False
    """Sample the whole budget."""

    def body(self, model_name: str) -> dict[str, Any]:
        """The JSON body of `/v1/completions`."""
        return {
            "model": model_name,
            "prompt": self.prompt_ids,
            "n": self.num_samples,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stop_token_ids": [] if self.ignore_stop else self.stop_token_ids,
            "ignore_eos": self.ignore_stop,
            "logprobs": 0,
            "return_token_ids": True,
        }


@dataclass(frozen=True, slots=True)
class PolicyShape:
    """What answers of the policy look like."""

    vocab_size: int
    """Token ids are below this."""
    num_layers: int
    """L: all layers; routes have a row for each, zeros for a dense one."""
    top_k: int
    """K: experts per token."""
    num_experts: int
    """Expert ids are below this."""
    routes: bool = True
    """Routes are required (router replay) or neither asked for nor kept."""
    routed_layers: tuple[int, ...] | None = None
    """Layers with a router, the only ones whose routes are checked; None for all."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One checked sample."""

    ids: tuple[int, ...]
    """Response tokens `[N]`."""
    logprobs: tuple[float, ...]
    """Of each response token `[N]`."""
    finish_reason: FinishReason
    rows_RLK: np.ndarray | None
    """Experts by input position, as received; None without replay."""


class AnswerCheck:
    """The checks of one answer; `source` names engine and group in every message."""

    def __init__(self, request: GroupRequest, shape: PolicyShape, version: int, source: str):
        self._request = request
        self._shape = shape
        self._version = version
        self._source = source

    def choices(self, answer: Any) -> list[Choice]:
        """The checked samples, in sample order.

        Raises:
            EngineError: E230-E238, E240-E246, one per kind of fault.
        """
        try:
            version, raw = answer["weight_version"], answer["choices"]
            indices = [choice["index"] for choice in raw]
        except (TypeError, KeyError) as error:
            raise self._fault("E230", f"the answer lacks {error}") from error
        if version != self._version:
            raise self._fault(
                "E238",
                f"version {version} answered, version {self._version} is published",
                why="its tokens would carry the wrong behaviour probabilities",
                fix="publish to this engine before it is used",
            )
        if sorted(indices, key=str) != sorted(range(self._request.num_samples), key=str):
            raise self._fault(
                "E231", f"{len(raw)} choices {indices}, asked for {self._request.num_samples}"
            )
        ordered = sorted(raw, key=lambda choice: choice["index"])
        choices = [self._choice(choice) for choice in ordered]
        if self._shape.routes:
            self._check_routes(choices)
        return choices

    def _choice(self, raw: dict[str, Any]) -> Choice:
        index = raw["index"]
        try:
            ids, logprobs = raw["token_ids"], raw["logprobs"]["token_logprobs"]
            reason, prompt_ids = raw["finish_reason"], raw["prompt_token_ids"]
            if not isinstance(ids, list) or not isinstance(logprobs, list):
                raise TypeError("lists of token ids and logprobs")
        except (TypeError, KeyError) as error:
            raise self._fault("E230", f"choice {index} lacks {error}") from error
        if prompt_ids != list(self._request.prompt_ids):
            raise self._fault("E232", f"choice {index} has another prompt than was sent")
        if len(ids) != len(logprobs):
            raise self._fault(
                "E233", f"choice {index} has {len(ids)} tokens and {len(logprobs)} logprobs"
            )
        for token in ids:
            if type(token) is not int or not 0 <= token < self._shape.vocab_size:
                raise self._fault(
                    "E235",
                    f"choice {index} holds token id {token!r}, "
                    f"the vocabulary has {self._shape.vocab_size}",
                )
        for logprob in logprobs:
            if type(logprob) not in (float, int) or not LOWEST_LOGPROB <= logprob <= 0:
                raise self._fault("E236", f"choice {index} holds logprob {logprob!r}")
        self._check_end(index, ids, reason)
        rows_RLK = self._rows(index, raw, len(ids)) if self._shape.routes else None
        return Choice(tuple(ids), tuple(map(float, logprobs)), reason, rows_RLK)

    def _check_end(self, index: int, ids: list[int], reason: Any) -> None:
        """The number of tokens, the stop token and the finish reason must tell one story."""
        request = self._request
        if reason not in ("stop", "length"):
            raise self._fault("E237", f"choice {index} has finish reason {reason!r}")
        if not 1 <= len(ids) <= request.max_tokens:
            raise self._fault(
                "E234", f"choice {index} has {len(ids)} tokens of a budget of {request.max_tokens}"
            )
        if reason == "length" and len(ids) != request.max_tokens:
            raise self._fault(
                "E234",
                f"choice {index} ended by length after {len(ids)} of {request.max_tokens} tokens",
            )
        stop_ids = () if request.ignore_stop else request.stop_token_ids
        if reason == "stop" and ids[-1] not in stop_ids:
            raise self._fault(
                "E237", f"choice {index} stopped after token {ids[-1]}, no stop token"
            )
        early = any(token in stop_ids for token in ids[:-1])
        if early or (reason == "length" and ids[-1] in stop_ids):
            raise self._fault("E237", f"choice {index} went past a stop token or did not report it")

    def _rows(self, index: int, raw: dict[str, Any], num_tokens: int) -> np.ndarray:
        text = raw.get("routed_experts")
        if not text:
            raise self._fault(
                "E240",
                f"choice {index} has no routes",
                why="router replay needs the experts of every input position",
                fix="enable routed experts in the engine, or set train.replay.enabled = false",
            )
        try:
            rows_RLK = decode_routes(text)
        except ValueError as error:
            raise self._fault("E241", f"choice {index}: {error}") from error
        if rows_RLK.dtype not in (np.uint8, np.uint16):
            raise self._fault("E241", f"choice {index} has routes of dtype {rows_RLK.dtype}")
        layers_and_k = (self._shape.num_layers, self._shape.top_k)
        if rows_RLK.ndim != 3 or rows_RLK.shape[1:] != layers_and_k:
            raise self._fault(
                "E243",
                f"choice {index} has routes of shape {list(rows_RLK.shape)}, "
                f"the policy has {layers_and_k[0]} layers and top-{layers_and_k[1]}",
            )
        num_rows = len(self._request.prompt_ids) + num_tokens - 1
        if len(rows_RLK) != num_rows:
            raise self._fault(
                "E242", f"choice {index} has {len(rows_RLK)} route rows, needs {num_rows}"
            )
        return rows_RLK

    def _check_routes(self, choices: Sequence[Choice]) -> None:
        """Values of all rows at once: a group has many short arrays."""
        rows = [choice.rows_RLK for choice in choices if choice.rows_RLK is not None]
        if self._shape.routed_layers is not None:
            rows = [rows_RLK[:, self._shape.routed_layers] for rows_RLK in rows]
        if self._shape.num_experts > 1:
            self._check_filled(rows)
        rows_RLK = np.concatenate(rows)
        highest = int(rows_RLK.max(initial=0))
        if highest >= self._shape.num_experts:
            raise self._fault(
                "E245", f"a route names expert {highest}, the policy has {self._shape.num_experts}"
            )
        sorted_RLK = np.sort(rows_RLK, axis=-1)
        if (sorted_RLK[..., 1:] == sorted_RLK[..., :-1]).any():
            raise self._fault("E246", "a route names one expert twice")

    def _check_filled(self, rows: Sequence[np.ndarray]) -> None:
        # Top-1 may send one short sample to expert 0 throughout, but hardly a whole group.
        empty = [index for index, rows_RLK in enumerate(rows) if not rows_RLK.any()]
        if len(empty) == len(rows) or (empty and self._shape.top_k > 1):
            raise self._fault(
                "E244",
                f"choice {empty[0]} has all-zero routes",
                why="the engine never filled them",
                fix="use a supported engine version",
            )

    def _fault(self, code: str, what: str, *, why: str = "", fix: str = "") -> EngineError:
        return EngineError(
            code,
            f"{self._source}: {what}",
            why=why or "the answer does not fit what was asked",
            fix=fix or "use a supported engine serving the policy that is trained",
            group_id=self._request.group_id,
        )


def trajectory(
    request: GroupRequest, index: int, choice: Choice, version: int, decode: Decode
) -> Trajectory:
    """Two segments, prompt and model, with the routes of every input position (last row -1)."""
    num_prompt, num_response = len(request.prompt_ids), len(choice.ids)
    prompt_routes = response_routes = None
    if choice.rows_RLK is not None:
        shape = (num_prompt + num_response, *choice.rows_RLK.shape[1:])
        routes_TLK = np.full(shape, NO_ROUTE, dtype=np.int16)
        routes_TLK[:-1] = choice.rows_RLK
        prompt_routes, response_routes = routes_TLK[:num_prompt], routes_TLK[num_prompt:]
    prompt = Segment(request.prompt_ids, "prompt", (False,) * num_prompt, None, None, prompt_routes)
    response = Segment(
        choice.ids, "model", (True,) * num_response, choice.logprobs, version, response_routes
    )
    return Trajectory(
        f"{request.group_id}.{index}",
        (prompt, response),
        choice.finish_reason,
        decode(list(choice.ids)),
    )


def is_aborted(answer: Any) -> bool:
    """Whether an engine gave a sample up: the group is then sampled again, whole."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    return isinstance(choices, list) and any(
        isinstance(choice, dict) and choice.get("finish_reason") == "abort" for choice in choices
    )
