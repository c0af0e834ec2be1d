"""Joining a Ray cluster: which one, whether it is there, and what it is told at the door."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from keyhole.core.errors import InputError, KeyholeError
from keyhole.studies.local import THREADS, cores

REACH = 10.0
"""Seconds within which something must answer at a cluster's address."""
LOCAL_STORE = 100 << 20
"""Bytes of shared memory of a cluster that is started here: tasks work in place and send next to nothing."""


def connect(address: str | None, workers: int | None) -> bool:
    """Join the cluster at an address, or the one that this machine belongs to, or start one; tells whether it did."""
    usual = os.environ.pop("RAY_ADDRESS", None)  # which Ray would put before an address that it is given
    found = address or usual
    if found in (None, "", "auto"):
        found = belongs_to()
    alone = found in (None, "local")
    if alone:
        # Ray listens on every network that the machine has: only this study knows the word that opens it. Ray reads it
        # when it is imported.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    else:
        refuse_if_unreachable(found)
    import ray

    shared: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "runtime_env": {
            # The very code that this process runs. Nodes need only what it imports.
            "py_modules": [str(Path(__file__).parents[1])],
            "excludes": ["__pycache__/"],
            "env_vars": dict.fromkeys(THREADS, "1") | kept("KEYHOLE_DATA"),
        },
    }
    if alone:
        ray.init("local", num_cpus=workers or cores(), include_dashboard=False, object_store_memory=LOCAL_STORE, **shared)
        return True
    try:
        ray.init(found, **shared)
    except ImportError:
        raise InputError(f"{found} is spoken to with grpc; install it with: pip install 'ray[client]'") from None
    except Exception as error:  # the library raises many kinds
        raise KeyholeError(
            f"the Ray cluster at {found} cannot be joined: {said(error)}; it wants the same Python and Ray as here, and "
            "RAY_AUTH_MODE and RAY_AUTH_TOKEN where it was started with them"
        ) from error
    return False


def kept(*names: str) -> dict[str, str]:
    """Variables of this environment that mean the same on every node."""
    return {name: os.environ[name] for name in names if name in os.environ}


def belongs_to() -> str | None:
    """The cluster that `ray start` made this machine part of, if it is still there."""
    path = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray/ray_current_cluster")
    try:
        # Anybody may write to /tmp: only our own word, and that of the machine's master, is taken.
        found = path.read_text().strip() if path.stat().st_uid in (0, os.getuid()) else ""
        if found:
            refuse_if_unreachable(found, seconds=2.0)
    except (OSError, InputError):
        return None
    return found or None


def refuse_if_unreachable(address: str, seconds: float = REACH) -> None:
    """Ray itself tries for minutes, and then ends the process."""
    place = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = place.hostname, place.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise InputError(f"{address!r} is no address of a Ray cluster; write host:port, for example ray://10.0.0.1:10001")
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except OSError as error:
        why = "nothing answers" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
        raise InputError(
            f"there is no Ray cluster at {address} ({why}); start one with: ray start --head, and for ray:// give its "
            "client port, 10001 where no other was chosen"
        ) from None


def said(error: Exception) -> str:
    """The last line of what Ray says, which is the one that tells why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else type(error).__name__
