"""Is a whole run of ours slower than TRL's GRPOTrainer on the same task from the same weights?

    python -m venv trl && trl/bin/pip install 'trl==1.16.*' torch
    python benchmarks/trl_side_by_side.py --trl-python trl/bin/python --seeds 0 1 2

The quickstart with an OLMoE-shaped policy, which transformers knows by itself. One warm-up, exported to
Hugging Face, starts both sides. Then, per seed and in alternating order, `miles launch` with its
processes, engines, checks and records, and TRL in one process (`trl_grpo.py`): same prompts in the
same order, same batch, objective, optimizer and bounds; every process with one thread.

Prints one JSON document: command, machine, and per seed and side the steps until the mean reward of
10 steps reaches 0.8, the seconds from the start of the first step to the end of that one, the median
step, and the processor time of all processes per step, which other load on the machine changes far less.
Exits with 1 if the median over seeds of our seconds / TRL's is above 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from machine import describe_machine

from miles_olmo.api import load_manifest
from miles_olmo.manifest.models import Manifest
from miles_olmo.records.metrics import read_metrics
from miles_olmo.records.receipts import read_chain
from miles_olmo.tasks.order import prompt_index
from miles_olmo.tasks.prompts import answer_ids, read_prompts
from miles_olmo.tasks.tokenizer import TextTokenizer

HERE = Path(__file__).parent
QUICKSTART = HERE.parent / "manifests" / "quickstart.toml"
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
GOAL, WINDOW = 0.8, 10
MAX_STEPS = 300
POLL_SECONDS = 0.5

OLMOE = (
    ('family = "olmo3moe"', 'family = "olmoe"'),
    ("shared_expert_hidden_size = 128", "use_head_qk_norm = false"),
)


def edited(text: str, *changes: tuple[str, str]) -> str:
    """The text with each change made once."""
    for old, new in changes:
        if text.count(old) != 1:
            raise SystemExit(f"{QUICKSTART} has {text.count(old)} times {old!r}, expected once")
        text = text.replace(old, new)
    return text


def without_tables(text: str, *names: str) -> str:
    """The manifest without some of its tables."""
    for name in names:
        text, count = re.subn(rf"(?ms)^\[{name}\].*?(?=^\[|\Z)", "", text)
        assert count == 1, name
    return text


def miles(*arguments: str | Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "miles_olmo", *map(str, arguments)]
    return subprocess.Popen(command, stdout=sys.stderr, env=ONE_THREAD)


def warm_start(directory: Path) -> Path:
    """A Hugging Face directory of the policy after its warm-up."""
    text = edited(QUICKSTART.read_text(), *OLMOE, ("steps = 300", "steps = 1"))
    (directory / "warm.toml").write_text(text)
    runs, exported = directory / "runs", directory / "warm"
    for arguments in (
        ("launch", directory / "warm.toml", "--name", "warm", "--runs", runs),
        ("export", "warm", "--step", "0", "--out", exported, "--runs", runs),
    ):
        if miles(*arguments).wait():
            raise SystemExit(f"miles {arguments[0]} failed")
    return exported


def our_manifest(directory: Path, seed: int, engines: int) -> Path:
    """The quickstart's RL stage alone, from the exported weights."""
    text = QUICKSTART.read_text()
    start, end = text.index("[model.shape]"), text.index("[data]")
    text = without_tables(text[:start] + text[end:], "warmup", "evaluation")
    model = 'dtype = "float32"'
    batch = f"count = {engines}\nmax_batch_size = {-(-128 // engines)}"
    text = edited(
        text,
        ("\nseed = 0\n", f"\nseed = {seed}\n"),
        ('family = "olmo3moe"', 'family = "olmoe"'),
        (model, f'{model}\ncheckpoint = "warm"'),
        ("count = 2", batch),
        ("\nsteps = 300", f"\nsteps = {MAX_STEPS}"),
        ("max_tokens = 1024", "max_tokens = 2048"),  # a step is one pack, as TRL's is one batch
        ("every_steps = 100", "every_steps = 1000\nexport = false"),
    )
    path = directory / f"ours-{engines}-{seed}.toml"
    path.write_text(text)
    return path


