"""A loopback server that speaks as much of the hub's protocol as its client needs: one public data set, mine/sums."""

import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ID = "mine/sums"


def scripted_hub(folder: Path) -> ThreadingHTTPServer:
    """Not yet running. It offers the files of `folder`, flat."""

    class ScriptedHub(BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.partition("?")[0]
            if path in (f"/api/datasets/{ID}", f"/api/datasets/{ID}/revision/{COMMIT}"):
                self._json(
                    {"_id": "1", "id": ID, "sha": COMMIT, "private": False, "tags": [], "siblings": self._names()}
                )
            elif path.startswith(f"/api/datasets/{ID}/tree/"):
                self._json([self._entry(name["rfilename"]) for name in self._names()])
            else:
                self._file(path, with_body=True)

        def do_HEAD(self):
            self._file(self.path.partition("?")[0], with_body=False)

        def _names(self):
            return [{"rfilename": path.name} for path in sorted(folder.iterdir())]

        def _entry(self, name):
            content = (folder / name).read_bytes()
            return {"type": "file", "oid": hashlib.sha1(content).hexdigest(), "size": len(content), "path": name}

        def _file(self, path, *, with_body):
            place, _, name = path.rpartition("/")
            found = folder / name
            if not place.startswith(f"/datasets/{ID}/resolve/") or not name or not found.is_file():
                missing = "EntryNotFound" if place.startswith(f"/datasets/{ID}/") else "RepoNotFound"
                self._send(404, b"", {"X-Error-Code": missing})
                return
            content = found.read_bytes()
            self._send(200, content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'}, with_body=with_body)

        def _json(self, value):
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send(self, status, content, headers, *, with_body=True):
            self.send_response(status)
            for name, value in ({"X-Repo-Commit": COMMIT, "Content-Length": str(len(content))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(content)

        def log_message(self, *_):
            pass

    return ThreadingHTTPServer(("127.0.0.1", 0), ScriptedHub)
