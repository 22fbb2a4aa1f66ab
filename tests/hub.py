"""A small Hub on localhost: kernel repositories in memory, behind the endpoints that huggingface_hub calls.

In: what a client uploads. Out: refs, trees, files and publishers as huggingface.co answers them, and a log of requests.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


GIT_ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"  # all that a new repository holds, in short


def git_blob(data):
    """git's name of a file's content."""
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


class Hub:
    """repos: repo id -> branch -> commit; commits: commit -> path -> bytes; trusted: publishers with a badge."""

    def __init__(self):
        self.repos, self.commits, self.trusted, self.requests = {}, {}, set(), []

    def commit(self, repo_id, branch, files):
        sha = hashlib.sha1(repr((repo_id, sorted((p, git_blob(d)) for p, d in files.items()))).encode()).hexdigest()
        self.commits[sha] = files
        self.repos[repo_id][branch] = sha
        return sha

    def resolve(self, repo_id, revision):
        branches = self.repos.get(repo_id, {})
        return branches.get(revision) or (revision if revision in branches.values() else None)

    @contextlib.contextmanager
    def serve(self):
        """Yields the address."""
        hub = self
        handler = type("Handler", (_Handler,), {"hub": hub})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


REPO = r"(?P<repo>[^/]+/[^/]+)"
ROUTES = [
    ("GET", rf"/api/kernels/{REPO}/refs", "refs"),
    ("GET", rf"/api/kernels/{REPO}/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?", "tree"),
    ("GET", rf"/api/kernels/{REPO}/revision/(?P<revision>[^/]+)", "info"),
    ("GET", rf"/kernels/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "file"),
    ("GET", r"/api/organizations/(?P<name>[^/]+)/overview", "publisher"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate"),
    ("POST", rf"/api/kernels/{REPO}/branch/(?P<branch>[^/]+)", "branch"),
    ("POST", rf"/api/kernels/{REPO}/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", rf"/api/kernels/{REPO}/commit/(?P<revision>[^/]+)", "commit"),
]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self.dispatch("GET")

    def do_GET(self):
        self.dispatch("GET")

    def do_POST(self):
        self.dispatch("POST")

    def dispatch(self, method):
        address = urlsplit(self.path)
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.query = parse_qs(address.query)
        self.hub.requests.append(f"{self.command} {unquote(address.path)}")
        for route_method, pattern, name in ROUTES:
            match = re.fullmatch(pattern, address.path)
            if method == route_method and match:
                return getattr(self, name)(**{k: v and unquote(v) for k, v in match.groupdict().items()})
        self.answer({"error": f"no such endpoint: {method} {self.path}"}, 404)

    def answer(self, data, status=200, **headers):
        if not isinstance(data, bytes):
            data = json.dumps(data).encode()
            headers["Content-Type"] = "application/json"
        self.send_response(status)
        for key, value in {"Content-Length": len(data), **headers}.items():
            self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def missing(self, what):
        self.answer({"error": f"{what} not found"}, 404, X_Error_Code=f"{what}NotFound")

    def found(self, repo, revision):
        """The commit, or None after the answer that it does not exist."""
        if repo not in self.hub.repos:
            return self.missing("Repo")
        return self.hub.resolve(repo, revision) or self.missing("Revision")

    # ---- Reading ---------------------------------------------------------------------------------------------------

    def refs(self, repo):
        if repo not in self.hub.repos:
            return self.missing("Repo")
        heads = self.hub.repos[repo].items()
        branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": sha} for n, sha in heads]
        self.answer({"branches": branches, "converts": [], "tags": []})

    def info(self, repo, revision):
        if sha := self.found(repo, revision.removeprefix("refs/heads/")):
            self.answer({"id": repo, "sha": sha, "siblings": [{"rfilename": p} for p in self.hub.commits[sha]]})

    def tree(self, repo, revision, path):
        sha = self.found(repo, revision.removeprefix("refs/heads/"))
        if not sha:
            return
        prefix = f"{path}/" if path else ""
        recursive = self.query.get("recursive", ["false"])[0].lower() == "true"
        entries = {}
        for name, data in self.hub.commits[sha].items():
            if not name.startswith(prefix):
                continue
            parts = name[len(prefix) :].split("/")
            for depth in range(1, len(parts)) if recursive else [1]:
                if depth < len(parts):
                    folder = prefix + "/".join(parts[:depth])
                    entries[folder] = {"type": "directory", "path": folder, "oid": git_blob(folder.encode()), "size": 0}
            if recursive or len(parts) == 1:
                entries[name] = {"type": "file", "path": name, "oid": git_blob(data), "size": len(data)}
        if not entries:
            return self.missing("Entry")
        self.answer(list(entries.values()))

    def file(self, repo, revision, path):
        sha = self.found(repo, revision.removeprefix("refs/heads/"))
        if not sha:
            return
        data = self.hub.commits[sha].get(path)
        if data is None:
            return self.answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
        self.answer(data, X_Repo_Commit=sha, ETag=f'"{git_blob(data)}"')

    def publisher(self, name):
        self.answer({"name": name, "fullname": name, "trustedKernelPublisher": name in self.hub.trusted})

    # ---- Writing ---------------------------------------------------------------------------------------------------

    def create(self):
        asked = json.loads(self.body)
        repo = f"{asked['organization']}/{asked['name']}"
        if asked["type"] != "kernel":
            return self.answer({"error": "only kernels here"}, 400)
        url = {"url": f"{self.address}/kernels/{repo}", "id": repo}
        if repo in self.hub.repos:
            return self.answer({"error": "exists", **url}, 409)
        self.hub.repos[repo] = {}
        self.hub.commit(repo, "main", {".gitattributes": GIT_ATTRIBUTES})
        self.answer(url)

    @property
    def address(self):
        return f"http://{self.headers['Host']}"

    def branch(self, repo, branch):
        if branch in self.hub.repos[repo]:
            return self.answer({"error": "exists"}, 409)
        self.hub.repos[repo][branch] = self.hub.repos[repo]["main"]
        self.answer({})

    def validate(self):
        content = json.loads(self.body)["content"]
        errors = [] if content.startswith("---\n") else [{"message": "no front matter"}]
        self.answer({"errors": errors, "warnings": []}, 400 if errors else 200)

    def preupload(self, repo, revision):
        sha = self.found(repo, revision)
        if not sha:
            return
        old = self.hub.commits[sha]
        self.answer({
            "files": [
                {
                    "path": f["path"],
                    "uploadMode": "regular",
                    "shouldIgnore": False,
                    "oid": git_blob(old[f["path"]]) if f["path"] in old else None,
                }
                for f in json.loads(self.body)["files"]
            ]
        })  # fmt: skip

    def commit(self, repo, revision):
        if not self.headers.get("Authorization"):
            return self.answer({"error": "who are you?"}, 401)
        sha = self.found(repo, revision)
        if not sha:
            return
        files = dict(self.hub.commits[sha])
        for line in self.body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        sha = self.hub.commit(repo, revision, files)
        self.answer({"commitUrl": f"{self.address}/kernels/{repo}/commit/{sha}", "commitOid": sha})
