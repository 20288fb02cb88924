"""One process each, started as `python -m miles_olmo.jobs.<name>` by a launcher."""
