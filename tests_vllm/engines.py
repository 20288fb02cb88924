"""Real vLLM servers on loopback, each with a policy of the zoo, and the trainer's side of it."""

from __future__ import annotations

import contextlib
import json
import os
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from miles_olmo.manifest.models import Manifest, Model
from miles_olmo.policy.adapter import adapter_for
from miles_olmo.policy.export_tokenizer import ExportTokenizer
from miles_olmo.policy.generation import CoreEngineModel
from miles_olmo.policy.publication import write_publication
from miles_olmo.policy.served import write_served
from miles_olmo.rollout.client import FleetClient, PolicyShape
from miles_olmo.rollout.registry import EngineEntry, register
from miles_olmo.serving.command import ServerCommand, server_command
from miles_olmo.serving.server import VllmServer, free_port
from miles_olmo.wire.generation import SampledSequence, SamplingRequest
from miles_olmo.wire.protocol import TOKEN_VARIABLE
from miles_olmo.wire.publication import Publication
from tests.model_zoo import ZOO, write_tokenizer

ROOT = Path(__file__).parents[1]
TOKEN = "a-token-of-these-tests"
DEVICE = os.environ.get("MILES_TEST_DEVICE", "cpu")
"""Where the servers compute: cpu, or cuda on a machine with a GPU."""
ON_CUDA = ("--enforce-eager", "--gpu-memory-utilization", "0.1") if DEVICE == "cuda" else ()
START_SECONDS = 240.0


def manifest_of(model: Model, **engines: Any) -> Manifest:
    """The quickstart with another policy, one vLLM engine and room for long prompts."""
    content = tomllib.loads((ROOT / "manifests" / "quickstart-vllm.toml").read_text())
    content["model"] = model.model_dump(mode="json")
    content["engines"] |= {"request_seconds": 60.0, "health_seconds": 5.0, **engines}
    content["rollout"] |= {"max_prompt_tokens": 300, "max_response_tokens": 64}
    return Manifest.model_validate(content)


def policy_of(model: Model, seed: int) -> nn.Module:
    """A random policy whose norms are not all ones."""
    module = adapter_for(model.family).build(model, None, device=torch.device("cpu"), seed=seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return module.eval()


@dataclass
class Engine:
    """One server and what a trainer needs to use it."""

    model: Model
    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the server's own."""
    arguments: Sequence[str] = ()
    """Added to the server's command line."""
    index: int = 0
    server: VllmServer = field(init=False)

    def start(self, attempt: int = 1) -> None:
        """Start the server, wait for its first answer, register it."""
        served = self.directory / "served"
        if not served.exists():
            tokenizer = write_tokenizer(self.directory / "tokenizer.json")
            write_served(self.model, ExportTokenizer(tokenizer, "<eos>", "<bos>"), served)
        port = free_port("127.0.0.1")
        command = server_command(
            manifest_of(self.model), served, host="127.0.0.1", port=port, device=DEVICE
        )
        command = ServerCommand(
            (*command.argv, *ON_CUDA, *self.arguments), {**command.environment, **self.environment}
        )
        self.server = VllmServer(command, host="127.0.0.1", port=port, token=TOKEN)
        self.server.wait_until_answering(START_SECONDS)
        entry = EngineEntry(self.index, self.server.url, self.server.pid, attempt, "now")
        register(self.directory / "engines", entry)

    def client(self, *, routes: bool = True, **engines: Any) -> FleetClient:
        """A fleet of this engine; short bounds, since tests break things.

        Args:
            routes: Answers must have routes.
            engines: Keys of [engines].
        """
        shape = self.model.shape
        settings = manifest_of(self.model, **engines).engines
        return FleetClient(
            self.directory / "engines",
            TOKEN,
            settings,
            shape=PolicyShape(
                shape.vocab_size,
                shape.num_layers,
                shape.num_experts_per_token,
                shape.num_experts,
                routes=routes,
                routed_layers=shape.routed_layers,
            ),
            decode=lambda ids: " ".join(map(str, ids)),
        )

    def publication(self, version: int, seed: int) -> Publication:
        """Version `version`: the random policy of `seed`."""
        adapter, module = adapter_for(self.model.family), policy_of(self.model, seed)
        return write_publication(
            module, adapter, self.directory / "publish" / f"v{version:06d}", version
        )

    def call(
        self, method: str, path: str, body: Any = None, token: str | None = TOKEN
    ) -> tuple[int, Any]:
        """Status and JSON of one plain HTTP call."""
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.server.url + path, data=data, headers=headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, _json(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, _json(error.read())

    def greedy(self, prompt: Sequence[int], num_tokens: int = 12) -> tuple[list[int], list[float]]:
        """Tokens and logprobs of one greedy answer, whatever it contains."""
        status, answer = self.call(
            "POST",
            "/v1/completions",
            {
                **{"model": "policy", "prompt": list(prompt), "max_tokens": num_tokens},
                **{"temperature": 0.0, "seed": 0, "ignore_eos": True},
                **{"logprobs": 0, "return_token_ids": True},
            },
        )
        assert status == 200, answer
        choice = answer["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@contextlib.contextmanager
def engine(
    model: Model | str,
    directory: Path,
    *,
    environment: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> Iterator[Engine]:
    """A running engine without weights."""
    directory.mkdir(parents=True, exist_ok=True)
    token = directory / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    os.environ[TOKEN_VARIABLE] = str(token)
    made = Engine(
        ZOO[model] if isinstance(model, str) else model,
        directory,
        {TOKEN_VARIABLE: str(token), **(environment or {})},
        arguments,
    )
    made.start()
    try:
        yield made
    finally:
        made.server.stop()


def core_greedy(
    model: Model, module: nn.Module, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[SampledSequence]:
    """Greedy answers of the embedded engine to all prompts, in order."""
    subject = CoreEngineModel(module, adapter_for(model.family), max_batch_size=len(prompts))
    for number, prompt in enumerate(prompts):
        request = SamplingRequest(tuple(prompt), num_tokens, 0.0, number, (), ignore_stop=True)
        subject.add(str(number), request)
    done: dict[str, SampledSequence] = {}
    while subject.num_unfinished:
        done |= dict(subject.step())
    return [done[str(number)] for number in range(len(prompts))]


def _json(content: bytes) -> Any:
    try:
        return json.loads(content) if content else None
    except ValueError:
        return content.decode(errors="replace")
