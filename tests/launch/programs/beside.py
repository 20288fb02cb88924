"""attach.py with a process of its own beside the jobs; prints that process's pid first."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(bystander.pid, flush=True)
runpy.run_path(str(Path(__file__).with_name("attach.py")), run_name="__main__")
