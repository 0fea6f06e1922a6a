"""Namespaces of this machine's network, one a peer, with links of a certain rate between them.

    node 0 --veth--+                      Each way of each link has a token bucket of its own.
    node 1 --veth--+-- bridge, 10.X.Y.1   The bridge is where the anchor listens.
    node 2 --veth--+

Only root may make them, and only Linux has them. `enter` takes this process into one, for good.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
from pathlib import Path

CLONE_NEWNET = 0x40000000
MTU = 9000
"""Large packets cost little of the CPU, which here is that of all peers."""


class Network:
    """A context manager."""

    def __init__(self, nodes: int, megabits: int = 0, tag: str = "pt") -> None:
        """`megabits` a second each way; 0: as fast as the machine is."""
        self.nodes, self.megabits = nodes, megabits
        # Two processes may have a network each, at the same time.
        tag, net = f"{tag}{os.getpid()}", f"10.{os.getpid() // 256 % 256}.{os.getpid() % 256}"
        self.bridge = f"{tag}br"
        self.names = [f"{tag}n{number}" for number in range(nodes)]
        self.hosts = [f"{net}.{10 + number}" for number in range(nodes)]
        self.anchor_host = f"{net}.1"

    def __enter__(self) -> "Network":
        self.__exit__()
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        _ip(f"link add {self.bridge} type bridge")
        _ip(f"addr add {self.anchor_host}/24 dev {self.bridge}")
        _ip(f"link set {self.bridge} up mtu {MTU}")
        for name, host in zip(self.names, self.hosts, strict=True):
            _ip(f"netns add {name}")
            _ip(f"link add {name}v type veth peer name eth0 netns {name}")
            _ip(f"link set {name}v master {self.bridge} up mtu {MTU}")
            _ip(f"-n {name} addr add {host}/24 dev eth0")
            _ip(f"-n {name} link set eth0 up mtu {MTU}")
            _ip(f"-n {name} link set lo up")
            if self.megabits:
                bucket = f"root tbf rate {self.megabits}mbit burst 256kb latency 200ms"
                _run(f"tc qdisc add dev {name}v {bucket}")
                _run(f"tc -n {name} qdisc add dev eth0 {bucket}")

    def cut(self, one: int, other: int) -> None:
        """Let two nodes hear nothing of each other any more. No connection is told."""
        _ip(f"-n {self.names[one]} route add blackhole {self.hosts[other]}/32")
        _ip(f"-n {self.names[other]} route add blackhole {self.hosts[one]}/32")

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(f"netns del {name}")
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip(f"link del {self.bridge}")


def available() -> bool:
    """Whether this user may make namespaces, and the tools are there."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        return False
    try:
        _ip("netns add ptprobe")
        _ip("netns del ptprobe")
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def enter(name: str) -> None:
    """Let this process, which has one thread, go on in a namespace."""
    with Path(f"/run/netns/{name}").open() as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"the namespace {name} could not be entered")


def _ip(command: str) -> None:
    _run(f"ip {command}")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)
