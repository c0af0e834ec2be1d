"""A process that carries out part of a search: python search_driver.py FOLDER SAMPLER PARALLEL [KILL_AFTER]."""

import os
import signal
import sys

from search_helpers import bowl, plan

from keyhole.studies.carry_out import carry_out
from keyhole.studies.search import Search


def main(folder, sampler, parallel, kill_after=0):
    told = 0

    def objective(proposal, report):
        report(1, bowl(proposal.settings) + 1)
        return bowl(proposal.settings)

    def on_event(event):
        nonlocal told
        told += hasattr(event, "state")
        if kill_after and told == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    with Search(plan(sampler), folder) as search:
        carry_out(search, objective, parallel=parallel, on_event=on_event)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
