"""Starting and watching the server's process, with small programs in vLLM's place."""

import os
import signal
import socket
import sys
import textwrap
import time
import tomllib

import pytest

from miles_olmo.base.errors import EngineError
from miles_olmo.base.processes import descendants
from miles_olmo.manifest.models import Manifest
from miles_olmo.serving.command import ServerCommand, kv_cache_gib, server_command
from miles_olmo.serving.server import VllmServer, check_description, free_port, port_was_taken

ANSWERING = """
    import http.server, sys, threading, time

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = b'{"version": "0.30.0"}' if self.headers["Authorization"] else b""
            self.send_response(200 if body or self.path == "/health" else 401)
            self.end_headers()
            self.wfile.write(body)
        def log_message(self, *arguments): pass

    server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
"""


@pytest.fixture
def started():
    servers = []

    def start(program):
        port = free_port("127.0.0.1")
        argv = (sys.executable, "-c", textwrap.dedent(program), str(port))
        server = VllmServer(ServerCommand(argv, {}), host="127.0.0.1", port=port, token="secret")
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


def test_a_server_that_ends_while_it_starts_is_quoted(started):
    server = started("import sys; print('loading'); sys.exit('RuntimeError: no such kernel')")
    with pytest.raises(EngineError, match=r"E210.*exited with code 1") as caught:
        server.wait_until_answering(20)
    assert "RuntimeError: no such kernel" in caught.value.why
    assert caught.value.details["last_lines"] == ["loading", "RuntimeError: no such kernel"]


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_port_that_another_program_took_is_told_from_other_failures(started, is_taken):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1] if is_taken else 0
        server = started(
            f"import socket, sys; socket.socket().bind(('127.0.0.1', {port})); sys.exit('no kernel')"
        )
        with pytest.raises(EngineError, match="E210") as caught:
            server.wait_until_answering(20)
    assert port_was_taken(caught.value) == is_taken


def test_a_server_that_never_answers_is_given_up_in_time(started):
    server = started("import time; print('thinking', flush=True); time.sleep(60)")
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"E210.*does not answer after 1 s"):
        server.wait_until_answering(1)
    assert time.monotonic() - began < 5


def test_the_end_of_a_serving_server_is_an_error_with_its_last_lines(started):
    server = started(ANSWERING + "\n    time.sleep(1); sys.exit('CUDAError: gone')")
    server.wait_until_answering(20)
    assert server.ask("/version") == {"version": "0.30.0"}
    error = server.wait_for_end()
    assert error.code == "E212"
    assert "CUDAError: gone" in error.why


HARMLESS = "(APIServer pid=1) WARNING 12-06 19:08:27 [a.py:9] errors like `OSError: [Errno 24]`"
RAISED = "(Worker pid=3) ERROR 12-06 19:09:09 [b.py:5] RuntimeError: CPU Generator has no offset"
FOLLOWED = [
    "(EngineCore pid=2) ERROR 12-06 19:09:09 [c.py:8]     raise RuntimeError(",
    "(EngineCore pid=2) ERROR 12-06 [c.py:8] RuntimeError: Worker failed with error 'CPU Generator', "
    "please check the stack trace above for the root cause",
    *["(APIServer pid=1) ERROR vllm.v1.engine.exceptions.EngineDeadError: encountered an issue."]
    * 40,
    "asyncio.exceptions.CancelledError",
]
DIED = "(EngineCore pid=2) ERROR 12-06 [m.py:3] Worker proc VllmWorker-0 died unexpectedly"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([HARMLESS, RAISED, *FOLLOWED], RAISED),
        ([HARMLESS, DIED, *FOLLOWED[2:]], DIED),
        ([RAISED, "wait", DIED, *FOLLOWED[2:]], DIED),
        ([RAISED, "wait", "bye", ""], "bye"),
        ([], "nothing"),
    ],
)
def test_the_cause_of_an_end_is_found_among_what_follows_from_it(
    started, monkeypatch, lines, cause
):
    monkeypatch.setattr("miles_olmo.serving.server.CAUSE_SECONDS", 1.0)
    show = f"""
    for line in {lines!r}:
        time.sleep(2) if line == "wait" else print(line, flush=True)
    """
    server = started("    import time" + show)
    assert server.wait_for_end().why == f"its output says: {cause}"


def test_a_server_that_ignores_sigterm_is_killed(started, monkeypatch):
    monkeypatch.setattr("miles_olmo.serving.server.STOP_SECONDS", 0.3)
    ignore = "\n    import signal; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    server = started(ANSWERING + ignore)
    server.wait_until_answering(20)
    server.stop()
    assert "killed by signal 9" in server.wait_for_end().what


