"""What a researcher writes: one frozen model per table of `run.toml`.

Fields carry type and range only. Whether values go together is decided in `miles_olmo.plan.checks`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from miles_olmo.manifest.base import Section
from miles_olmo.manifest.numbers import (
    Beta,
    Fraction,
    NaturalFloat,
    NaturalInt,
    OpenFraction,
    PositiveFloat,
    PositiveInt,
)
from miles_olmo.manifest.policy_model import Model as Model
from miles_olmo.manifest.policy_model import ModelShape as ModelShape


class PrepareData(Section):
    """A data set that the run makes itself, before training."""

    task: Literal["reversed_digits"]
    """Which generator makes it."""
    digits: Annotated[int, Field(ge=1, le=9)] = 4
    """Digits per question."""
    num_train: PositiveInt = 4096
    """Rows of the training file."""
    num_evaluation: PositiveInt = 256
    """Rows of the evaluation file; disjoint from training."""
    seed: NaturalInt = 0
    """Seed of the generator."""


class Data(Section):
    """Prompts, ground truths and the tokenizer. Paths are relative to the manifest."""

    train: str
    """JSONL with `messages`, `ground_truth` and `dataset` columns."""
    evaluation: str | None = None
    """JSONL of the same form; needed by [warmup] and [evaluation]."""
    tokenizer: str
    """A `tokenizer.json` (Hugging Face tokenizers)."""
    chat_template: Literal["plain", "chatml"] = "plain"
    """How messages become text: plain joins their contents by newlines, chatml wraps each in im_start and im_end."""
    bos_token: str | None = None
    """Token put before every prompt; none when absent."""
    eos_token: str
    """Token that ends a response."""
    shuffle: bool = True
    """Visit the rows in a seeded random order, anew each epoch."""
    prepare: PrepareData | None = None
    """Make the files above with a generator instead of reading the user's."""


class Warmup(Section):
    """Supervised training on the ground truths before RL, stopped at a chosen accuracy."""

    max_steps: PositiveInt = 400
    """Optimizer steps after which the warm-up gives up."""
    batch_size: PositiveInt = 64
    """Rows per step."""
    learning_rate: PositiveFloat = 1e-3
    """AdamW learning rate."""
    evaluate_every: PositiveInt = 5
    """Steps between two measurements of greedy accuracy."""
    min_accuracy: Fraction = 0.25
    """Stop at the first measurement in [min_accuracy, max_accuracy]."""
    max_accuracy: Fraction = 0.40
    """A measurement above this steps back and continues with a smaller learning rate."""


class Rollout(Section):
    """What is sampled for one training step."""

    prompts_per_step: PositiveInt
    """Groups per step."""
    samples_per_prompt: PositiveInt
    """Answers per group."""
    temperature: NaturalFloat = 1.0
    """Sampling temperature; logprobs are those of the tempered distribution."""
    top_p: OpenFraction = 1.0
    """Nucleus; below 1 is refused while it would bias the logprobs."""
    top_k: NaturalInt = 0
    """Keep the k most likely tokens; 0 keeps all."""
    max_prompt_tokens: PositiveInt
    """Longer prompts are left out and counted."""
    max_response_tokens: PositiveInt
    """Budget of one answer; an answer that reaches it is truncated."""
    truncated: Literal["mask", "score"] = "score"
    """mask: truncated answers are not trained on; score: they are, with the verifier's reward."""
    max_refills: NaturalInt = 3
    """How often a step without any group that carries signal samples anew before it is skipped."""


class Engines(Section):
    """The rollout servers."""

    kind: Literal["core", "vllm"] = "core"
    """core: the OLMo-core model itself (laptops, tests, bit-exact); vllm: vLLM."""
    count: PositiveInt = 1
    """Number of servers, independent of the trainer's processes."""
    tensor_parallel: PositiveInt = 1
    """GPUs per engine; only 1 works."""
    colocate: Literal["none", "resident", "offload"] = "none"
    """none: GPUs of their own; resident: on the trainer's, all in memory at once; offload is refused."""
    gpu_memory_utilization: OpenFraction | None = None
    """Share of a GPU that vLLM takes; absent: 0.9, or 0.35 with colocate = "resident"."""
    max_batch_size: PositiveInt = 64
    """Sequences decoded together by one engine."""
    startup_seconds: PositiveFloat = 120.0
    """Time until an engine must answer its health check."""
    request_seconds: PositiveFloat = 120.0
    """Time limit of one generation request. A vLLM engine whose model computes on one step for three
    quarters of it has hung, and answers no health check."""
    health_seconds: PositiveFloat = 5.0
    """Time limit of one health check; an engine silent for three times as long is killed."""
    retries: NaturalInt = 2
    """How often a failed request is sent again, to another engine if there is one."""
    max_restarts: NaturalInt = 1
    """How often the supervisor restarts a dead engine."""
    base_port: Annotated[int, Field(ge=0, le=65000)] = 0
    """Engine i listens on base_port + i; 0 lets each engine choose a free port."""


