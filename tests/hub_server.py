"""A stand-in of the Hub on this machine: repositories in memory behind the HTTP interface that huggingface_hub speaks."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["serve"]


class Hub:
    """Repositories by name, each a mapping from path to bytes; every commit is kept, and every request is noted."""

    def __init__(self) -> None:
        self.repositories: dict[str, list[dict[str, bytes]]] = {}
        self.requests: list[tuple[str, str]] = []
        self.objects: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.private: dict[str, bool] = {}
        self.gated: set[str] = set()
        self.cut: list[int] = []  # bytes after which the next downloads break off
        self.address = ""

    def put(self, repo, **files):
        """Make a repository, or commit to it; `__` in a name is a dot, `___` a slash."""
        named = {name.replace("___", "/").replace("__", "."): content for name, content in files.items()}
        commits = self.repositories.setdefault(repo, [{}])
        commits.append({**commits[-1], **named})

    def files(self, repo):
        """What is there now."""
        return self.repositories[repo][-1]

    def sha(self, repo, revision):
        """The number of a commit, as forty digits; None if there is none."""
        commits = self.repositories.get(repo)
        if commits is None:
            return None
        if revision == "main":
            return f"{len(commits) - 1:040x}"
        known = re.fullmatch(r"[0-9a-f]{40}", revision) and int(revision, 16) < len(commits)
        return revision if known else None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        return None

    def answer(self, status=200, body=b"", headers=None, length=None):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body) if length is None else length), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refused(self, status, code):
        self.answer(status, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})

    def missing(self, code, text):
        self.answer(404, {"error": text}, {"X-Error-Code": code, "X-Error-Message": text})

    def handle_any(self):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        for method, pattern, function in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in method:
                return function(self, body, **match.groupdict())
        return self.missing("", f"no such page: {self.command} {path}")

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815

    def commit_of(self, repo, revision):
        if repo not in self.hub.repositories:
            return self.missing("RepoNotFound", "Repository not found")
        if self.hub.private.get(repo) and self.headers.get("Authorization") != "Bearer hf_test":
            return self.refused(401, "RepoNotFound")
        if repo in self.hub.gated:
            return self.refused(403, "GatedRepo")
        sha = self.hub.sha(repo, revision)
        if sha is None:
            return self.missing("RevisionNotFound", "Invalid rev id")
        return sha


def _content(handler, sha, repo):
    return handler.hub.repositories[repo][int(sha, 16)]


def info(handler, _, repo, revision="main"):
    if sha := handler.commit_of(repo, revision):
        siblings = [{"rfilename": name} for name in _content(handler, sha, repo)]
        handler.answer(
            body={
                "_id": "1",
                "id": repo,
                "modelId": repo,
                "sha": sha,
                "private": False,
                "siblings": siblings,
                "tags": [],
                "downloads": 0,
                "likes": 0,
            }
        )


def tree(handler, _, repo, revision):
    if sha := handler.commit_of(repo, revision):
        content = _content(handler, sha, repo)
        handler.answer(
            body=[
                {"type": "file", "oid": _oid(data), "size": len(data), "path": name} for name, data in content.items()
            ]
        )


def resolve(handler, _, repo, revision, file):
    if sha := handler.commit_of(repo, revision):
        content = _content(handler, sha, repo)
        if file not in content:
            return handler.missing("EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": sha, "ETag": f'"{_oid(content[file])}"', "Accept-Ranges": "bytes"}
        first = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range") or "")
        body, status = content[file], 200
        if first:
            start, whole = int(first[1]), len(body)
            body, status = body[start:], 206
            headers["Content-Range"] = f"bytes {start}-{whole - 1}/{whole}"
        if handler.command == "GET" and handler.hub.cut:
            handler.answer(status, body[: handler.hub.cut.pop()], headers, length=len(body))
            handler.close_connection = True
            return None
        handler.answer(status, body, headers)


def preupload(handler, body, repo, revision):
    if handler.commit_of(repo, revision):
        files = [
            {
                "path": f["path"],
                "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for f in json.loads(body)["files"]
        ]
        handler.answer(body={"files": files})


def batch(handler, body, repo):
    objects = [
        {**one, "actions": {"upload": {"href": f"{handler.hub.address}/objects/{one['oid']}"}}}
        for one in json.loads(body)["objects"]
    ]
    handler.answer(body={"transfer": "basic", "objects": objects})


def store(handler, body, oid):
    assert hashlib.sha256(body).hexdigest() == oid
    handler.hub.objects[oid] = body
    handler.answer()


def commit(handler, body, repo, revision):
    if handler.headers.get("Authorization") != "Bearer hf_test":
        return handler.answer(401, {"error": "Invalid username or password."})
    if not handler.commit_of(repo, revision):
        return None
    files = dict(handler.hub.files(repo))
    for line in body.splitlines():
        item = json.loads(line)
        value = item["value"]
        if item["key"] == "header":
            handler.hub.messages.append(value["summary"])
        elif item["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif item["key"] == "lfsFile":
            files[value["path"]] = handler.hub.objects[value["oid"]]
        elif item["key"] == "deletedFile":
            del files[value["path"]]
        else:
            return handler.answer(400, {"error": f"unknown operation {item['key']}"})
    handler.hub.repositories[repo].append(files)
    sha = handler.hub.sha(repo, "main")
    return handler.answer(
        body={"success": True, "commitOid": sha, "commitUrl": f"{handler.hub.address}/{repo}/commit/{sha}"}
    )


def create(handler, body):
    if handler.headers.get("Authorization") != "Bearer hf_test":
        return handler.answer(401, {"error": "Invalid username or password."})
    asked = json.loads(body)
    repo = f"{asked['organization']}/{asked['name']}"
    where = {"url": f"{handler.hub.address}/{repo}"}
    if repo in handler.hub.repositories:
        return handler.answer(409, {"error": "You already created this model repo", **where})
    handler.hub.repositories[repo] = [{}]
    handler.hub.private[repo] = bool(asked.get("private") or asked.get("visibility") == "private")
    return handler.answer(body={"name": repo, "id": "1", **where})


def validate(handler, *_):
    handler.answer(body={"errors": [], "warnings": []})


def _oid(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
ROUTES = [
    (("GET",), rf"/api/models/{_REPO}", info),
    (("GET",), rf"/api/models/{_REPO}/revision/(?P<revision>[^/]+)", info),
    (("GET",), rf"/api/models/{_REPO}/tree/(?P<revision>[^/]+)", tree),
    (("GET", "HEAD"), rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", resolve),
    (("POST",), rf"/api/models/{_REPO}/preupload/(?P<revision>[^/]+)", preupload),
    (("POST",), rf"/{_REPO}\.git/info/lfs/objects/batch", batch),
    (("PUT",), r"/objects/(?P<oid>[0-9a-f]{64})", store),
    (("POST",), rf"/api/models/{_REPO}/commit/(?P<revision>[^/]+)", commit),
    (("POST",), r"/api/validate-yaml", validate),
    (("POST",), r"/api/repos/create", create),
]


@contextlib.contextmanager
def serve():
    """Yield a Hub that answers at `hub.address`, on this machine alone."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
