"""Codes of training: loss, packing, replay, warm-up (E3xx)."""

from miles_olmo.base.codes.entry import EXIT_RUN, Code

_UPDATE: tuple[Code, ...] = (
    Code(
        code="E310",
        title="the gradient is NaN or infinite",
        cause="A backward pass overflowed, or the loss had no finite derivative. The step was stopped "
        "before the optimizer, so weights and moments are unchanged.",
        example="train.optimizer.learning_rate = 10.0",
        fix="Lower the learning rate or max_grad_norm and resume from the last checkpoint.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E311",
        title="a sequence is longer than a pack",
        cause="Packs never split a sequence, so prompt plus response must fit into one.",
        example="[train.packing]\nmax_tokens = 16        # with max_response_tokens = 32",
        fix="Raise train.packing.max_tokens to max_prompt_tokens + max_response_tokens or more.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E312",
        title="a reward is NaN, infinite or missing",
        cause="A verifier returned something that no advantage can be computed from.",
        example="def verify(answer, truth): return float('nan')",
        fix="Return a finite number from the verifier, or raise, which fails the sample visibly.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E313",
        title="a batch has no trained token",
        cause='Every answer was masked, for example because all were truncated with truncated = "mask".',
        example='[rollout]\nmax_response_tokens = 1\ntruncated = "mask"',
        fix='Raise rollout.max_response_tokens, or set rollout.truncated = "score".',
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E314",
        title="the loss needs logprobs that were not computed",
        cause="Truncated importance sampling needs the proximal policy's logprobs, a KL penalty needs "
        "the reference policy's.",
        example="[algorithm.kl]\ncoefficient = 0.01     # and packs without reference logprobs",
        fix="Compute them with the trainer before the step's first update, or switch the term off.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E315",
        title="the loss is NaN or infinite",
        cause="The policy's logprobs, or the engine's, are not finite for the named sequences.",
        example="train.optimizer.learning_rate = 10.0",
        fix="Look at the named samples, lower the learning rate, resume from the last checkpoint.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E316",
        title="engines recorded too few routes",
        cause="Router replay was asked for, but the share of recorded routes is below the bound.",
        example="[train.replay]\nenabled = true\nmin_coverage = 1.0   # with an engine that returns none",
        fix="Use an engine that returns routed experts, lower min_coverage, or switch replay off.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E317",
        title="a sample's parts do not fit together",
        cause="Ids, mask, logprobs and routes of a sample speak about different tokens, or it was "
        "aborted.",
        example="an engine that returns 5 logprobs for 6 tokens",
        fix="Check the engine's version; the sample id and the mismatch are in the message.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E318",
        title="experts collapsed",
        cause="The named experts got almost no token for many steps in a row, and the manifest asks to "
        "stop then. A checkpoint of the last step was saved before.",
        example='[train.collapse_alarm]\naction = "stop"',
        fix="Set train.load_balancing_loss (or a lower learning rate) and resume with "
        "--accept-changes. A resume goes on; only other experts stop the run again.",
        exit_code=EXIT_RUN,
    ),
)

_RANKS: tuple[Code, ...] = (
    Code(
        code="E300",
        title="a trainer process lost another one",
        cause="The trainer is several processes, and one of them ended while another waited for it. "
        "The run shows the error of the one that ended first.",
        example="kill -9 of trainer-rank-1 with train.parallel.expert = 2",
        fix="Look at the logs of the other trainer processes: miles logs RUN --job trainer-rank-1.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E301",
        title="a trainer process did not come in time",
        cause="All trainer processes take part in every exchange; the named ones did not within "
        "train.parallel.timeout_seconds. They hang, or were much slower than the others.",
        example="kill -STOP of trainer-rank-1 with train.parallel.expert = 2",
        fix="Look at their logs; raise train.parallel.timeout_seconds if they only were slow.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E302",
        title="torch sees no GPU",
        cause="The plan trains on GPUs, nvidia-smi lists them, and torch cannot use them: it is a build "
        "for CPUs, or newer than the driver.",
        example='[launch]\ndevice = "cuda"     # with torch from the CPU index',
        fix="Run miles doctor; install a CUDA build of torch that fits the driver.",
        exit_code=EXIT_RUN,
    ),
)

ENTRIES: tuple[Code, ...] = (*_RANKS, *_UPDATE)