class Reward(Section):
    """How answers are scored. The data's `dataset` column names each row's verifier."""

    verifiers: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    """Verifiers that the data may name."""


class Advantage(Section):
    """Group-relative advantages."""

    baseline: Literal["group_mean", "none"] = "group_mean"
    """What is subtracted from each reward."""
    std: Literal["unbiased", "none"] = "unbiased"
    """Divide by the group's standard deviation (+1e-6), or not (Dr. GRPO)."""


class Clip(Section):
    """Clipping of the probability ratio."""

    low: Fraction = 0.2
    """Lower clip: ratio >= 1 - low."""
    high: PositiveFloat = 0.28
    """Upper clip: ratio <= 1 + high."""
    dual: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Dual clip: for negative advantages the loss is at most dual * |advantage|; off when absent."""


class Kl(Section):
    """Penalty for leaving the reference policy (the policy at the start of RL)."""

    coefficient: NaturalFloat = 0.0
    """Weight of the penalty in the loss; 0 keeps no reference."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence per token."""


class ImportanceSampling(Section):
    """Truncated importance sampling between trainer and engine logprobs (TIS)."""

    enabled: bool = False
    """Multiply each token's loss by min(exp(logp_train - logp_engine), cap)."""
    cap: PositiveFloat = 2.0
    """Upper bound of the weight."""


class Algorithm(Section):
    """The objective."""

    name: Literal["grpo"] = "grpo"
    """Method."""
    advantage: Advantage = Advantage()
    clip: Clip = Clip()
    kl: Kl = Kl()
    importance_sampling: ImportanceSampling = ImportanceSampling()
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """Over the GLOBAL batch: token mean; mean of sequence means; or sum / (sequences x constant_length)."""
    constant_length: PositiveInt | None = None
    """Divisor of "constant" (Dr. GRPO); rollout.max_response_tokens when absent."""


class Optimizer(Section):
    """AdamW."""

    learning_rate: PositiveFloat
    """Peak learning rate."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""
    weight_decay: NaturalFloat = 0.0
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: PositiveFloat = 1.0
    """The global gradient norm is clipped to this."""


class Schedule(Section):
    """Learning rate over the optimizer steps of RL."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the linear ramp."""
    ramp_steps: NaturalInt = 0
    """Steps of linear increase from 0."""
    final_fraction: Fraction = 0.0
    """Last learning rate as a fraction of the peak (linear, cosine)."""


class Packing(Section):
    """Several answers in one sequence, isolated from each other."""

    max_tokens: PositiveInt
    """Longest pack; at least max_prompt_tokens + max_response_tokens."""
    share_prefixes: bool = True
    """Compute what answers of a pack have in common from their start (the prompt, mostly) once."""
    packs_per_microbatch: PositiveInt = 1
    """Only 1 works: a microbatch is one pack."""


class AuxiliaryLoss(Section):
    """One auxiliary loss of the router."""

    mode: Literal["off", "per_pack", "global"] = "off"
    """off; per_pack: each pack balanced by itself; global: statistics over the global batch."""
    coefficient: NaturalFloat = 0.0
    """Weight in the loss."""


class Replay(Section):
    """Router replay: train through the experts that the engine used."""

    enabled: bool = True
    """Force recorded routes in the trainer's forward (R3)."""
    min_coverage: Fraction = 1.0
    """Least share of required rows that must be recorded; less is an error."""


class CollapseAlarm(Section):
    """Watch for experts that get hardly any token."""

    share: OpenFraction = 0.05
    """An expert is low in a step when its load is below this part of its uniform share."""
    steps: PositiveInt = 20
    """Trained steps in a row that an expert must be low to raise the alarm."""
    action: Literal["off", "warn", "stop"] = "warn"
    """warn: a receipt and a metric; stop: also save a checkpoint and end the run; off: no alarm."""


class Parallel(Section):
    """Trainer processes: data x expert of them."""

    data: PositiveInt = 1
    """Replicas of the policy; each trains packs of its own."""
    expert: PositiveInt = 1
    """Processes that the experts of one replica are spread over; divides num_experts."""
    timeout_seconds: Annotated[float, Field(gt=0, le=604_800, allow_inf_nan=False)] = 300.0
    """Longest wait of a trainer process for the others inside one operation; at most a week."""
    tensor: PositiveInt = 1
    """Only 1 works."""
    pipeline: PositiveInt = 1
    """Only 1 works."""
    context: PositiveInt = 1
    """Only 1 works."""


