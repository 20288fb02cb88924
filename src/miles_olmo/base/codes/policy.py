"""Codes of the policy's compute: E27x in the engine, E33x in the trainer."""

from miles_olmo.base.codes.entry import EXIT_RUN, Code

ENTRIES: tuple[Code, ...] = (
    Code(
        code="E270",
        title="request cannot be sampled",
        cause="A prompt is empty, holds a token id outside the vocabulary, or prompt and budget "
        "together are longer than the model's positions.",
        example='{"prompt": [1, 99], "max_tokens": 16} for a model with vocab_size = 48',
        fix="Send token ids of this model's tokenizer, and keep prompt plus max_tokens within "
        "model.shape.max_position_embeddings.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E271",
        title="weight file cannot be read",
        cause="A file of a publication is missing or is not a safetensors file.",
        example="/update_weights with a path that was pruned",
        fix="Publish the version again; raise publish.keep if it was removed too early.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E272",
        title="weights do not match their checksums",
        cause="A tensor's bytes on disk are not the ones that were published, or a tensor has no "
        "checksum.",
        example="a file that was truncated, edited or read while it was being replaced",
        fix="Publish the version again and check the disk that engines and trainer share.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E273",
        title="the policy has diverged",
        cause="The published weights are finite, but the logits they give are NaN or infinite.",
        example="train.optimizer.learning_rate = 1e30",
        fix="Resume from the last good checkpoint with a lower learning rate or max_grad_norm.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E330",
        title="recorded route is out of range",
        cause="A recorded route names an expert that the policy does not have, or has another "
        "number of layers or experts per token.",
        example="an engine that serves a model with more experts than the trainer's",
        fix="Serve and train the same model.shape.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E331",
        title="unknown model family",
        cause="No adapter is written for the family that the manifest names.",
        example='[model]\nfamily = "olmo2"',
        fix='Use a family that this version supports: "olmo3moe" or "olmoe".',
        exit_code=EXIT_RUN,
    ),
)
