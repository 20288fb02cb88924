"""Every endpoint of the server asks for the run's token; `/health` alone does not."""

from pathlib import Path

import pytest


def paths_of(shared):
    status, schema = shared.call("GET", "/openapi.json")
    assert status == 200
    return [
        (method.upper(), path)
        for path, methods in schema["paths"].items()
        for method in methods
        if path != "/health"
    ]


def test_no_endpoint_but_health_answers_without_the_token(shared):
    found = paths_of(shared)
    assert {("POST", "/pause"), ("POST", "/collective_rpc"), ("POST", "/v1/completions")} <= set(
        found
    )
    ours = [("GET", "/weight_version"), ("GET", "/weight_checksums"), ("GET", "/engine")]
    for method, path in [*found, *ours, ("GET", "/metrics"), ("GET", "/docs"), ("POST", "/health")]:
        for token in (None, "", "another"):
            assert shared.call(method, path, token=token)[0] == 401, (method, path)
    assert shared.call("GET", "/health", token=None)[0] == 200


def test_the_token_is_in_no_command_line(shared):
    command = Path(f"/proc/{shared.server.pid}/cmdline").read_bytes()
    assert b"a-token-of-these-tests" not in command


@pytest.mark.parametrize("mode", ["keep", "forever"])
def test_a_pause_that_would_mix_versions_is_refused(shared, mode):
    status, answer = shared.call("POST", f"/pause?mode={mode}")
    assert (status, answer["error"]["miles"]["code"]) == (400, "E204")


def test_the_engine_describes_what_it_serves(shared):
    status, described = shared.call("GET", "/engine")
    assert status == 200
    assert described["architecture"] == "Olmo3MoeForCausalLM"
    assert described["logprobs_mode"] == "processed_logprobs"
    assert described["routed_experts"] is True
