"""The live view of a run: bars and figures on a terminal, a line now and then elsewhere.

It reads the run's own files, as `miles status` does, so both always agree. It writes to standard
error, and a view that nobody reads any more never ends a run.
"""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from miles_olmo.base.rundir import RunDirectory
from miles_olmo.launch.summary import (
    curve,
    duration,
    engines_text,
    figures,
    progress_text,
    sparkline,
)
from miles_olmo.plan.model import RunPlan
from miles_olmo.records.status import RunStatus, read_status

LIVE_SECONDS = 0.5
LINE_SECONDS = 10.0


class _LastingConsole(Console):
    """A console that falls silent when its reader goes away; rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Progress:
    """Shows one attempt; see `backend.ProgressView`."""

    def __init__(self, run: RunDirectory, plan: RunPlan, console: Console | None = None) -> None:
        self._run = run
        self._warmup = plan.manifest.warmup
        self._console = console or _LastingConsole(stderr=True)
        self._live: Live | None = None
        self._next_read = self._next_line = 0.0
        self._shown: tuple[object, ...] = ()
        self._started = time.monotonic()
        self._first_step: tuple[int, float] | None = None
        self._gone = False
        self._print(f"{run.run_id} · {run.root}")
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            live = Live(console=self._console, auto_refresh=False, transient=False)
            live.start()
            self._live = live

    def update(self) -> None:
        now = time.monotonic()
        if self._gone or now < self._next_read:
            return
        status = read_status(self._run.root)
        # A long run has long files: reading them never takes more than a twentieth of the time.
        self._next_read = now + max(LIVE_SECONDS, 20 * (time.monotonic() - now))
        self._show(status)

    def close(self) -> None:
        """Show the final state and give the terminal back."""
        status = read_status(self._run.root)
        self._next_line = 0.0
        self._show(status)
        if self._live:
            self._live.stop()

    def _show(self, status: RunStatus) -> None:
        try:
            if self._live:
                self._live.update(self._picture(status), refresh=True)
            else:
                self._line(status)
        except OSError:  # the terminal or pipe is gone; the run is not
            self._gone = True

    def _print(self, text: str) -> None:
        try:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        except OSError:
            self._gone = True

    def _line(self, status: RunStatus) -> None:
        """One line when the phase changed or an evaluation came in, else every ten seconds."""
        event = (status.phase, len(status.evaluations), status.outcome)
        state = (*event, status.step, progress_text(status))
        if state == self._shown or (
            event == self._shown[:3] and time.monotonic() < self._next_line
        ):
            return
        self._shown = state
        self._next_line = time.monotonic() + LINE_SECONDS
        parts = [progress_text(status), *(f"{k} {v}" for k, v in figures(status).items())]
        parts += [f"engines {engines_text(status)}", duration(time.monotonic() - self._started)]
        self._print(" · ".join(parts))

    def _picture(self, status: RunStatus) -> Group:
        grid = Table.grid(padding=(0, 2))
        grid.add_row(Text("phase", style="dim"), progress_text(status))
        done, total = self._fraction(status)
        bar = ProgressBar(total=max(total, 1), completed=done, width=40)
        left = self._time_left(status)
        grid.add_row("", bar)
        for label, value in figures(status).items():
            grid.add_row(Text(label, style="dim"), value)
        rewards = [value for _, value in curve(status, "train", "rollout/reward")]
        if len(rewards) > 1:
            grid.add_row(Text("reward curve", style="dim"), Text(sparkline(rewards), style="cyan"))
        grid.add_row(Text("engines", style="dim"), engines_text(status))
        elapsed = duration(time.monotonic() - self._started)
        grid.add_row(Text("time", style="dim"), elapsed + (f", about {left} left" if left else ""))
        return Group(grid)

    def _fraction(self, status: RunStatus) -> tuple[int, int]:
        if status.phase == "warmup" and self._warmup:
            return status.latest["warmup"].step, self._warmup.max_steps
        return status.step, status.total_steps

    def _time_left(self, status: RunStatus) -> str:
        """From the pace since the first step of this attempt that was seen."""
        train = status.latest.get("train")
        if status.phase != "train" or train is None or status.outcome != "running":
            return ""
        if self._first_step is None:
            self._first_step = (status.step, time.monotonic())
        step, moment = self._first_step
        if status.step <= step:
            return ""
        pace = (time.monotonic() - moment) / (status.step - step)
        return duration(pace * (status.total_steps - status.step))