def run_ours(directory: Path, seed: int, engines: int) -> dict[str, Any]:
    """One run, interrupted when the goal is reached; what its own records say."""
    manifest, runs = our_manifest(directory, seed, engines), directory / "runs"
    run = runs / manifest.stem
    process = miles("launch", manifest, "--name", manifest.stem, "--runs", runs)
    used: list[tuple[int, float]] = []  # steps done, processor seconds so far
    while process.poll() is None and not reached(step_rewards(run)):
        time.sleep(POLL_SECONDS)
        steps, seconds = len(step_rewards(run)), cpu_seconds(process.pid)
        if steps and seconds >= (used[-1][1] if used else 0.0):  # less: a process has ended
            used.append((steps, seconds))
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    process.wait()
    saved = [e for e in read_chain(run / "receipts/trainer.jsonl").events if is_start(e)]
    rows = read_metrics(run / "metrics.jsonl").of("train")
    started = moment(saved[0]["at"])
    ends = [(moment(row.at) - started).total_seconds() for row in rows]
    result = summary(step_rewards(run), ends)
    (first, before), (last, after) = used[0], used[-1]
    result["cpu_step_seconds"] = round((after - before) / max(last - first, 1), 4)
    phases = ("rollout", "train", "publish")
    result["phase_seconds"] = {
        name: round(statistics.median(row.values[f"perf/{name}_time"] for row in rows), 4)
        for name in phases
    }
    return result


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and all below it, from Linux's /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it ended meanwhile
        return 0.0
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(int(child)) for child in children)


def is_start(event: dict[str, Any]) -> bool:
    """The last thing before the first step: the state at step 0 was saved."""
    return event["type"] == "checkpoint-saved" and event["body"]["step"] == 0


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def step_rewards(run: Path) -> list[float]:
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    return [row.values["rollout/reward"] for row in read_metrics(path).of("train")]


