"""Codes of models and their checkpoints: E17x in a plan, E44x when weights are read or converted."""

from miles_olmo.base.codes.entry import EXIT_MANIFEST, EXIT_RUN, EXIT_USAGE, Code

_PLAN: tuple[Code, ...] = (
    Code(
        code="E170",
        title="checkpoint of another architecture",
        cause="The config.json of model.checkpoint names a model_type, or a class, that no family of "
        "this version is.",
        example='[model]\ncheckpoint = "Olmo-3-7B"     # model_type = "olmo3"',
        fix="Name a checkpoint of a family that 'model.family' accepts.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E171",
        title="checkpoint with a feature that is not supported",
        cause="The config.json of model.checkpoint asks for something that the trainer's block does "
        "not compute; leaving it out would train another model.",
        example='"rope_parameters": {"rope_type": "yarn", ...}, "scalable_softmax": true, "clip_qkv": 8',
        fix="Use a checkpoint without the feature that the message names.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E172",
        title="[model] contradicts the checkpoint",
        cause="A key of [model] or [model.shape] has another value than the description beside the "
        "weights of model.checkpoint.",
        example="[model.shape]\nnum_layers = 12               # config.json: num_hidden_layers = 16",
        fix="Remove the key: what the checkpoint says is filled in.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E173",
        title="the checkpoint's description cannot be read",
        cause="config.json or model.json of model.checkpoint, or the plan.json of the run that it belongs "
        "to, is not JSON, or a value has a wrong type.",
        example="a config.json that is the page of a download error",
        fix="Download, copy or convert the checkpoint again.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E174",
        title="a Hugging Face checkpoint lacks weights",
        cause="There is no model.safetensors and no index, or the index names files that are not there. "
        "Pickled weights (.bin) are not read.",
        example="model-00002-of-00003.safetensors was not downloaded",
        fix="Download or copy the whole checkpoint, as safetensors.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E175",
        title="dense layers do not fit the model",
        cause="dense_layers_indices must name some but not all layers, each once and ascending, and goes "
        "together with dense_hidden_size.",
        example="[model.shape]\ndense_layers_indices = [0]    # and no dense_hidden_size",
        fix="Set both keys, or neither.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E176",
        title="sliding windows do not fit the model",
        cause="sliding_window and a 'sliding_attention' in layer_types go together, and layer_types has "
        "at most one entry per layer.",
        example="[model.shape]\nsliding_window = 4096         # and no layer_types",
        fix="Set both keys, or neither.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E177",
        title="a feature that the family does not have",
        cause="The Hugging Face class of the family cannot hold the value, so engines and exports could "
        "not run the model.",
        example='[model]\nfamily = "olmoe"\n[model.shape]\nshared_expert_hidden_size = 512',
        fix="Change the key as the message says, or use another family.",
        exit_code=EXIT_MANIFEST,
    ),
    Code(
        code="E178",
        title="the checkpoint has another tokenizer",
        cause="data.tokenizer lacks tokens of the checkpoint's own tokenizer, or gives them other ids, or that "
        "one cannot be read. Token ids would stand for other text than in the training before. Further "
        "tokens in data.tokenizer are allowed.",
        example='[model]\ncheckpoint = "OLMoE-1B-7B"\n[data]\ntokenizer = "gpt2/tokenizer.json"',
        fix="Name the checkpoint's tokenizer.json; the message says where it is.",
        exit_code=EXIT_MANIFEST,
    ),
)

_CONVERSION: tuple[Code, ...] = (
    Code(
        code="E440",
        title="Hugging Face weights cannot be read",
        cause="A safetensors file is missing or damaged, the index and the files disagree, or a tensor is quantized.",
        example="a shard whose download was cut off",
        fix="Download or copy the checkpoint again.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E441",
        title="Hugging Face weights do not fit the policy",
        cause="The files lack tensors of the policy, hold others, or hold them in another shape.",
        example="a config.json that belongs to other weights",
        fix="Use the config.json that the weights were saved with.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E442",
        title="a conversion changes the model",
        cause="Source and result give other logits on the same random tokens, beyond rounding. Nothing is "
        "left at the destination.",
        example="a transformers release that computes a layer differently",
        fix="Use the tested versions of constraints.txt; the figures are in the message.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E443",
        title="the destination exists",
        cause="A conversion or an export never replaces what is there.",
        example="miles prepare checkpoint OLMoE-1B-7B checkpoints/olmoe   # made before",
        fix="Name another destination, or remove this one.",
        exit_code=EXIT_USAGE,
    ),
    Code(
        code="E444",
        title="the source cannot be converted",
        cause="It is neither a Hugging Face checkpoint nor one of miles-olmo, or nothing says which model "
        "its weights belong to.",
        example="miles prepare checkpoint copied/step-000080 out   # without the run's plan.json",
        fix="Name a Hugging Face directory, a converted checkpoint, a run, or a checkpoint inside one.",
        exit_code=EXIT_USAGE,
    ),
    Code(
        code="E445",
        title="a converted checkpoint could not be written",
        cause="The disk is full or the directory is not writable. Nothing is left at the destination.",
        example="miles prepare checkpoint OLMoE-1B-7B /read-only/olmoe",
        fix="Choose a writable directory with room for one copy of the weights.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E446",
        title="the run has no such checkpoint",
        cause="The step was not saved, was removed by checkpoint.keep, or its checkpoint is incomplete.",
        example="miles export latest --step 75        # saved every 100 steps",
        fix="Name a step that the message lists, or leave --step out for the newest.",
        exit_code=EXIT_USAGE,
    ),
    Code(
        code="E447",
        title="the converting process failed",
        cause="It was killed, or ended without a result; the message has its last line, --json the last 20.",
        example="a machine without enough memory for two copies of the weights",
        fix="Install the train extra, or give it more memory, as that line says.",
        exit_code=EXIT_RUN,
    ),
    Code(
        code="E448",
        title="the Hugging Face class does not accept the checkpoint",
        cause="A value in config.json that only transformers reads stops its class from being built or run; "
        "the message has its words.",
        example='"norm_topk_prob": "x"        # olmoe: true or false',
        fix="Correct the value in config.json, or download or copy the checkpoint again.",
        exit_code=EXIT_MANIFEST,
    ),
)

ENTRIES: tuple[Code, ...] = (*_PLAN, *_CONVERSION)