def test_what_a_killed_server_started_does_not_outlive_it(started):
    nested = "import subprocess, sys; subprocess.run(['sleep', '60'])"
    children = f"\n    import subprocess; subprocess.Popen([sys.executable, '-c', {nested!r}])"
    server = started(ANSWERING + children + "; time.sleep(60)")
    server.wait_until_answering(20)
    deadline = time.monotonic() + 20
    while len(left := descendants(server.pid)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    server.wait_until_answering(20)
    os.kill(server.pid, signal.SIGKILL)
    assert server.wait_for_end().code == "E212"
    assert all(process.is_alive for process in left)
    server.stop()
    deadline = time.monotonic() + 5
    while any(process.is_alive for process in left):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def manifest(quickstart, **engines):
    content = tomllib.loads((quickstart.parent / "quickstart-vllm.toml").read_text())
    content["engines"] |= engines
    return Manifest.model_validate(content)


def described(quickstart):
    return {
        **{"architecture": "Olmo3MoeForCausalLM", "dtype": "float32", "routed_experts": True},
        **{"logprobs_mode": "processed_logprobs", "max_model_len": 64},
    }


def test_a_server_that_is_what_was_planned_passes(quickstart):
    check_description(manifest(quickstart), {"version": "0.26.1+cpu"}, described(quickstart))


@pytest.mark.parametrize("version", [{"version": "0.25.9"}, {"version": "0.31.0"}, {}, None, "x"])
def test_an_untested_version_is_refused(quickstart, version):
    with pytest.raises(EngineError, match="E213"):
        check_description(manifest(quickstart), version, described(quickstart))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("logprobs_mode", "raw_logprobs"),
        ("architecture", "TransformersMoEForCausalLM"),
        ("dtype", "bfloat16"),
        ("routed_experts", False),
        ("max_model_len", 32),
    ],
)
def test_a_server_that_differs_from_the_plan_is_refused_by_name(quickstart, key, value):
    with pytest.raises(EngineError, match=f"E211.*{key}"):
        found = {**described(quickstart), key: value}
        check_description(manifest(quickstart), {"version": "0.30.0"}, found)


def test_the_command_line_holds_no_secret_and_puts_the_token_check_in_front(quickstart, tmp_path):
    command = server_command(manifest(quickstart), tmp_path, host="127.0.0.1", port=8000)
    middleware = [
        b for a, b in zip(command.argv, command.argv[1:], strict=False) if a == "--middleware"
    ]
    assert middleware[-1] == "miles_olmo.rollout.auth.BearerAuth"
    assert "--enable-return-routed-experts" in command.argv
    assert command.argv[command.argv.index("--host") + 1] == "127.0.0.1"
    assert not any(
        value for name, value in command.environment.items() if "TOKEN" in name or "KEY" in name
    )
    # A key of the user's own would make vLLM refuse every request that has the run's token.
    assert command.environment["VLLM_API_KEY"] == ""


def test_on_a_cpu_no_prompt_is_computed_in_parts(quickstart, tmp_path):
    def argv(of, device="cpu"):
        return server_command(of, tmp_path, host="127.0.0.1", port=1, device=device).argv

    small = manifest(quickstart)
    shape = small.model.shape.model_copy(update={"max_position_embeddings": 5000})
    long = small.model_copy(update={"model": small.model.model_copy(update={"shape": shape})})
    wide = manifest(quickstart, max_batch_size=3000)
    for each, tokens in ((small, "2048"), (long, "5000"), (wide, "3000")):
        assert "--no-enable-chunked-prefill" in argv(each)
        assert argv(each)[argv(each).index("--max-num-batched-tokens") + 1] == tokens
    assert not {"--no-enable-chunked-prefill", "--max-num-batched-tokens"} & set(argv(long, "cuda"))


def test_the_cache_holds_every_sequence_of_a_full_batch(quickstart):
    small = manifest(quickstart, max_batch_size=1)
    assert kv_cache_gib(small) == 1
    shape = small.model.shape.model_copy(update={"num_layers": 64, "num_key_value_heads": 64})
    big = small.model_copy(
        update={
            "model": small.model.model_copy(update={"shape": shape}),
            "engines": small.engines.model_copy(update={"max_batch_size": 256}),
        }
    )
    per_token = 2 * 64 * 64 * 32 * 4
    assert kv_cache_gib(big) * 2**30 >= 256 * 256 * per_token