def run_trl(directory: Path, seed: int, python: str, threads: int) -> dict[str, Any]:
    """One training by TRL, in a process of its own."""
    name = f"trl-{threads}-{seed}"
    job, report = directory / f"{name}.json", directory / f"{name}-report.json"
    manifest = load_manifest(our_manifest(directory, seed, engines=1))
    settings = trl_settings(directory, manifest)
    settings |= {"seed": seed, "threads": threads, "report": str(report)}
    job.write_text(json.dumps(settings))
    environment = {**ONE_THREAD, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    command = [python, str(HERE / "trl_grpo.py"), str(job)]
    subprocess.run(command, check=True, stdout=sys.stderr, env=environment)
    measured = json.loads(report.read_text())
    result = summary(measured["rewards"], measured["seconds"])
    result["cpu_step_seconds"] = round(measured["cpu_step_seconds"], 4)
    return result | {"versions": measured["versions"]}


def trl_settings(directory: Path, manifest: Manifest) -> dict[str, Any]:
    """The job file: everything that decides what is learned comes from our manifest."""
    data = directory / "runs/warm/data"
    tokenizer = TextTokenizer.from_data(data / "tokenizer.json", manifest.data)
    longest = manifest.rollout.max_prompt_tokens
    prompts = read_prompts(
        data / "train.jsonl", tokenizer=tokenizer, data=manifest.data, max_prompt_tokens=longest
    )
    rollout, train, clip = manifest.rollout, manifest.train, manifest.algorithm.clip
    assert manifest.algorithm.aggregation == "token", "TRL's dapo loss is the token mean"
    assert train.schedule.kind == "constant" and train.optimizer.weight_decay == 0
    order = (
        prompts[prompt_index(i, len(prompts), seed=manifest.seed, shuffle=manifest.data.shuffle)]
        for i in range(MAX_STEPS * rollout.prompts_per_step)
    )
    rows = [
        {
            "prompt": f"{manifest.data.bos_token}{prompt.text}",
            "prompt_ids": list(prompt.ids),
            "answer_ids": list(answer_ids(prompt, tokenizer)),
        }
        for prompt in order
    ]
    return {
        "model": str(directory / "warm"),
        "output": str(directory / "trl"),
        "rows": rows,
        "goal": GOAL,
        "window": WINDOW,
        "max_steps": MAX_STEPS,
        "prompts_per_step": rollout.prompts_per_step,
        "samples_per_prompt": rollout.samples_per_prompt,
        "max_response_tokens": rollout.max_response_tokens,
        "temperature": rollout.temperature,
        "learning_rate": train.optimizer.learning_rate,
        "ramp_steps": train.schedule.ramp_steps,
        "betas": train.optimizer.betas,
        "eps": train.optimizer.eps,
        "max_grad_norm": train.optimizer.max_grad_norm,
        "load_balancing": train.load_balancing_loss.coefficient
        if train.load_balancing_loss.mode != "off"
        else 0.0,
        "clip_low": clip.low,
        "clip_high": clip.high,
    }


def reached(rewards: list[float]) -> int | None:
    """The first step whose last WINDOW steps have a mean reward of at least GOAL, from 1."""
    ends = range(WINDOW, len(rewards) + 1)
    return next((n for n in ends if sum(rewards[n - WINDOW : n]) / WINDOW >= GOAL), None)


def summary(rewards: list[float], ends: list[float]) -> dict[str, Any]:
    steps = reached(rewards)
    return {
        "steps": steps,
        "seconds": None if steps is None else round(ends[steps - 1], 2),
        "step_seconds": round(statistics.median(b - a for a, b in pairwise([0.0, *ends])), 4),
        "rewards": [round(sum(rewards[i : i + 10]) / 10, 3) for i in range(0, len(rewards), 10)],
    }


def measure(arguments: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """Both sides per seed, the first one taking turns."""
    warm_start(directory)
    results = []
    for number, seed in enumerate(arguments.seeds):
        sides = {
            "ours": lambda seed=seed: run_ours(directory, seed, arguments.engines),
            "trl": lambda seed=seed: run_trl(directory, seed, arguments.trl_python, 1),
        }
        names = sorted(sides, reverse=bool(number % 2))
        measured = {name: sides[name]() for name in names}
        results.append({"seed": seed, "order": names, **measured})
        print(json.dumps(results[-1]), file=sys.stderr)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--engines", type=int, default=1, help="rollout engines of our runs")
    parser.add_argument("--trl-python", default=sys.executable, help="a Python that has TRL 1.16")
    parser.add_argument("--directory", type=Path, help="keep the runs here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        results = measure(arguments, directory.resolve())
    complete = all(result[side]["seconds"] for result in results for side in ("ours", "trl"))
    medians = {
        side: {
            key: statistics.median(result[side][key] or float("inf") for result in results)
            for key in ("steps", "seconds", "step_seconds", "cpu_step_seconds")
        }
        for side in ("ours", "trl")
    }
    ratios = [r["ours"]["seconds"] / r["trl"]["seconds"] for r in results] if complete else []
    # Of pairs: the two sides of a seed ran one after the other, so the same load slowed both.
    passed = complete and statistics.median(ratios) <= 1
    report = {
        "benchmark": "trl_side_by_side",
        "command": " ".join(["python", *sys.argv]),
        "machine": describe_machine(),
        "passed": passed,
        "ratio_of_seconds": round(statistics.median(ratios), 3) if complete else None,
        "medians": medians if complete else None,
        "engines": arguments.engines,
        "results": results,
    }
    print(json.dumps(report, indent=2))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
