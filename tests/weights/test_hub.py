"""Learned optimisers on a hub of our own, which answers on this machine as the real one does."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from l2lopt import optimisers
from l2lopt.core.errors import UserError
from l2lopt.weights import files as weights
from l2lopt.weights import hub
from l2lopt.weights.card import model_card

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """One repository in memory: made, written to by commits, read by revision."""

    files: dict
    made: list

    def answer(self, code, body=b"", **headers):
        self.send_response(code)
        for name, value in {"Content-Length": len(body), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def tell(self, **facts):
        self.answer(200, json.dumps(facts).encode(), Content_Type="application/json")

    def do_POST(self):
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.path == "/api/repos/create":
            asked = json.loads(text)
            self.made.append(f"{asked['organization']}/{asked['name']}")
            self.tell(url=f"http://{self.headers['Host']}/{self.made[-1]}")
        elif self.path == "/api/validate-yaml":
            self.tell(errors=[], warnings=[])
        elif "/preupload/" in self.path:
            names = [each["path"] for each in json.loads(text)["files"]]
            self.tell(files=[{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names])
        else:
            for line in map(json.loads, text.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.tell(commitUrl=f"http://{self.headers['Host']}/me/mine/commit/{COMMIT}", commitOid=COMMIT)

    def do_GET(self):
        if "/revision/" in self.path:  # earlier releases of the hub's package ask whether it can take large files
            self.tell(id="me/mine", xetEnabled=False)
            return
        body = self.files.get(self.path.rpartition("/")[2])
        if body is None:
            self.answer(404, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        else:
            self.answer(200, body, ETag=f'"{hashlib.sha256(body).hexdigest()}"')

    def do_HEAD(self):
        self.do_GET()

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch, tmp_path):
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants, file_download

    handler = type("OneHub", (Hub,), {"files": {}, "made": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        for home in (constants, file_download):  # releases before 1.0 have a copy of the name in the second
            monkeypatch.setattr(home, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield handler
        server.shutdown()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.safetensors"
    weights.save(optimisers.make("coordinatewise", cell="ihc-lstm", seed=3), path, {"updates": 7})
    return path


def test_what_is_pushed_can_be_pulled(server, file):
    assert COMMIT in hub.push(file, "me/my-optimiser", token="hf_x")
    assert server.made == ["me/my-optimiser"]
    assert server.files == {hub.FILE: file.read_bytes(), "README.md": model_card(file, "me/my-optimiser").encode()}
    pulled = hub.pull("me/my-optimiser")
    assert weights.header(pulled)["training"] == {"updates": 7}
    for name, value in weights.load(file).phi().items():
        assert torch.equal(weights.load(pulled).phi()[name], value)


def test_a_card_of_ones_own_goes_with_it(server, file):
    hub.push(file, "me/my-optimiser", card="# Mine\n")
    assert server.files["README.md"] == b"# Mine\n"


def test_a_missing_repository_and_a_foreign_file_are_one_line(server, tmp_path):
    with pytest.raises(UserError, match=r"me/none: expected a repository of the hub"):
        hub.pull("me/none")
    with pytest.raises(UserError, match=r"a b: expected a repository of the hub"):
        hub.pull("a b")
    server.files[hub.FILE] = b"something else"
    with pytest.raises(UserError, match="expected a whole safetensors file"):
        hub.pull("me/other")
    (tmp_path / "foreign").write_bytes(b"something else")
    with pytest.raises(UserError, match="expected a whole safetensors file"):
        hub.push(tmp_path / "foreign", "me/other")
    assert not server.made


def test_without_a_connection_it_is_one_line(file, monkeypatch):
    """The hub's package raises the errors of the one that it connects by."""
    refused = type("ConnectError", (Exception,), {"__module__": "httpx"})

    def create_repo(*_, **__):
        raise refused("connection refused")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", create_repo)
    with pytest.raises(UserError, match=r"me/mine: expected a repository .*, found connection refused; check"):
        hub.push(file, "me/mine")
    refused.__module__ = "elsewhere"
    with pytest.raises(refused):
        hub.push(file, "me/mine")


def test_without_the_extra_it_says_what_to_install(file, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r'pip install "l2lopt\[hub\] @ git'):
        hub.push(file, "me/mine")
