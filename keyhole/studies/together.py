"""torchrun, which ends when whoever started it does: `python -m keyhole.studies.together ARGUMENTS OF TORCHRUN`.

A worker that is killed cannot end what it started. Its end closes the standard input of this process, and what trains
here saves and ends, so that the task can go on elsewhere.
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def main() -> None:
    """Run torchrun in this process, and watch standard input."""
    # Children must not hold, or read, what tells of the end.
    watched = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=_end_with, args=(watched,), daemon=True).start()
    from torch.distributed.run import main as torchrun

    torchrun(sys.argv[1:])


def _end_with(watched: int) -> None:
    while os.read(watched, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
