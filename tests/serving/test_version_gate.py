"""The gate in front of vLLM's server, around a small application that behaves like it."""

import asyncio
import contextlib
import json

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.routing import Route

from miles_olmo.serving.gate import DIRECTORY_VARIABLE, SILENCE_VARIABLE, VersionGate
from miles_olmo.wire.publication import EXPECTED_NAME, ExpectedTensor, write_expected

NAMES = ("embed", "head")


class Server:
    """What vLLM does, as far as the gate can tell."""

    def __init__(self):
        self.reason = self.refusal = None
        self.fails = set()
        self.open = asyncio.Event()
        self.open.set()
        self.sampling = 0
        self.aborts = 0
        self.paused = False
        self.steps = asyncio.Event()
        self.steps.set()

    async def is_sleeping(self):
        await self.steps.wait()
        if "core" in self.fails:
            raise RuntimeError("the core is dead")
        return False

    async def health(self, request):
        return JSONResponse({}, status_code=503 if "core" in self.fails else 200)

    async def collective_rpc(self, method):
        if method == "miles_give_up_update":
            refusal, self.refusal = self.refusal, None
            return [refusal]
        return [{name: "00" for name in NAMES} if method.endswith("checksums") else {}]

    async def completions(self, request):
        self.sampling += 1
        try:
            await self.open.wait()
        finally:
            self.sampling -= 1
        return JSONResponse({"id": "x", "choices": [{"text": "é" * 50}]})

    async def pause(self, request):
        self.paused = True
        if request.query_params["mode"] == "abort":
            self.aborts += 1
            if self.aborts > 1:  # the first came before the request reached the scheduler
                self.open.set()
        return JSONResponse({"status": "paused"})

    async def step(self, request):
        if request.url.path in self.fails:
            self.refusal = self.reason
            return JSONResponse({"error": {"message": "worker failed"}}, status_code=500)
        return JSONResponse({"message": "done"})


@pytest.fixture
def gate_of(tmp_path, monkeypatch):
    write_expected(tmp_path / EXPECTED_NAME, {name: ExpectedTensor("F32", (2,)) for name in NAMES})
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setenv(SILENCE_VARIABLE, "0.3")

    @contextlib.asynccontextmanager
    async def made():
        server = Server()
        steps = ("resume", "start_weight_update", "update_weights", "finish_weight_update")
        app = Starlette(
            routes=[
                Route("/v1/completions", server.completions, methods=["POST"]),
                Route("/health", server.health),
                Route("/pause", server.pause, methods=["POST"]),
                *(Route(f"/{step}", server.step, methods=["POST"]) for step in steps),
            ],
            middleware=[Middleware(VersionGate)],
        )
        app.state.engine_client = server
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            yield server, client

    return made


def info(version, path, names=NAMES):
    path.touch()
    return {
        "update_info": {
            **{"names": list(names), "dtype_names": ["F32"] * len(names)},
            **{"shapes": [[2]] * len(names), "paths": [str(path)]},
            **{"checksums": dict.fromkeys(names, "00"), "weight_version": version},
        }
    }


async def publish(client, version, path, **changes):
    """Status of each step, up to the first that fails."""
    statuses = []
    for step, body in (
        ("pause?mode=wait", None),
        ("start_weight_update", {}),
        ("update_weights", info(version, path, **changes)),
        ("finish_weight_update", {}),
        ("resume", None),
    ):
        answer = await client.post(f"/{step}", json=body)
        statuses.append(answer.status_code)
        if answer.status_code != 200:
            await client.post("/resume")
            return statuses, answer.json()["error"]
    return statuses, None


async def version_of(client):
    return (await client.get("/weight_version")).json()["weight_version"]


def test_an_answer_carries_its_version_and_is_otherwise_unchanged(gate_of, tmp_path):
    async def work():
        async with gate_of() as (_, client):
            assert await publish(client, 7, tmp_path / "w") == ([200] * 5, None)
            answer = await client.post("/v1/completions", json={})
            content = json.loads(answer.content)
            assert int(answer.headers["content-length"]) == len(answer.content)
            assert content.pop("weight_version") == 7
            assert content == {"id": "x", "choices": [{"text": "é" * 50}]}

    asyncio.run(work())


def test_nothing_is_sampled_before_the_first_version(gate_of):
    async def work():
        async with gate_of() as (server, client):
            answer = await client.post("/v1/completions", json={})
            assert (answer.status_code, answer.json()["error"]["miles"]["code"]) == (503, "E206")
            assert server.sampling == 0

    asyncio.run(work())


@pytest.mark.parametrize("names", [("embed",), ("embed", "head", "tail"), ("embed", "embed")])
def test_an_update_must_name_every_tensor_once(gate_of, tmp_path, names):
    async def work():
        async with gate_of() as (_, client):
            await publish(client, 1, tmp_path / "w")
            statuses, error = await publish(client, 2, tmp_path / "w", names=names)
            assert statuses[-1] == 400
            assert error["miles"]["code"] == "E209"
            assert await version_of(client) == 1
            assert (await publish(client, 3, tmp_path / "w"))[1] is None

    asyncio.run(work())


