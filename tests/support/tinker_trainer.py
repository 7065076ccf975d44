"""A trainer that answers the training half of Tinker's API, and names folders of adapters in turn."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MODEL = "run-1"


class TinkerTrainer:
    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = [str(each) for each in folders]
        self.asked: list[tuple[str, bytes]] = []
        """Path and body of each request."""
        self.headers: list[str] = []
        """Lower-case names of all headers that came."""
        self.saved: dict[str, Any] | None = None
        """Answer of the next save, instead of a folder."""

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """Return status and JSON; a model and the weights come by promises, as a real trainer's do."""
        self.asked.append((path, body))
        if path == "/api/v1/create_model":
            return 200, {"request_id": "made", "model_id": None}
        if path == "/api/v1/get_info":
            data = {"model_name": "base"}
            return 200, {"model_data": data, "model_id": MODEL, "is_lora": True, "lora_rank": 4}
        if path == "/api/v1/save_weights_for_sampler":
            return 200, {"request_id": f"saved-{json.loads(body)['seq_id']}"}
        if path == "/api/v1/retrieve_future":
            return self._result(json.loads(body)["request_id"])
        if path.startswith("/api/v1/training_runs"):
            return 200, {"asked": path}
        return 404, {"error": "there is no such route"}

    def _result(self, name: str) -> tuple[int, Any]:
        if name == "made":
            return 200, {"type": "create_model", "model_id": MODEL}
        if name == "theirs":
            return 200, {"type": "optim_step"}
        if not name.startswith("saved-"):
            return 404, {"error": f"no {name}"}
        if name not in [json.loads(body).get("request_id") for _, body in self.asked[:-1]]:
            return 200, {"type": "try_again", "request_id": name, "queue_state": "active"}
        found, self.saved = self.saved, None
        return 200, found or {"type": "save_weights_for_sampler", "path": self.folders.pop(0)}


@contextmanager
def training(trainer: TinkerTrainer) -> Iterator[str]:
    """Yield the address at which ``trainer`` answers."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            trainer.headers += [name.lower() for name in self.headers]
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, found = trainer.answer(self.path, body)
            encoded = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        do_GET = do_POST  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
