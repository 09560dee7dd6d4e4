"""Two hosts on this machine: network namespaces joined by a cable."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Host:
    """A network of its own: the only way out is a cable to the other host."""

    name: str
    address: str
    interface: str

    def begin(self, words: list[str]) -> subprocess.Popen[str]:
        """A process on this host."""
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
        environment |= {"GLOO_SOCKET_IFNAME": self.interface, "TP_SOCKET_IFNAME": self.interface}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Both, for a while.

    Raises:
        PermissionError: only an administrator can make them, or the tools are missing.
    """
    number = os.getpid()
    hosts = [Host(f"prong{number}{x}", f"10.77.0.{k}", f"prong{x}") for k, x in ((1, "a"), (2, "b"))]
    one, two = hosts
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
        _ip("-n", one.name, "link", "add", one.interface, "type", "veth", "peer", two.interface, "netns", two.name)
        for host in hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
            for link in ("lo", host.interface):
                _ip("-n", host.name, "link", "set", link, "up")
        yield one, two
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True)


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise PermissionError("there is no ip command") from error
    if "not permitted" in done.stderr:
        raise PermissionError(done.stderr.strip())
    assert done.returncode == 0, done.stderr
