"""A Hugging Face hub on this machine, of the repositories in a folder.

    python -m tests.helpers.loopback_hub FOLDER      # and HF_ENDPOINT=the URL it prints

Each folder ``FOLDER/ORG/NAME`` is a repository with one revision, ``main``: of a model or of a
dataset, as it is asked for. The hash of its files is its commit.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

_NAME = r"([\w.-]+/[\w.-]+)"
_INFO = re.compile(rf"/api/(?:models|datasets)/{_NAME}(?:/(revision|tree)/([^/]+))?(/.*)?")
_FILE = re.compile(rf"/(?:datasets/)?{_NAME}/resolve/([^/]+)/(.+)")


class LoopbackHub(ThreadingHTTPServer):
    """Serves ``folder`` at a free port."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder.resolve()
        self.downloads: list[str] = []  # paths of files whose content was sent

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def environment(self, home: Path) -> dict[str, str]:
        """What huggingface_hub reads as it is imported, by a process that is to ask this hub."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home / "home"), "HF_HUB_OFFLINE": "0"}


def cached_snapshot(cache: Path, name: str, folder: Path) -> Path:
    """The snapshot of a model in huggingface_hub's cache, made as if ``folder`` were downloaded."""
    repository = cache / f"models--{name.replace('/', '--')}"
    files = {file.name: file for file in sorted(folder.iterdir()) if file.is_file()}
    commit = _commit(files)
    snapshot = repository / "snapshots" / commit
    for made in (snapshot, repository / "blobs", repository / "refs"):
        made.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for file_name, file in files.items():
        blob = repository / "blobs" / _digest(file)
        shutil.copyfile(file, blob)
        (snapshot / file_name).symlink_to(Path("../..", "blobs", blob.name))
    return snapshot


@contextmanager
def loopback_hub(folder: Path) -> Iterator[LoopbackHub]:
    """A hub that serves while the context lasts."""
    with LoopbackHub(folder) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: LoopbackHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if asked := _INFO.fullmatch(path):
            self._answer_info(*asked.groups())
        elif asked := _FILE.fullmatch(path):
            self._answer_file(*asked.groups())
        else:
            self._refuse("EntryNotFound")

    do_GET = do_HEAD

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._refuse("EntryNotFound")

    def _answer_info(
        self, name: str, kind: str | None, revision: str | None, below: str | None
    ) -> None:
        if (files := self._files(name, revision or "main")) is None:
            return
        if kind == "tree":
            folder = self.server.folder / name / (below or "/")[1:]
            found = folder.rglob("*") if "recursive=true" in self.path else folder.glob("*")
            listed = [_entry(each, self.server.folder / name) for each in sorted(found)]
            self._send(json.dumps(listed).encode())
            return
        info = {
            "id": name, "sha": _commit(files), "private": False, "gated": False,
            "siblings": [{"rfilename": path} for path in files],
        }  # fmt: skip
        self._send(json.dumps(info).encode())

    def _answer_file(self, name: str, revision: str, path: str) -> None:
        if (files := self._files(name, revision)) is None:
            return
        if (file := files.get(path)) is None:
            self._refuse("EntryNotFound")
            return
        if self.command == "GET":
            self.server.downloads.append(f"{name}/{path}")
        self._send(
            file.read_bytes(), {"ETag": f'"{_digest(file)}"', "X-Repo-Commit": _commit(files)}
        )

    def _files(self, name: str, revision: str) -> dict[str, Path] | None:
        """The files of a repository; None: the answer is that there is no such revision."""
        folder = self.server.folder / name
        files = {
            str(file.relative_to(folder)): file
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
        if not files:
            self._refuse("RepoNotFound")
            return None
        if revision not in ("main", _commit(files)):
            self._refuse("RevisionNotFound")
            return None
        return files

    def _refuse(self, code: str) -> None:
        self._send(b"", {"X-Error-Code": code}, status=404)

    def _send(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


def _entry(path: Path, repository: Path) -> dict[str, object]:
    entry = {"path": str(path.relative_to(repository)), "oid": "", "type": "directory", "size": 0}
    if path.is_file():
        entry |= {"oid": _digest(path), "type": "file", "size": path.stat().st_size}
    return entry


def _commit(files: dict[str, Path]) -> str:
    whole = "".join(f"{path} {_digest(file)}\n" for path, file in files.items())
    return hashlib.sha1(whole.encode()).hexdigest()


def _digest(file: Path) -> str:
    status = file.stat()
    return _digest_of(file, status.st_mtime_ns, status.st_size)


@cache
def _digest_of(file: Path, written: int, size: int) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    with LoopbackHub(Path(sys.argv[1])) as hub:
        print(f"HF_ENDPOINT={hub.url}", flush=True)
        hub.serve_forever()
