"""TensorBoard and Weights & Biases: read back with their own readers, and never in training's way."""

from __future__ import annotations

import struct
import time

import pytest

from miles_olmo.base.rundir import RunDirectory
from miles_olmo.manifest.models import WandB
from miles_olmo.manifest.reading import read_manifest
from miles_olmo.records.receipts import ReceiptLog, read_chain
from miles_olmo.records.tracking import Trackers, open_trackers
from miles_olmo.records.tracking.wandb_client import WandbTracker


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "runs" / "tiny-1")
    directory.root.mkdir(parents=True)
    return directory


@pytest.fixture
def receipts(run):
    return ReceiptLog(run.receipt_log("trainer"), "trainer")


def events(receipts, kind):
    return [e["body"] for e in read_chain(receipts.path).events if e["type"] == kind]


def scalars(run):
    """Tag -> {step: value}, as TensorBoard itself reads the event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run.root / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: {event.step: event.value for event in accumulator.Scalars(tag)}
        for tag in accumulator.Tags()["scalars"]
    }


def tensorboard(quickstart, run, attempt, receipts) -> Trackers:
    manifest, _ = read_manifest(quickstart, overrides=["logging.tensorboard=true"])
    return open_trackers(manifest, run, attempt, receipts)


def test_nothing_is_tracked_unless_the_manifest_asks_for_it(quickstart, run, receipts):
    trackers = open_trackers(read_manifest(quickstart)[0], run, 1, receipts)
    trackers.write("train", 1, {"rollout/reward": 0.5})
    trackers.close()
    assert trackers.counters() == {} and not list(run.root.iterdir())


def test_tensorboard_reads_back_what_was_measured(quickstart, run, receipts):
    trackers = tensorboard(quickstart, run, 1, receipts)
    trackers.write("warmup", 3, {"train/loss": 2.5})
    for step in (1, 2, 3):
        trackers.write("train", step, {"train/loss": step / 4, "rollout/reward": 0.5})
    trackers.write("evaluation", 2, {"eval/accuracy": 0.75})
    assert scalars(run) == {  # while the run still writes
        "warmup/train/loss": {3: 2.5},
        "train/loss": {1: 0.25, 2: 0.5, 3: 0.75},
        "rollout/reward": {1: 0.5, 2: 0.5, 3: 0.5},
        "eval/accuracy": {2: 0.75},
    }
    trackers.close()
    assert trackers.counters() == {"logging/tensorboard_faults": 0}


def test_tensorboard_drops_the_steps_that_a_resumed_attempt_walks_again(quickstart, run, receipts):
    first = tensorboard(quickstart, run, 1, receipts)
    for step in (1, 2, 3, 4):
        first.write("train", step, {"train/loss": 1.0})
    second = tensorboard(quickstart, run, 2, receipts)
    for step in (3, 4):
        second.write("train", step, {"train/loss": 2.0})
    assert scalars(run)["train/loss"] == {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0}


def test_a_tracker_that_cannot_start_or_write_is_counted_and_training_goes_on(
    quickstart, run, receipts
):
    (run.root / "tensorboard").touch()  # a file where its directory should be
    trackers = tensorboard(quickstart, run, 1, receipts)
    trackers.write("train", 1, {"train/loss": 1.0})
    trackers.close()
    assert trackers.counters() == {"logging/tensorboard_faults": 1}
    (fault,) = events(receipts, "tracker-fault")
    assert fault["tracker"] == "tensorboard" and "FileExistsError" in fault["fault"]
    (run.root / "tensorboard").unlink()
    trackers = tensorboard(quickstart, run, 2, receipts)
    for _ in range(3):
        trackers.write("train", 1, {"train/loss": "no number"})  # pyright: ignore
    trackers.write("train", 2, {"train/loss": 1.0})
    trackers.close()
    assert trackers.counters() == {"logging/tensorboard_faults": 3}
    assert events(receipts, "tracker-ended")[-1]["faults"] == 3
    assert scalars(run) == {"train/loss": {2: 1.0}}


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """The real package; its own directories are in the test's."""
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return pytest.importorskip("wandb")


def wandb_tracker(run, receipts, *, mode="offline", finish_seconds=30.0) -> Trackers:
    run.root.mkdir(parents=True, exist_ok=True)
    trackers, settings = Trackers(receipts, 1), WandB(enabled=True, mode=mode)
    config = {"train": {"steps": 3}}
    make = WandbTracker
    trackers.add("wandb", lambda: make(settings, run, 1, config, finish_seconds=finish_seconds))
    return trackers


BLOCK, MAGIC = 32768, 7


def logged(run):
    """Rows of the run's file: W&B's own messages, in LevelDB's log framing (blocks of 32 KiB, in
    them pieces of records with checksum, length and type)."""
    from wandb.proto import wandb_internal_pb2

    (path,) = (run.root / "wandb").glob("offline-run-*/*.wandb")
    data, offset, piece, rows = path.read_bytes(), MAGIC, b"", []
    assert data.startswith(b":W&B")
    while offset < len(data):
        if BLOCK - offset % BLOCK < MAGIC:
            offset += BLOCK - offset % BLOCK
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        piece += data[offset + MAGIC : offset + MAGIC + length]
        offset += MAGIC + length
        if kind in (1, 4):  # whole, or the last piece
            record = wandb_internal_pb2.Record.FromString(piece)
            piece = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({i.key or "/".join(i.nested_key): i.value_json for i in items})
    return rows


def test_wandb_offline_holds_what_was_measured(run, receipts, wandb):
    trackers = wandb_tracker(run, receipts)
    trackers.write("warmup", 4, {"train/loss": 2.5})
    for step in (1, 2, 3):
        trackers.write("train", step, {"train/loss": step / 4})
    trackers.close()
    assert trackers.counters() == {"logging/wandb_faults": 0}
    rows = [{k: float(v) for k, v in row.items() if "/" in k} for row in logged(run)]
    assert rows == [
        {"step/warmup": 4.0, "warmup/train/loss": 2.5},
        *({"step/train": float(step), "train/loss": step / 4} for step in (1, 2, 3)),
    ]


def test_a_wandb_that_cannot_be_reached_is_counted_and_holds_nothing_up(
    run, receipts, wandb, monkeypatch
):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    trackers = wandb_tracker(run, receipts, mode="online", finish_seconds=3.0)
    started = time.monotonic()
    for step in range(1, 101):
        trackers.write("train", step, {"train/loss": 1.0})
    assert time.monotonic() - started < 1.0
    trackers.close()
    assert time.monotonic() - started < 10.0
    assert trackers.counters()["logging/wandb_faults"] >= 100
    assert events(receipts, "tracker-fault") and events(receipts, "tracker-ended")


def test_a_wandb_process_that_dies_loses_rows_and_they_are_counted(run, receipts, wandb):
    trackers = wandb_tracker(run, receipts)
    trackers.write("train", 1, {"train/loss": 1.0})
    (tracker,) = trackers._trackers
    tracker._process.kill()  # pyright: ignore[reportAttributeAccessIssue]
    for step in (2, 3, 4):
        trackers.write("train", step, {"train/loss": 1.0})
    trackers.close()
    assert trackers.counters()["logging/wandb_faults"] >= 3
