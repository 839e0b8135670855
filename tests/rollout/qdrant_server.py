"""A server process that speaks the part of Qdrant's REST protocol that the memory uses; behind it is the client's own
in-process Qdrant. Every request body is read by the client's own models, which know no unknown shape."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from qdrant_client import QdrantClient, models

API_KEY = "the-key"
_client = QdrantClient(":memory:")
_lock = Lock()


class FakeQdrant(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(lambda name, rest, body: {"exists": _client.collection_exists(name)})

    def do_PUT(self) -> None:
        def put(name: str, rest: str, body: Any) -> Any:
            if rest == "points":
                points = models.PointsList.model_validate(body).points
                _client.upsert(name, points=points)
                return {"operation_id": 0, "status": "completed"}
            wanted = models.CreateCollection.model_validate(body)
            return _client.create_collection(name, vectors_config=wanted.vectors)

        self._answer(put)

    def do_POST(self) -> None:
        def post(name: str, rest: str, body: Any) -> Any:
            if rest == "points/query":
                wanted = models.QueryRequest.model_validate(body)
                found = _client.query_points(
                    name,
                    query=wanted.query,
                    query_filter=wanted.filter,
                    score_threshold=wanted.score_threshold,
                    limit=wanted.limit,
                    with_payload=wanted.with_payload,
                )
                return found.model_dump(mode="json")
            if rest == "points/count":
                return {"count": _client.count(name).count}
            ids = models.PointRequest.model_validate(body).ids
            return [one.model_dump(mode="json") for one in _client.retrieve(name, ids=ids)]

        self._answer(post)

    def _answer(self, work: Any) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("api-key") != API_KEY:
            self._send(401, {"status": {"error": "Must provide an API key"}})
            return
        _, collections, name, *rest = urlsplit(self.path).path.split("/")
        assert collections == "collections", self.path
        with _lock:
            result = work(name, "/".join(rest), json.loads(body) if body else None)
        self._send(200, {"result": result, "status": "ok", "time": 0.0})

    def _send(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeQdrant)
    print(f"serving at http://127.0.0.1:{server.server_port}", file=sys.stderr, flush=True)
    server.serve_forever()
