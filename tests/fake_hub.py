"""A hub of our own: what huggingface_hub needs of one to make a repository, upload a folder, and download it."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SHA = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """Repositories in memory."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.stored: dict[str, bytes] = {}
        """Large files by their SHA-256."""
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    """Answers as the hub does."""

    server: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def reply(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def read(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_POST(self) -> None:
        self.server.asked.append(f"POST {self.path}")
        body, path = self.read(), self.path
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'user'}/{asked['name']}"
            self.server.repositories.setdefault(name, {})
            self.reply({"url": f"{self.server.address}/{name}", "name": name})
        elif path.endswith("/api/validate-yaml"):
            self.reply({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for file in json.loads(body)["files"]
            ]
            self.reply({"files": files})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.server.address}/lfs/{one['oid']}", "header": {}}}}
                for one in json.loads(body)["objects"]
            ]
            self.reply({"transfer": "basic", "objects": objects})
        elif match := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            repository = self.server.repositories[match[1]]
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    repository[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                if entry["key"] == "lfsFile":
                    repository[entry["value"]["path"]] = self.server.stored[entry["value"]["oid"]]
            self.reply(
                {"success": True, "commitOid": SHA, "commitUrl": f"{self.server.address}/{match[1]}/commit/{SHA}"}
            )
        else:
            self.reply({"error": f"no {path}"}, 404)

    def do_PUT(self) -> None:
        data = self.read()
        self.server.stored[hashlib.sha256(data).hexdigest()] = data
        self.reply({})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.asked.append(f"GET {self.path}")
        path = self.path.split("?")[0]
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/\w+)?", path):
            files = self.server.repositories.get(match[1])
            if files is None:
                self.reply({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            else:
                siblings = [{"rfilename": name} for name in files]
                self.reply({"id": match[1], "modelId": match[1], "sha": SHA, "siblings": siblings})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/\w+", path):
            files = self.server.repositories[match[1]]
            self.reply(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                ]
            )
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/\w+/(.+)", path):
            data = self.server.repositories.get(match[1], {}).get(match[2])
            if data is None:
                self.reply({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": SHA})
            else:
                self.reply(data, headers={"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": SHA})
        else:
            self.reply({"error": f"no {path}"}, 404)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub that runs until the block ends."""
    hub = FakeHub()
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
