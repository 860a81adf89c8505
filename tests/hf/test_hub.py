"""Models by a name of the Hugging Face Hub, from a hub on loopback."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants as hub
import pytest

from tests.jobs import FIXTURES
from torchtitan.base.errors import ConfigError
from torchtitan.hf.hub import download
from torchtitan.job import load_config
from torchtitan.resume_rules import resolve_model

NAME, COMMIT, KEY = "me/tiny", "0" * 39 + "1", "checkpoint.initial_load_path"
FILES = {
    "config.json": (FIXTURES / "exaone4" / "config.json").read_bytes(),
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"a pickle",
    "modeling.py": b"raise SystemExit",
}


class Hub(BaseHTTPRequestHandler):
    """Serves one model."""

    def do_GET(self) -> None:
        about = {"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
        tree = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in FILES.items()
        ]
        content = {f"/{NAME}/resolve/{COMMIT}/{name}": FILES[name] for name in FILES}
        content[f"/api/models/{NAME}/revision/main"] = json.dumps(about).encode()
        content[f"/api/models/{NAME}/tree/{COMMIT}"] = json.dumps(tree).encode()
        found = content.get(self.path.partition("?")[0])
        self.send_response(404 if found is None else 200)
        if found is None:
            self.send_header("X-Error-Code", "RepoNotFound")
            found = b""
        self.send_header("ETag", f'"{hashlib.sha1(found).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(found)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(found)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(hub, "ENDPOINT", endpoint)
        monkeypatch.setattr(hub, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
        monkeypatch.chdir(tmp_path)
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_a_name_is_its_files_without_code(server: ThreadingHTTPServer) -> None:
    folder = download(NAME, key=KEY)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        name: content for name, content in FILES.items() if not name.endswith((".bin", ".py"))
    }


def test_a_job_has_the_models_sizes_and_tokenizer(
    server: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"--checkpoint.initial_load_path={NAME}", "--checkpoint.initial_load_in_hf"]
    job = [*words, "--model.name=transformers", "--model.flavor=hf"]
    config = resolve_model(load_config(job))
    folder = config.checkpoint.initial_load_path
    assert folder == config.model.tokenizer_path
    assert str(folder).startswith(str(tmp_path / "hub"))
    # again without a network
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    assert resolve_model(load_config(job)) == config
    # a folder of this name comes first, also if it is not there yet
    (tmp_path / "me").mkdir()
    with pytest.raises(ConfigError):
        resolve_model(load_config(job))


def test_a_model_that_the_hub_lacks(server: ThreadingHTTPServer) -> None:
    with pytest.raises(ConfigError, match="me/other"):
        download("me/other", key=KEY)
