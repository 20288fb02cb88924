"""Codes of checkpoints, publication and export (E4xx)."""

from miles_olmo.base.codes.entry import EXIT_RUN, Code

_TENSORS: tuple[Code, ...] = (
    Code(
        code="E410",
        title="a tensor of the policy has no Hugging Face name",
        cause="The policy holds a parameter or buffer that the olmo3moe layout cannot express, so a "
        "publication or an export would silently leave it out.",
        example="a model with tied embeddings, an attention gate, or two shared experts",
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

ENTRIES: tuple[Code, ...] = (*_TENSORS,)
