"""Every error code, with its exit code and the long text of `miles explain CODE`.

| Range | Raised by |
|---|---|
| E0xx | reading a manifest (syntax, keys, types) |
| E1xx | checks of a plan and its inputs |
| E2xx | rollout engines and the fleet client |
| E3xx | training: loss, packing, replay; E35x the loop; E36x reports; E37x `miles verify` |
| E4xx | checkpoints, publication, export |
| E5xx | launching and supervising a run |
| E6xx | the command line and the environment |
"""

from miles_olmo.base.codes import (
    checkpoint,
    engine,
    imports,
    launch,
    loop,
    manifest,
    plan,
    policy,
    records,
    training,
    usage,
    verification,
)
from miles_olmo.base.codes.entry import Code

CODES: dict[str, Code] = {
    entry.code: entry
    for module in (
        manifest,
        plan,
        engine,
        training,
        policy,
        loop,
        records,
        verification,
        checkpoint,
        imports,
        launch,
        usage,
    )
    for entry in module.ENTRIES
}

__all__ = ["CODES", "Code"]
