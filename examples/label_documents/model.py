"""A stand-in for a model that costs money. It listens on loopback and writes a bill.

    python model.py            # its address goes to model.url, every paid call to bill.txt

A line of the bill is the idempotency key of one call. A real model may charge a repeated key once.
This one charges every call, so that the bill shows all of them.
"""

import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SECONDS_A_CALL = 0.05
COST_A_CALL = 0.002


class Model(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        with open("bill.txt", "a") as bill:
            bill.write(self.headers["Idempotency-Key"] + "\n")
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(SECONDS_A_CALL)
        label = request["text"].split()[0]
        answer = json.dumps({"label": label, "cost": COST_A_CALL}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *args: object) -> None:
        """The caller closed the connection before the answer. The call is charged nevertheless."""


if __name__ == "__main__":
    Path("bill.txt").touch()
    with Server(("127.0.0.1", 0), Model) as server:
        Path("model.url").write_text(f"http://127.0.0.1:{server.server_port}/")
        server.serve_forever()
