"""A web server with data on it, whole or broken, and small data sets to fetch from it."""

from __future__ import annotations

import hashlib
import io
import socket
import struct
import tarfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prong.lab.datasets.published import File, Published

HALFWAY = ("cut", "short", "short, its length untold", "hangs")


class Mirror(ThreadingHTTPServer):
    """Serves the files it is given; `fault` says what goes wrong, `asked` what was asked for."""

    def __init__(self, files: Mapping[str, bytes], fault: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.fault = dict(files), fault
        self.asked: list[str] = []
        self.released = threading.Event()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Mirror

    def do_GET(self) -> None:
        name, fault = self.path.strip("/"), self.server.fault
        self.server.asked.append(name)
        if name not in self.server.files or fault == "not found":
            self.send_error(404)
            return
        body = self.server.files[name]
        if fault == "wrong":
            body = bytes(len(body))
        self.send_response(200)
        if fault != "short, its length untold":
            self.send_header("Content-Length", str(len(body)))
        if fault == "zips for who can unzip" and "gzip" in self.headers.get("Accept-Encoding", ""):
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if fault in HALFWAY else body)
        if fault == "hangs":
            self.wfile.flush()
            self.server.released.wait(60)
        if fault == "cut":  # reset instead of an orderly end
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def finish(self) -> None:
        if self.server.fault != "cut":
            super().finish()

    def log_message(self, *words: object) -> None:
        return


@contextmanager
def serving(files: Mapping[str, bytes], fault: str = "") -> Iterator[Mirror]:
    with Mirror(files, fault) as mirror:
        thread = threading.Thread(target=mirror.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield mirror
        finally:
            mirror.released.set()
            mirror.shutdown()
            thread.join()


def described(files: Mapping[str, bytes]) -> tuple[File, ...]:
    return tuple(File(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items())


def small(published: Published, files: Mapping[str, bytes], archive: bytes | None = None) -> Published:
    """A data set of other files, else like the published one; with an archive if that is given."""
    tar = described({"small.tar.gz": archive})[0] if archive is not None else None
    return replace(published, files=described(files), archive=tar, mirrors=())


def tar_of(files: Mapping[str, bytes], *others: tarfile.TarInfo) -> bytes:
    """A tar.gz of files, and of members without content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for member in others:
            archive.addfile(member)
    return buffer.getvalue()
