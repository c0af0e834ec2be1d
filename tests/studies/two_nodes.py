"""A real Ray cluster of two nodes of one CPU each, on this machine; either can be killed as a machine is lost."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from tests.studies.task_helpers import kill, processes_below

STORE = 80 << 20
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 3}
"""A lost node is noticed within a second or two, not within fifteen."""


class TwoNodes:
    """The second node carries tasks and nothing else."""

    client: str | None = None
    """Where Ray's client is listened to, if the library that it needs is there."""

    def __enter__(self) -> Self:
        # Ray leaves a note of its address: not where the machine's other users of Ray would read it. Short, for sockets.
        self._folder = Path(tempfile.mkdtemp(prefix="kh", dir="/tmp"))
        own = {
            "RAY_TMPDIR": str(self._folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        self._before = {name: os.environ.get(name) for name in own}
        os.environ |= own
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own affairs
            from ray.cluster_utils import Cluster

            node = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False}
            head = {**node, "_system_config": QUICK}
            if find_spec("grpc") is not None:
                with socket.socket() as free:
                    free.bind(("127.0.0.1", 0))
                    head["ray_client_server_port"] = free.getsockname()[1]
                self.client = f"ray://127.0.0.1:{head['ray_client_server_port']}"
            self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
            node.pop("include_dashboard")
            self._second = self._cluster.add_node(**node)
        self.address: str = self._cluster.address
        return self

    def __exit__(self, *error: object) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._cluster.shutdown()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(self._folder, ignore_errors=True)

    def lose_one(self) -> None:
        """The second node is gone at once, with everything on it."""
        raylet = self._second.all_processes["raylet"][0].process.pid
        for pid in [raylet, *processes_below(raylet)]:
            kill(pid, signal.SIGKILL)

    def add_one(self) -> None:
        """Another node in place of the lost one."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._second = self._cluster.add_node(num_cpus=1, object_store_memory=STORE)