class Train(Section):
    """The optimizer loop."""

    steps: PositiveInt
    """Training steps: each samples, scores and updates once."""
    updates_per_step: PositiveInt = 1
    """Optimizer updates per step: its groups are split into this many equal batches."""
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    packing: Packing
    recompute: Literal["none", "block"] = "none"
    """block: recompute each block in the backward pass, to save activation memory."""
    replay: Replay = Replay()
    load_balancing_loss: AuxiliaryLoss = AuxiliaryLoss()
    z_loss: AuxiliaryLoss = AuxiliaryLoss()
    collapse_alarm: CollapseAlarm = CollapseAlarm()
    parallel: Parallel = Parallel()


class Publish(Section):
    """How new weights reach the engines."""

    transport: Literal["files"] = "files"
    """files: safetensors on a disk that trainer and engines share."""
    mode: Literal["barrier"] = "barrier"
    """barrier: engines stop between two versions."""
    every_steps: PositiveInt = 1
    """Training steps between two publications."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Published versions kept on disk."""


class Checkpoint(Section):
    """Saved states."""

    every_steps: PositiveInt = 50
    """Training steps between two checkpoints; the last step is always saved."""
    keep: PositiveInt = 2
    """Newest checkpoints kept."""
    export: bool = True
    """Write a Hugging Face export, checked by its logits, at the end."""


class Evaluation(Section):
    """Greedy evaluation on held-out prompts, through the engines."""

    every_steps: PositiveInt = 50
    """Training steps between two evaluations; also before the first and after the last step."""
    num_prompts: PositiveInt = 256
    """Rows of data.evaluation used, from its start."""


class Verify(Section):
    """What `miles verify` lets pass; bounds that are absent depend on model.dtype."""

    num_prompts: PositiveInt = 16
    """Prompts that are sampled (samples_per_prompt answers each) and replayed."""
    max_mean_difference: NaturalFloat | None = None
    """Mean |trainer - engine| logprob of a token, nats; absent: 1e-5 (float32), 0.05 (bfloat16)."""
    max_p99_difference: NaturalFloat | None = None
    """Its 99th percentile; absent: 1e-4 (float32), 0.5 (bfloat16)."""
    max_difference: NaturalFloat | None = None
    """Its largest value; absent: 1e-4 (float32), 5 (bfloat16)."""
    max_kl: NaturalFloat | None = None
    """Mean k3 estimate of KL(engine || trainer), nats; absent: 1e-8 (float32), 0.02 (bfloat16)."""
    max_native_mismatch: Fraction | None = None
    """Share of positions of the worst layer with other native experts; absent: 0.001, 0.25."""


class WandB(Section):
    """Copy metrics to Weights & Biases. A fault there is counted and never stops training."""

    enabled: bool = False
    """Needs the extra `wandb`."""
    project: Annotated[str, Field(min_length=1)] = "miles-olmo"
    """Project that the run appears in."""
    mode: Literal["offline", "online"] = "offline"
    """offline: files in <run>/wandb for `wandb sync`; online: needs WANDB_API_KEY in the environment."""


class Logging(Section):
    """Copies of the metrics for other viewers; `metrics.jsonl` is always written."""

    tensorboard: bool = False
    """Event files in <run>/tensorboard; needs the extra `tensorboard`."""
    wandb: WandB = WandB()


class Launch(Section):
    """Where the jobs run."""

    backend: Literal["local"] = "local"
    """local: processes of this machine."""
    runs_directory: str = "runs"
    """Where runs are written, relative to the working directory of `miles launch`."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What trainer and engines compute on; cuda: one GPU per process, the trainer's come first."""
    host: str = "127.0.0.1"
    """Address that engines bind to."""
    threads: PositiveInt = 1
    """CPU threads per process; bit-identical logprobs need 1."""
    stop_seconds: PositiveFloat = 10.0
    """Grace between SIGTERM and SIGKILL when the run ends."""


class Manifest(Section):
    """One reinforcement-learning run."""

    version: Literal[1]
    """Version of the manifest format."""
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]
    """Short name; run ids start with it. Lower case, digits, hyphens."""
    seed: NaturalInt = 0
    """Seed of initial weights, data order and sampling."""
    model: Model
    data: Data
    warmup: Warmup | None = None
    rollout: Rollout
    engines: Engines = Engines()
    reward: Reward
    algorithm: Algorithm = Algorithm()
    train: Train
    publish: Publish = Publish()
    checkpoint: Checkpoint = Checkpoint()
    evaluation: Evaluation | None = None
    verify: Verify = Verify()
    logging: Logging = Logging()
    launch: Launch = Launch()
