"""The immutable run plan: everything that was decided before a process starts.

`content` is what the digest covers: two machines that plan the same manifest over the same input
bytes with the same code get the same digest. `local` is what differs between machines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from miles_olmo.base.canonical import digest
from miles_olmo.manifest.kernels import AttentionKernel
from miles_olmo.manifest.models import Manifest

PLAN_SCHEMA = "miles-olmo/plan/v1"


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class PlanInput(_Frozen):
    """A file the run reads."""

    key: str
    """Manifest key that names it, e.g. "data.train"."""
    kind: Literal["local", "produced"]
    """local: hashed when planning; produced: made by the plan's prepare job, hashed there."""
    path: str
    """As written in the manifest: relative to the manifest (local) or to `<run>/data` (produced)."""
    sha256: str | None
    """None for produced inputs."""
    num_bytes: int | None
    """None for produced inputs."""
    num_rows: int | None = None
    """Rows of a local data file; None for other inputs."""
    num_too_long: int | None = None
    """Rows of a local data file that are left out: their prompt exceeds max_prompt_tokens."""


class JobSpec(_Frozen):
    """Processes of one role."""

    name: str
    """Also the name of its log file and receipt writer, e.g. "trainer", "engine-0"."""
    role: Literal["prepare", "trainer", "engine"]
    module: str
    """Run as `python -m <module> --plan FILE --digest SHA ...`."""
    processes: int
    device: Literal["cpu", "cuda"]
    gpus: tuple[int, ...] = ()
    """GPU of each process, counted among those that the launch may use; empty on a CPU."""
    threads: int
    """CPU threads per process."""
    restartable: bool = False
    """The supervisor may start it again when it dies, up to engines.max_restarts times."""


class CodeVersion(_Frozen):
    """The code that made the plan and must run it."""

    version: str
    """Version of miles-olmo."""
    source_sha256: str
    """Over the sorted paths and bytes of the package's .py files."""


class Resolved(_Frozen):
    """Values derived from the manifest."""

    samples_per_step: int
    """prompts_per_step x samples_per_prompt."""
    samples_per_update: int
    """samples_per_step / updates_per_step."""
    max_sequence_tokens: int
    """max_prompt_tokens + max_response_tokens."""
    max_tokens_per_step: int
    """samples_per_step x max_sequence_tokens."""
    num_parameters: int
    """Parameters of the policy."""
    num_active_parameters: int
    """Parameters used for one token."""
    checkpoint_bytes: int
    """Weights and two optimizer moments."""
    constant_length: int
    """Divisor of aggregation = "constant"."""
    attention: AttentionKernel
    """How the documents of a pack attend to themselves in the trainer."""
    bit_exact: bool
    """Trainer and engine logprobs are expected to be bit-identical."""


class PlanContent(_Frozen):
    """What the digest covers."""

    schema_id: Literal["miles-olmo/plan/v1"] = PLAN_SCHEMA
    manifest: Manifest
    inputs: tuple[PlanInput, ...]
    code: CodeVersion
    jobs: tuple[JobSpec, ...]
    resolved: Resolved


class LocalFacts(_Frozen):
    """What the digest leaves out."""

    manifest_path: str
    """Absolute path of the manifest, for messages."""
    base_directory: str
    """Absolute directory that local inputs are relative to."""
    created_at: str
    """UTC, ISO 8601."""
    git_commit: str | None = None
    """Commit of the code's repository, when it lies in one."""


class RunPlan(_Frozen):
    """A plan file."""

    digest: str
    """sha256 (64 hex digits) over the canonical JSON of `content`."""
    content: PlanContent
    local: LocalFacts

    @property
    def manifest(self) -> Manifest:
        return self.content.manifest

    @property
    def run_stem(self) -> str:
        """Beginning of the ids of this plan's runs: name and short digest."""
        return f"{self.manifest.name}-{self.digest[:8]}"

    def input_path(self, key: str, run_directory: Path) -> Path:
        """Absolute path of an input, for the run in `run_directory`."""
        entry = next(item for item in self.content.inputs if item.key == key)
        base = (
            run_directory / "data" if entry.kind == "produced" else Path(self.local.base_directory)
        )
        return (base / entry.path).resolve()


def content_digest(content: PlanContent) -> str:
    """The digest of a plan's content."""
    return digest(content.model_dump(mode="json"))
