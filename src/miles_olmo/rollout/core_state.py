"""What a core engine serves, and when: pausing, versions and weight updates.

    no version --start, update.., finish--> serving v --start, update.., finish--> serving w
                                            |     ^
                                          pause  resume

- A version is served only when an update named every tensor of the policy once and the model took
  all of them. An update that fails, or is left open and given up by `resume`, changes nothing.
- Tensors are read when the update is finished, in one go on the compute thread.
- An answer has one version: an update is refused while a sequence is half sampled (pause with
  mode=wait or mode=abort first). While an update is open, completions wait if the engine is
  paused and are refused (503) if it is not.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_olmo.base.errors import EngineError
from miles_olmo.rollout.core_completions import EngineLimits
from miles_olmo.rollout.core_scheduler import Scheduler
from miles_olmo.wire.generation import EngineModel, SampledSequence, SamplingRequest

PAUSE_MODES = ("abort", "wait", "keep")


@dataclass
class WeightUpdate:
    """What an open update has announced so far."""

    expected: frozenset[str]
    """Names of all tensors of the policy."""
    version: int | None = None
    names: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    checksums: dict[str, str] = field(default_factory=dict)

    def add(self, info: Any) -> None:
        """Take one `update_info`.

        Raises:
            EngineError: E209, it is malformed, or names a tensor twice or one the policy lacks.
        """
        names, paths, checksums, version = _update_fields(info)
        repeated = sorted(n for n, count in Counter(self.names + names).items() if count > 1)
        unknown = sorted(set(names) - self.expected)
        if repeated or unknown:
            raise _update_refused(
                f"{len(repeated)} tensors named twice ({_first(repeated)}), "
                f"{len(unknown)} unknown ({_first(unknown)})",
                repeated=repeated,
                unknown=unknown,
            )
        if self.version not in (None, version):
            raise _update_refused(f"parts of versions {self.version} and {version} in one update")
        self.version = version
        self.names += names
        self.paths += [path for path in paths if path not in self.paths]
        self.checksums.update(checksums)

    def check_complete(self) -> int:
        """The announced version.

        Raises:
            EngineError: E209, a tensor of the policy was not named.
        """
        missing = sorted(self.expected.difference(self.names))
        if missing or self.version is None:
            raise _update_refused(
                f"{len(missing)} of {len(self.expected)} tensors were not named ({_first(missing)})",
                missing=missing,
            )
        return self.version


class CoreEngine:
    """One served policy. All methods belong to the event loop.

    Args:
        model: The model; the engine's compute thread owns it from `start` on.
        limits: What requests may ask for.
        on_failure: Called once when the compute thread died.
    """

    def __init__(
        self,
        model: EngineModel,
        limits: EngineLimits,
        on_failure: Callable[[EngineError], None] = lambda error: None,
    ) -> None:
        self.limits = limits
        self.version: int | None = None
        self._model = model
        self._scheduler = Scheduler(model, on_failure)
        self._update: WeightUpdate | None = None
        self._updating = asyncio.Lock()
        self._running = asyncio.Event()
        self._running.set()

    def start(self) -> None:
        self._scheduler.start()

    def stop(self) -> None:
        self._scheduler.stop()

    @property
    def failure(self) -> EngineError | None:
        return self._scheduler.failure

    @property
    def paused(self) -> bool:
        return not self._running.is_set()

    @property
    def num_unfinished(self) -> int:
        return self._scheduler.num_unfinished

    async def generate(
        self, samples: Sequence[SamplingRequest]
    ) -> tuple[list[SampledSequence | None], int]:
        """Sample; returns the sequences in order and the version that sampled all of them.

        Cancelling it aborts the sequences.

        Raises:
            EngineError: E206, no version yet; E207, unpaused update; E203, compute thread died.
        """
        await self._admit()
        version = self.version
        assert version is not None
        job = self._scheduler.submit(samples)
        try:
            return await job.future, version
        except asyncio.CancelledError:
            self._scheduler.drop(job)
            raise

    async def _admit(self) -> None:
        while True:
            if self.version is None:
                raise EngineError(
                    "E206",
                    "the engine has no weights yet",
                    why="no version was completed since it started",
                    fix="publish a version first",
                )
            if self._running.is_set() and self._update is None:
                return
            if self._running.is_set():
                raise EngineError(
                    "E207",
                    "a weight update is in progress",
                    why="the engine is not paused, so the request cannot wait for it",
                    fix="send it again after /finish_weight_update",
                )
            await self._running.wait()

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """Stop admitting; abort, finish (wait) or freeze (keep) what is unfinished."""
        self._running.clear()
        self._scheduler.freeze(mode == "keep")
        if mode == "abort":
            self._scheduler.abort_all()
        if mode != "keep":
            await self._scheduler.drain()
        # Either call returns after the step in flight: from here on nothing moves.
        await self._scheduler.call(self._model.drop_cache if clear_cache else _nothing)

    async def resume(self) -> bool:
        """Serve the completed version again; returns whether an open update was given up."""
        async with self._updating:  # never between the load of a version and its completion
            given_up = self._update is not None
            self._update = None
            self._scheduler.freeze(False)
            self._running.set()
        return given_up

    async def start_update(self) -> None:
        """Open an update; an update left open by an earlier trainer is given up.

        Raises:
            EngineError: E208, sequences are half sampled.
        """
        async with self._updating:
            self._check_idle()
            checksums = await self._scheduler.call(self._model.checksums)
            self._check_idle()  # the call let other requests in
            self._update = WeightUpdate(frozenset(checksums))

    async def add_to_update(self, info: Any) -> None:
        """Announce tensors of the open update; a refused announcement closes it.

        Raises:
            EngineError: E208, no update is open; E209, see `WeightUpdate.add`.
        """
        async with self._updating:
            update = self._open_update()
            try:
                update.add(info)
            except EngineError:
                self._update = None
                raise

    async def finish_update(self) -> int:
        """Load the announced tensors and serve them; returns the version.

        Raises:
            EngineError: E208, no update is open or sequences are half sampled; E209 or the
                model's own error, the old version is still served. The update is closed.
        """
        async with self._updating:
            update = self._open_update()
            try:
                self._check_idle()
                version = update.check_complete()
                await self._scheduler.call(
                    lambda: self._model.load_weights(update.paths, update.checksums)
                )
                self.version = version
            finally:
                self._update = None
            return version

    async def reset_cache(self) -> None:
        await self._scheduler.call(self._model.drop_cache)

    async def checksums(self) -> dict[str, str]:
        return await self._scheduler.call(self._model.checksums)

    def _open_update(self) -> WeightUpdate:
        if self._update is None:
            raise EngineError(
                "E208",
                "no weight update is open",
                why="it was not started, was refused, or was given up by /resume",
                fix="call /start_weight_update first",
            )
        return self._update

    def _check_idle(self) -> None:
        if self.num_unfinished:
            raise EngineError(
                "E208",
                f"{self.num_unfinished} sequences are half sampled",
                why="their tokens would come from two versions in one answer",
                fix="call /pause?mode=wait or mode=abort first",
            )


def _nothing() -> None:
    pass


def _update_fields(info: Any) -> tuple[list[str], list[str], dict[str, str], int]:
    if not isinstance(info, dict):
        raise _update_refused("update_info is not an object")
    for key in ("names", "dtype_names", "shapes", "paths"):
        if not isinstance(info.get(key), list):
            raise _update_refused(f"update_info.{key} is not a list")
    names, paths = info["names"], info["paths"]
    checksums, version = info.get("checksums"), info.get("weight_version")
    if not len(names) == len(info["dtype_names"]) == len(info["shapes"]):
        raise _update_refused("update_info.names, dtype_names and shapes differ in length")
    if not all(isinstance(text, str) for text in [*names, *paths]):
        raise _update_refused("update_info.names and paths are not all strings")
    if not isinstance(checksums, dict) or set(checksums) != set(names):
        raise _update_refused("update_info.checksums does not name the same tensors as names")
    if type(version) is not int or version < 0:
        raise _update_refused(f"update_info.weight_version = {version!r} is not a version")
    absent = [path for path in paths if not (Path(path).is_absolute() and Path(path).is_file())]
    if absent:
        raise _update_refused(f"{absent[0]} is not a file here")
    return names, paths, checksums, version


def _update_refused(what: str, **details: Any) -> EngineError:
    return EngineError(
        "E209",
        f"weight update refused: {what}",
        why="a version must name every tensor of the policy exactly once",
        fix="publish the version again; the engine still serves the one before",
        **details,
    )


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + ("..." if len(names) > 3 else "") or "none"
