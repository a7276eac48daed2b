"""A hub on this machine: repositories in memory behind the hub's own HTTP interface, with faults on request."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40


class FakeHub:
    """`repos`: name to files. `faults`: name to (status, X-Error-Code). `break_after`: file to bytes sent once."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.faults: dict[str, tuple[int, str]] = {}
        self.break_after: dict[str, int] = {}
        self.got: list[tuple[str, str | None]] = []
        self.url = ""

    def files_got(self) -> set[str]:
        return {path.split("/resolve/")[1].split("/", 1)[1] for path, _ in self.got if "/resolve/" in path}


@contextmanager
def serving() -> Iterator[FakeHub]:
    """Serve an empty hub on a free port of this machine."""
    hub = FakeHub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # the base class names it so
        """Nothing to standard error."""

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if body:
            self.state.got.append((path, self.headers.get("Range")))
        parts = path.removeprefix("/api/models").strip("/").split("/")
        name = "/".join(parts[:2])
        if name in self.state.faults:
            status, code = self.state.faults[name]
            return self.send(status, b"{}", {"X-Error-Code": code} if code else {}, body)
        if name not in self.state.repos:
            return self.send(401, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        files = self.state.repos[name]
        if parts[2:3] == ["resolve"]:
            return self.file(files, "/".join(parts[4:]), body)
        if parts[2:] and parts[3] not in ("main", COMMIT):
            return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
        if parts[2:3] == ["tree"]:
            answer: Any = [
                {"type": "file", "path": p, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for p, data in files.items()
            ]
        else:
            answer = {"id": name, "modelId": name, "sha": COMMIT, "siblings": [{"rfilename": p} for p in files]}
        return self.send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"}, body)

    def file(self, files: dict[str, bytes], path: str, body: bool) -> None:
        if path not in files:
            return self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"}, body)
        data, status = files[path], 200
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range")
        if wanted and body:
            first, last = wanted.removeprefix("bytes=").split("-")
            start, end = int(first), min(int(last or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            data, status = data[start : end + 1], 206
        if body and path in self.state.break_after:
            return self.send(status, data, headers, body, keep=self.state.break_after.pop(path))
        return self.send(status, data, headers, body)

    def send(self, status: int, data: bytes, headers: dict[str, str], body: bool, keep: int | None = None) -> None:
        self.send_response(status)
        for key, item in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, item)
        self.end_headers()
        if body:
            self.wfile.write(data[:keep])
        if keep is not None:
            self.close_connection = True
