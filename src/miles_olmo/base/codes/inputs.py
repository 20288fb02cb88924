"""Codes of the files that a plan reads (E123-E139)."""

from miles_olmo.base.codes.entry import EXIT_MANIFEST, Code

ENTRIES: tuple[Code, ...] = (
    Code(
        code="E123",
        title="checkpoint not found",
        cause="model.checkpoint names a directory that is not there, or one without a complete "
        "checkpoint of miles-olmo and without a Hugging Face config.json.",
        example='[model]\ncheckpoint = "runs/old/checkpoints/step-000080"   # no such directory',
        fix="Name a complete checkpoint directory, or remove the key to start from random weights.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E124",
        title="input file not found",
        cause="A path of [data] is not a readable file. Paths are relative to the manifest.",
        example='[data]\ntrain = "trian.jsonl"     # the directory has train.jsonl',
        fix="Correct the path, or let [data.prepare] make the files.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E125",
        title="tokenizer cannot be read",
        cause="data.tokenizer is not a tokenizer.json of the Hugging Face tokenizers library.",
        example='[data]\ntokenizer = "vocab.txt"',
        fix="Name the tokenizer.json of the model.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E126",
        title="tokenizer does not fit the vocabulary",
        cause="The tokenizer has token ids at or above model.shape.vocab_size: the embedding has no "
        "row for them.",
        example="[model.shape]\nvocab_size = 40           # the tokenizer needs 48",
        fix="Set vocab_size to at least the tokenizer's size, or use the model's own tokenizer.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E127",
        title="token not in the tokenizer",
        cause="A special token named by the manifest, or needed by the chat template, is not one "
        "token of the vocabulary; it would be split into ordinary ones.",
        example='[data]\neos_token = "<end>"       # the tokenizer has <eos>',
        fix="Name a token of the tokenizer.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E128",
        title="data line is not a JSON object",
        cause="A line of a JSONL file cannot be parsed, or is not an object.",
        example='{"messages": [{"role": "user", "content": "rev 1234="}], "ground_truth": ',
        fix="Write one JSON object per line.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E129",
        title="data row lacks a column",
        cause="Every row needs messages, ground_truth and dataset.",
        example='{"prompt": "rev 1234=", "ground_truth": "4321"}',
        fix="Rename or add the column.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E130",
        title="data row cannot be used",
        cause="A column has another form than the contract says (messages: list of role and content; "
        "ground_truth and dataset: a string, or lists of one), or its text cannot be tokenised.",
        example='{"messages": "rev 1234=", "ground_truth": "4321", "dataset": "exact_match"}',
        fix="Correct the row; docs/reference/manifest.md describes the columns.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E131",
        title="unknown verifier",
        cause="reward.verifiers, or a row's dataset column, names a verifier that does not exist. "
        "An unknown verifier could only score everything alike.",
        example='[reward]\nverifiers = ["exactmatch"]',
        fix='Use a verifier of this version, such as "exact_match".',
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E132",
        title="verifier not allowed",
        cause="A data row names a verifier that reward.verifiers does not list.",
        example='{"messages": [...], "ground_truth": "7", "dataset": "math"}   # [reward] has exact_match',
        fix="Add the verifier to reward.verifiers, or correct the row's dataset column.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E133",
        title="no usable prompts",
        cause="A data file is empty, or each of its prompts is longer than rollout.max_prompt_tokens "
        "(longer prompts are left out and counted, never cut).",
        example="[rollout]\nmax_prompt_tokens = 2",
        fix="Raise rollout.max_prompt_tokens, or add rows.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E134",
        title="too few evaluation prompts",
        cause="evaluation.num_prompts asks for more prompts than data.evaluation has.",
        example="[evaluation]\nnum_prompts = 1000        # the file has 256 rows",
        fix="Lower evaluation.num_prompts, or add rows.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E135",
        title="data cannot be prepared",
        cause="[data.prepare] asks for more rows than there are different questions, or its questions "
        "and answers do not fit the limits of [rollout].",
        example="[data.prepare]\ndigits = 2\nnum_train = 4096          # there are 100 numbers of 2 digits",
        fix="Use more digits, fewer rows, or higher limits.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E136",
        title="prepared file name is not plain",
        cause="Files that [data.prepare] makes lie in the run's own data directory, so their names "
        "have no directory, and no two are equal.",
        example='[data]\ntrain = "../train.jsonl"\n[data.prepare]\ntask = "reversed_digits"',
        fix='Use plain, different names such as "train.jsonl" and "evaluation.jsonl".',
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E137",
        title="file would be overwritten",
        cause="'miles prepare' found a file of that name which it did not make.",
        example="miles prepare run.toml --out data     # data/train.jsonl is yours",
        fix="Choose another directory, or move the file away.",
        exit_code=EXIT_MANIFEST,
    ),
)
