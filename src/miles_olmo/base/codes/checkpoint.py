"""Codes of checkpoints, publication and export (E4xx)."""

from miles_olmo.base.codes.entry import EXIT_RUN, Code

_CHECKPOINTS: tuple[Code, ...] = (
    Code(
        code="E400",
        title="a checkpoint is incomplete",
        cause="The file that is written last is missing or unreadable, so the save was cut off or the "
        "directory was copied in part.",
        example="cp runs/quickstart-1/checkpoints/step-000080/weights.safetensors elsewhere/",
        fix="Use an older checkpoint, or copy the whole directory.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E401",
        title="a checkpoint is damaged",
        cause="A file is missing, has another size, or its sha256 is not the one recorded when saving.",
        example="truncate -s 100 runs/quickstart-1/checkpoints/step-000080/optimizer.safetensors",
        fix="Use an older checkpoint of the run, and check the disk.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E402",
        title="a checkpoint could not be written",
        cause="The disk is full, a quota is used up, or the directory is not writable. The partial "
        "checkpoint was removed; the previous one is untouched.",
        example="launch.runs_directory on a disk with 1 GB left and a 7 B model",
        fix="Free space or lower checkpoint.keep, then resume.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E403",
        title="a checkpoint has another topology",
        cause="It was written by another number of trainer processes than this run has.",
        example="[train.parallel]\ndata = 2          # the checkpoint was written with data = 1",
        fix="Set train.parallel to the checkpoint's values, or start from its export.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E404",
        title="a checkpoint belongs to another policy",
        cause="Names, shapes or dtypes of its tensors are not those of this [model].",
        example='model.dtype = "bfloat16"          # the checkpoint holds float32',
        fix="Use the [model] table that the checkpoint was written with.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E405",
        title="a checkpoint has another format",
        cause="It was written by a version of miles-olmo with another checkpoint layout.",
        example="resuming a run of a newer version",
        fix="Resume with the version that wrote it; its plan.json names the version.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E406",
        title="trainer processes see different checkpoints",
        cause="The leader chose a checkpoint, and another process finds other files under its path.",
        example="train.parallel.data = 2          # with runs on a disk that only one machine sees",
        fix="Put launch.runs_directory on a disk that all processes of the trainer see.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E407",
        title="the checkpoint is not there",
        cause="It never was, or the run that wrote it has removed it since it was chosen: a run keeps "
        "the newest checkpoint.keep ones.",
        example="miles prepare checkpoint runs/quickstart-1/checkpoints/step-000080 core     # still running",
        fix="Name a newer checkpoint, or raise checkpoint.keep.",
        exit_code=EXIT_RUN,
    ),
)

_TENSORS: tuple[Code, ...] = (
    Code(
        code="E410",
        title="a tensor of the policy has no Hugging Face name",
        cause="The policy holds a parameter or buffer that its family's layout cannot express, so a "
        "publication or an export would silently leave it out.",
        example="a model with tied embeddings, latent experts, or two shared experts",
        fix="Choose a model shape within [model.shape]; those keys are all expressible.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E411",
        title="weights miss tensors of the policy, or hold others",
        cause="Loading replaces every tensor of the policy; the given set of names is not that set.",
        example="a publication of a 4-layer policy loaded into a 2-layer engine",
        fix="Publish from the same [model.shape] that the engine was started with.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E412",
        title="weights have another shape or dtype than the policy",
        cause="Names agree, but a tensor's shape or dtype does not; it would have to be cast or cut.",
        example='a publication in bfloat16 loaded into an engine with model.dtype = "float32"',
        fix="Use the same [model] table for trainer and engines.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E413",
        title="weights to load hold NaN or infinity",
        cause="Training diverged before these weights were written, or the file is damaged.",
        example="train.optimizer.learning_rate = 10.0",
        fix="Lower the learning rate or max_grad_norm; resume from an earlier checkpoint.",
        exit_code=EXIT_RUN,
    ),
)

_PUBLICATION: tuple[Code, ...] = (
    Code(
        code="E420",
        title="the policy to publish holds NaN or infinity",
        cause="Training diverged; engines would sample garbage from these weights.",
        example="train.optimizer.learning_rate = 10.0",
        fix="Lower the learning rate and resume from the last checkpoint.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E421",
        title="a publication could not be written",
        cause="The disk is full or the directory is not writable. Engines keep the previous version.",
        example="launch.runs_directory on a full disk",
        fix="Free space or lower publish.keep, then resume.",
        exit_code=EXIT_RUN,
    ),
)

_EXPORT: tuple[Code, ...] = (
    Code(
        code="E430",
        title="an export does not reproduce the policy's logits",
        cause="The exported checkpoint, read back with transformers, gives other logits than the policy "
        "on the same tokens, beyond rounding.",
        example="a transformers release whose attention rounds differently",
        fix="Use the tested versions of constraints.txt; the figures are in the message.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E431",
        title="the policy cannot be exported",
        cause="The family's Hugging Face class has other tensors than the policy.",
        example="a router with a score bias",
        fix="Choose a model shape within [model.shape].",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E432",
        title="an export could not be written",
        cause="The disk is full, the directory is not writable, or the tokenizer file cannot be read.",
        example="miles export RUN --out /read-only",
        fix="Choose a writable directory with room for the weights; the checkpoint is untouched.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E433",
        title="a tokenizer does not fit the model",
        cause="tokenizer.json of an export or a conversion is not a fast tokenizer, lacks a named special token, "
        "or has ids beyond the vocabulary, or config.json or generation_config.json names such an id.",
        example='[data]\neos_token = "<end>"       # not in tokenizer.json',
        fix="Name special tokens that tokenizer.json has; beside a checkpoint, restore the file named.",
        exit_code=EXIT_RUN,
    ),
)

ENTRIES: tuple[Code, ...] = (*_CHECKPOINTS, *_TENSORS, *_PUBLICATION, *_EXPORT)
