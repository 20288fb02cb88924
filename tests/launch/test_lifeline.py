"""A child ends itself when its supervisor is gone, however the supervisor went."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from miles_olmo.base.lifeline import LIFELINE_VARIABLE, Lifeline, hold_lifeline
from miles_olmo.base.processes import ProcessIdentity, group_members

SUPERVISOR = """
import os, subprocess, sys, time
from miles_olmo.base.lifeline import LIFELINE_VARIABLE, Lifeline
lifeline = Lifeline()
for _ in range(2):  # the second child must not keep the first one's pipe open
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], pass_fds=[lifeline.child_end],
        env={**os.environ, LIFELINE_VARIABLE: str(lifeline.child_end)}, start_new_session=True,
        stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
    print(child.pid, flush=True)
time.sleep(60)
"""

OBEDIENT = """
from miles_olmo.base.lifeline import hold_lifeline
import time
hold_lifeline(grace_seconds=0.5)
print("up", flush=True)
time.sleep(60)
"""

STUBBORN = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
""" + OBEDIENT.replace(
    'print("up"',
    'subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]); print("up"',
)


def gone_within(seconds, groups):
    deadline = time.monotonic() + seconds
    while any(group_members(group) for group in groups):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


ORPHANING = (
    """
import subprocess, sys
code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE).stdout.readline()
"""
    + OBEDIENT
)


def start(child):
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, child], stdout=subprocess.PIPE, text=True
    )
    assert supervisor.stdout is not None
    return supervisor, [int(supervisor.stdout.readline()) for _ in range(2)]


def test_children_end_when_the_supervisor_is_killed():
    supervisor, children = start(OBEDIENT)
    assert all(group_members(child) == [child] for child in children)
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait()
    assert gone_within(5, children)


def test_a_child_that_ignores_sigterm_is_ended_with_its_own_children():
    supervisor, children = start(STUBBORN)
    assert all(len(group_members(child)) == 2 for child in children)
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait()
    assert gone_within(5, children)


def test_children_of_a_child_that_ends_at_once_are_ended_too():
    supervisor, children = start(ORPHANING)
    assert all(len(group_members(child)) == 2 for child in children)
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait()
    assert gone_within(5, children)


STARTER = """
import os, subprocess, sys, time
from miles_olmo.base.lifeline import watched_environment
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], close_fds=True, stdout=subprocess.PIPE,
    text=True, env={**os.environ, **watched_environment()}, start_new_session=True)
print(child.stdout.readline().strip(), flush=True)
time.sleep(60)
"""

WATCHING = """
import multiprocessing, os, signal, time
from miles_olmo.base import lifeline
lifeline.WATCH_SECONDS = 0.1

def stay(ready, watch):
    if watch:  # started anew: it inherited the environment only
        lifeline.watch_starter(grace_seconds=0.5)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
    time.sleep(60)

if __name__ == "__main__":
    lifeline.watch_starter(grace_seconds=0.5)
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        ready = context.Event()
        context.Process(target=stay, args=(ready, method == "spawn")).start()
        ready.wait()
    print(os.getpid(), flush=True)
    time.sleep(60)
"""


def test_processes_of_another_program_end_with_the_one_that_started_it(tmp_path):
    (tmp_path / "watching.py").write_text(WATCHING)
    code = f"import runpy; runpy.run_path({str(tmp_path / 'watching.py')!r}, run_name='__main__')"
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, code], stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    group = int(starter.stdout.readline())
    assert len(group_members(group)) >= 3
    starter.kill()
    starter.wait()
    assert gone_within(5, [group])


def test_the_write_end_is_never_inherited():
    lifeline = Lifeline()
    try:
        assert os.get_inheritable(lifeline._own_end) is False
        assert os.get_inheritable(lifeline.child_end) is False
    finally:
        lifeline.close()


def test_a_process_without_supervisor_holds_nothing():
    assert LIFELINE_VARIABLE not in os.environ
    assert hold_lifeline() is False


def test_a_recycled_pid_is_not_mistaken_for_the_process_that_had_it():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    identity = ProcessIdentity.of(child.pid)
    assert identity is not None and identity.is_alive
    assert ProcessIdentity.from_json(identity.as_json()) == identity
    later = ProcessIdentity(identity.pid, str(int(identity.started) + 1), identity.boot)
    assert not later.is_alive
    assert not ProcessIdentity(identity.pid, identity.started, "another boot").is_alive
    child.kill()
    deadline = time.monotonic() + 5
    while identity.is_alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not identity.is_alive  # a zombie is not alive
    child.wait()
    assert ProcessIdentity.of(child.pid) is None and ProcessIdentity.of(-1) is None
