"""Codes of checks of a plan (E101-E122, E140-E147); those of its input files are in `inputs`."""

from miles_olmo.base.codes import inputs
from miles_olmo.base.codes.entry import EXIT_MANIFEST, EXIT_STALE, Code

_CHECKS: tuple[Code, ...] = (
    Code(
        code="E101",
        title="width is not a multiple of 8",
        cause="hidden_size, head_dim and the experts' inner widths must be multiples of 8: "
        "grouped matrix products need rows of whole 16-byte words in bfloat16.",
        example="[model.shape]\nhidden_size = 100",
        fix="Use a multiple of 8.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E102",
        title="heads do not divide",
        cause="Each key-value head serves the same number of query heads.",
        example="[model.shape]\nnum_attention_heads = 4\nnum_key_value_heads = 3",
        fix="Let num_key_value_heads divide num_attention_heads.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E103",
        title="more experts per token than experts",
        cause="A token can be sent to an expert only once.",
        example="[model.shape]\nnum_experts = 4\nnum_experts_per_token = 8",
        fix="Lower num_experts_per_token or raise num_experts.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E104",
        title="tensor, pipeline or context parallelism in the trainer",
        cause="The mixture-of-experts trainer spreads over data and experts only: routes are "
        "replayed by whole sequences on whole layers.",
        example="[train.parallel]\ntensor = 2",
        fix="Leave tensor, pipeline and context at 1.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E105",
        title="several packs per microbatch",
        cause="A microbatch is one pack: attention and replayed routes are isolated by document "
        "inside one row.",
        example="[train.packing]\npacks_per_microbatch = 2",
        fix="Leave packs_per_microbatch at 1 and raise max_tokens instead.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E106",
        title="tensor parallelism in an engine",
        cause="Routes are recorded by engines that hold the whole model; tensor-parallel engines "
        "would also change the rounding of logprobs.",
        example="[engines]\ntensor_parallel = 2",
        fix="Leave tensor_parallel at 1 and raise engines.count instead.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E107",
        title="time-shared colocation by offload",
        cause="Engines and trainer would take turns on one device and move their memory out in "
        "between; publication and health checks need both to be alive.",
        example='[engines]\ncolocate = "offload"',
        fix='Set colocate = "none", or "resident" if trainer and engine fit on one GPU together.',
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E108",
        title="experts that cannot be spread evenly",
        cause="Each of train.parallel.expert processes holds the same number of experts of every "
        "routed layer.",
        example="[train.parallel]\nexpert = 3                # with num_experts = 8",
        fix="Set expert to a divisor of model.shape.num_experts; use data for more processes.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E109",
        title="vLLM has no kernel for this shape",
        cause="On a CPU, vLLM computes attention and experts for some widths only.",
        example='[engines]\nkind = "vllm"\n[model.shape]\nhead_dim = 16',
        fix='Choose the width that the message names, or set kind = "core" in [engines].',
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E110",
        title="group baseline of one answer",
        cause="An answer is compared with the other answers to its prompt: with one answer every "
        "advantage is 0 and nothing is learned.",
        example="[rollout]\nsamples_per_prompt = 1",
        fix='Sample at least 2, or set algorithm.advantage.baseline and std to "none".',
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E111",
        title="truncated sampling",
        cause="With top_p or top_k the engine samples from a truncated distribution, whose "
        "logprobs are not those that the trainer computes.",
        example="[rollout]\ntop_p = 0.9",
        fix="Leave top_p at 1.0 and top_k at 0; use temperature instead.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E112",
        title="greedy rollouts",
        cause="At temperature 0 all answers to a prompt are equal, and the sampled distribution "
        "has no logprobs.",
        example="[rollout]\ntemperature = 0.0",
        fix="Set a temperature above 0; evaluation is greedy anyway.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E113",
        title="updates do not divide the step",
        cause="The groups of a step are split into equal batches, and a group is never split.",
        example="[rollout]\nprompts_per_step = 16\n[train]\nupdates_per_step = 3",
        fix="Let updates_per_step divide prompts_per_step.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E114",
        title="pack shorter than a sequence",
        cause="A sequence is never split over packs, so the longest one must fit into one.",
        example="[train.packing]\nmax_tokens = 16              # prompt and response may have 18",
        fix="Raise train.packing.max_tokens, or lower the limits of [rollout].",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E115",
        title="sequence longer than the model's positions",
        cause="max_prompt_tokens + max_response_tokens exceeds max_position_embeddings.",
        example="[model.shape]\nmax_position_embeddings = 16",
        fix="Raise max_position_embeddings, or lower the limits of [rollout].",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E116",
        title="no evaluation data",
        cause="[warmup] and [evaluation] measure accuracy on held-out prompts.",
        example="[evaluation]                 # and no data.evaluation",
        fix="Set data.evaluation, or remove the section.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E117",
        title="accuracy band is empty",
        cause="The warm-up stops inside [min_accuracy, max_accuracy].",
        example="[warmup]\nmin_accuracy = 0.5\nmax_accuracy = 0.4",
        fix="Let min_accuracy be at most max_accuracy.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E118",
        title="key without effect",
        cause="A key is set, but what it configures is switched off by another key.",
        example='[algorithm.kl]\nestimator = "k1"           # and no coefficient',
        fix="Switch the feature on, or remove the key.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E119",
        title="constant_length without constant aggregation",
        cause='constant_length is the divisor of aggregation = "constant" and of nothing else.',
        example='[algorithm]\naggregation = "token"\nconstant_length = 8',
        fix='Set aggregation = "constant", or remove constant_length.',
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E120",
        title="auxiliary loss mode and coefficient disagree",
        cause="A loss that is on needs a coefficient above 0, and one that is off has none.",
        example="[train.z_loss]\ncoefficient = 0.001          # mode is off",
        fix="Set both mode and coefficient, or neither.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E121",
        title="cadences do not fit",
        cause="Evaluation and checkpoints need engines that serve the trainer's current weights, "
        "so they happen on publication steps only.",
        example="[publish]\nevery_steps = 2\n[checkpoint]\nevery_steps = 25",
        fix="Make every_steps of [checkpoint] and [evaluation] multiples of publish.every_steps.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E122",
        title="ramp longer than training",
        cause="The learning rate would still be rising when training ends.",
        example="[train]\nsteps = 10\n[train.schedule]\nramp_steps = 50",
        fix="Lower train.schedule.ramp_steps.",
        exit_code=EXIT_MANIFEST,
    ),
)

