"""Every module of the front end can be imported where torch and its company are not installed."""

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys
for heavy in ("torch", "olmo_core", "vllm", "transformers"):
    sys.modules[heavy] = None  # importing it raises ImportError
import miles_olmo
names = ["miles_olmo.rollout.client"]
for layer in ("base", "wire", "manifest", "tasks", "plan", "records", "report", "launch", "api", "cli"):
    package = importlib.import_module(f"miles_olmo.{layer}")
    names += [m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def test_the_front_end_needs_no_heavy_library():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40
