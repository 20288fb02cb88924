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
from collections.abc import Callable, Sequence
from typing import Any

from miles_olmo.base.errors import EngineError
from miles_olmo.rollout.core_completions import EngineLimits
from miles_olmo.rollout.core_scheduler import Scheduler
from miles_olmo.rollout.weight_update import ServedVersion, WeightUpdate
from miles_olmo.wire.generation import EngineModel, SampledSequence, SamplingRequest

PAUSE_MODES = ("abort", "wait", "keep")


class CoreEngine(ServedVersion):
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
        super().__init__()
        self.limits = limits
        self._model = model
        self._scheduler = Scheduler(model, on_failure)
        self._names: frozenset[str] | None = None

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
            if self._names is None:  # they never change, and checksums read every weight
                self._names = frozenset(await self._scheduler.call(self._model.checksums))
                self._check_idle()  # the call let other requests in
            self._update = WeightUpdate(self._names)

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
