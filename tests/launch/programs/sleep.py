"""A process that has nothing to do with a run."""

import time

time.sleep(60)
