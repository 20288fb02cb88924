"""An engine that announces itself and answers /health."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from job_support import begin, token_digest

from miles_olmo.base.errors import EngineError
from miles_olmo.base.files import write_json
from miles_olmo.records.receipts import ReceiptLog


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_):
        pass


def main():
    arguments = begin()
    name = f"engine-{arguments.index}"
    behave = arguments.behave.get(name, "")
    print(f"{name} threads {os.environ['OMP_NUM_THREADS']} token {token_digest()}")
    if behave == "refuse":
        error = EngineError("E201", "no weights", why="there are none", fix="make some")
        ReceiptLog(arguments.run.receipt_log(name), name).append_failure(error)
        sys.exit(6)
    if behave == "never":
        time.sleep(120)
    if behave == "child":  # an engine with a process of its own that ignores SIGTERM
        code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(120)"
        subprocess.Popen([sys.executable, "-c", code])
    server = ThreadingHTTPServer((arguments.host, arguments.port), Handler)
    url = f"http://{arguments.host}:{server.server_port}"
    entry = {"index": arguments.index, "url": url, "pid": os.getpid(), "attempt": arguments.attempt}
    write_json(arguments.run.root / "engines" / f"{name}.json", entry)
    server.serve_forever()


main()
