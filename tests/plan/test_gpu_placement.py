"""Which GPU each process of a plan gets."""

from pathlib import Path

from miles_olmo.plan.build import build_plan

TINY = Path(__file__).parents[2] / "manifests" / "tiny-h200.toml"


def placement(*overrides):
    jobs = build_plan(TINY, overrides=overrides).content.jobs
    return {job.name: (job.device, job.gpus) for job in jobs}


def test_engines_come_after_the_trainer():
    assert placement("engines.count=2", "train.parallel.data=2") == {
        "prepare": ("cpu", ()),
        "trainer": ("cuda", (0, 1)),
        "engine-0": ("cuda", (2,)),
        "engine-1": ("cuda", (3,)),
    }


def test_resident_engines_share_the_trainers_gpus_in_turn():
    jobs = placement('engines.colocate="resident"', "engines.count=3", "train.parallel.data=2")
    assert [jobs[f"engine-{i}"][1] for i in range(3)] == [(0,), (1,), (0,)]


def test_a_cpu_plan_has_no_gpus(quickstart):
    assert all(job.device == "cpu" and not job.gpus for job in build_plan(quickstart).content.jobs)