_DEVICES: tuple[Code, ...] = (
    Code(
        code="E146",
        title="the embedded engine on a GPU",
        cause="The core engine is made for laptops and tests: it decodes on a CPU.",
        example='[engines]\nkind = "core"\n\n[launch]\ndevice = "cuda"',
        fix='Set engines.kind = "vllm".',
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E147",
        title="a GPU shared on a CPU",
        cause="Engines can be resident on the trainer's GPU only where there is one.",
        example='[engines]\ncolocate = "resident"\n\n[launch]\ndevice = "cpu"',
        fix='Leave colocate out, or set launch.device = "cuda".',
        exit_code=EXIT_MANIFEST,
    ),
)

_STALE: tuple[Code, ...] = (
    Code(
        code="E140",
        title="plan file cannot be read",
        cause="The file is not a plan of this version of miles-olmo.",
        example="miles launch broken.plan.json",
        fix="Make it again with 'miles plan'.",
        exit_code=EXIT_STALE,
    ),
    Code(
        code="E141",
        title="digest does not match",
        cause="The plan's content was changed after it was made, or another plan was expected.",
        example="miles launch quickstart.plan.json    # after an edit by hand",
        fix="Change the manifest and make the plan again.",
        exit_code=EXIT_STALE,
    ),
    Code(
        code="E142",
        title="input changed",
        cause="An input file is not the one that was hashed when the plan was made.",
        example="miles launch quickstart.plan.json    # data/train.jsonl was edited",
        fix="Restore the file, or make the plan again.",
        exit_code=EXIT_STALE,
    ),
    Code(
        code="E143",
        title="code changed",
        cause="The plan was made by other code than would run it.",
        example="miles launch quickstart.plan.json    # after an upgrade",
        fix="Make the plan again, or install the version that made it.",
        exit_code=EXIT_STALE,
    ),
    Code(
        code="E144",
        title="resume would change the run",
        cause="A field that decides state shape, data order or sampling differs from the run's "
        "plan, so the run could not continue where it stopped.",
        example="miles launch run.toml --resume quickstart-3fa9c1-1   # rollout.samples_per_prompt "
        "changed",
        fix="Restore the fields that the message names, or start a new run.",
        exit_code=EXIT_STALE,
    ),
    Code(
        code="E145",
        title="resume with other settings",
        cause="Fields that a resume may change differ from the run's plan; this must be intended.",
        example="miles launch run.toml --resume quickstart-3fa9c1-1   # train.steps changed",
        fix="Add --accept-changes to continue with the new values.",
        exit_code=EXIT_STALE,
    ),
)

ENTRIES: tuple[Code, ...] = (*_CHECKS, *inputs.ENTRIES, *_STALE, *_DEVICES)