def test_the_workers_own_reason_reaches_the_trainer(gate_of, tmp_path):
    async def work():
        async with gate_of() as (server, client):
            await publish(client, 1, tmp_path / "w")
            server.fails = {"/update_weights"}
            server.reason = {"code": "E413", "message": "E413: NaN"}
            statuses, error = await publish(client, 2, tmp_path / "w")
            assert statuses[-1] == 400
            assert error["miles"]["code"] == "E413"
            assert await version_of(client) == 1

    asyncio.run(work())


def test_parameters_that_were_replaced_in_part_serve_no_version(gate_of, tmp_path):
    async def work():
        async with gate_of() as (server, client):
            await publish(client, 1, tmp_path / "w")
            server.fails = {"/finish_weight_update"}
            statuses, _ = await publish(client, 2, tmp_path / "w")
            assert statuses[-1] == 500
            assert await version_of(client) is None
            assert (await client.post("/v1/completions", json={})).status_code == 503
            server.fails = set()
            assert (await publish(client, 3, tmp_path / "w"))[1] is None
            assert await version_of(client) == 3

    asyncio.run(work())


def test_a_pause_waits_for_what_was_admitted_and_holds_back_the_rest(gate_of, tmp_path):
    async def work():
        async with gate_of() as (server, client):
            await publish(client, 1, tmp_path / "w")
            server.open.clear()
            first = asyncio.create_task(client.post("/v1/completions", json={}))
            await asyncio.sleep(0.01)
            pausing = asyncio.create_task(client.post("/pause?mode=wait"))
            await asyncio.sleep(0.01)
            second = asyncio.create_task(client.post("/v1/completions", json={}))
            await asyncio.sleep(0.01)
            assert (pausing.done(), second.done(), server.sampling) == (False, False, 1)
            server.open.set()
            assert (await first).json()["weight_version"] == 1
            await pausing
            await client.post("/start_weight_update", json={})
            await client.post("/update_weights", json=info(2, tmp_path / "w"))
            await client.post("/finish_weight_update", json={})
            assert not second.done()
            await client.post("/resume")
            assert (await second).json()["weight_version"] == 2

    asyncio.run(work())


def test_an_abort_is_repeated_until_nothing_is_sampled(gate_of, tmp_path):
    async def work():
        async with gate_of() as (server, client):
            await publish(client, 1, tmp_path / "w")
            server.open.clear()
            first = asyncio.create_task(client.post("/v1/completions", json={}))
            await asyncio.sleep(0.01)
            assert (await client.post("/pause?mode=abort")).status_code == 200
            assert (await first).status_code == 200
            assert server.aborts >= 2

    asyncio.run(work())


def test_an_update_is_refused_while_something_is_sampled(gate_of, tmp_path):
    async def work():
        async with gate_of() as (server, client):
            await publish(client, 1, tmp_path / "w")
            server.open.clear()
            first = asyncio.create_task(client.post("/v1/completions", json={}))
            await asyncio.sleep(0.01)
            answer = await client.post("/start_weight_update", json={})
            assert (answer.status_code, answer.json()["error"]["miles"]["code"]) == (409, "E208")
            server.open.set()
            await first

    asyncio.run(work())


def test_resume_gives_up_an_open_update(gate_of, tmp_path):
    async def work():
        async with gate_of() as (_, client):
            await publish(client, 1, tmp_path / "w")
            await client.post("/pause?mode=wait")
            await client.post("/start_weight_update", json={})
            answer = await client.post("/resume")
            assert answer.json()["gave_up_update"] is True
            answer = await client.post("/finish_weight_update", json={})
            assert answer.json()["error"]["miles"]["code"] == "E208"
            assert (await client.post("/v1/completions", json={})).json()["weight_version"] == 1

    asyncio.run(work())


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'{"update_info": 3}'])
def test_a_malformed_update_is_refused_and_closed(gate_of, tmp_path, body):
    async def work():
        async with gate_of() as (_, client):
            await publish(client, 1, tmp_path / "w")
            await client.post("/start_weight_update", json={})
            answer = await client.post("/update_weights", content=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["miles"]["code"] in ("E204", "E209")
            assert await version_of(client) == 1

    asyncio.run(work())


def test_a_core_that_answers_nothing_is_not_healthy_until_it_does(gate_of):
    async def main():
        async with gate_of() as (server, client):

            async def health():
                return (await client.get("/health")).status_code

            for _ in range(5):
                assert await health() == 200
                await asyncio.sleep(0.1)
            server.steps.clear()
            assert await health() == 200  # a step may take a while
            await asyncio.sleep(0.4)
            answer = await client.get("/health")
            assert answer.status_code == 503 and "core has answered nothing" in answer.text
            server.steps.set()
            await asyncio.sleep(0)
            assert await health() == 200
            server.fails.add("core")
            assert {await health() for _ in range(3)} == {503}  # vLLM's own answer

    asyncio.run(main())
