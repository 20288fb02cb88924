"""An engine job of kind `vllm`: an unmodified vLLM server with this project's plug-in."""

from __future__ import annotations

import os
from typing import Any

from miles_olmo.base.errors import EngineError
from miles_olmo.jobs.entry import JobContext, run_job
from miles_olmo.jobs.inputs import checked_input
from miles_olmo.policy.export_tokenizer import ExportTokenizer
from miles_olmo.policy.served import write_served
from miles_olmo.records.receipts import utc_now
from miles_olmo.rollout.registry import EngineEntry, register
from miles_olmo.serving.command import server_command
from miles_olmo.serving.server import VllmServer, check_description, free_port, port_was_taken

PORT_TRIES = 3
"""Another program may take a free port before the server binds it."""


def run_engine(context: JobContext) -> None:
    """Serve until SIGTERM. The engine starts without weights; it answers once it has been sent some.

    Raises:
        EngineError: E210 to E213, the server did not start, is not what was planned, or died.
    """
    manifest = context.plan.manifest
    data = manifest.data
    served = context.run.served(context.index)
    tokenizer = ExportTokenizer(
        checked_input(context, "data.tokenizer"), data.eos_token, data.bos_token
    )
    write_served(manifest.model, tokenizer, served)
    server = _started(context)
    try:
        described = server.ask("/engine")
        check_description(manifest, server.ask("/version"), described)
        entry = EngineEntry(context.index, server.url, os.getpid(), context.attempt, utc_now())
        register(context.run.engines, entry)
        context.receipts.append(
            "engine-listening",
            {"attempt": context.attempt, "engine": described, **_cache_note(context, described)},
        )
        raise server.wait_for_end()
    finally:
        server.stop()


def _started(context: JobContext) -> VllmServer:
    """The server, answering; tried again on another port where the first was taken meanwhile."""
    manifest, seconds = context.plan.manifest, context.plan.manifest.engines.startup_seconds
    for last in (*[False] * (PORT_TRIES - 1), True):
        port = context.port or free_port(context.host)
        command = server_command(
            manifest,
            context.run.served(context.index),
            host=context.host,
            port=port,
            device=manifest.launch.device,
        )
        server = VllmServer(command, host=context.host, port=port, token=context.read_token())
        try:
            server.wait_until_answering(seconds)
            return server
        except EngineError as error:
            server.stop()
            if last or context.port or not port_was_taken(error):
                raise
        except BaseException:
            server.stop()
            raise
    raise AssertionError("the last try returns or raises")


def _cache_note(context: JobContext, described: dict[str, Any]) -> dict[str, str]:
    """A prompt shorter than a block of the cache is never found in it."""
    block, longest = described["block_size"], context.plan.manifest.rollout.max_prompt_tokens
    if not described["prefix_caching"] or longest > block:
        return {}
    return {
        "prefix_cache": f"never hit: a block holds {block} tokens, prompts have at most {longest}"
    }


if __name__ == "__main__":
    run_job("engine", run_engine)
