"""The catalogue of metrics and what is known without a run."""

from __future__ import annotations

from miles_olmo.records.catalogue import CATALOGUE, ENGINES, GROUPS
from miles_olmo.rollout.upkeep import COUNTERS


def test_no_metric_is_listed_twice_and_each_is_explained():
    listed = [metric for group in GROUPS.values() for metric in group]
    assert len(listed) == len(CATALOGUE)
    assert all(m.meaning.endswith(".") and m.phases for m in listed)
    assert all(m.counts for m in listed if m.is_trouble)


def test_the_counters_of_the_engines_are_those_of_the_fleet_client():
    assert {m.name for m in ENGINES} == {f"rollout/engine/{name}" for name in COUNTERS}
