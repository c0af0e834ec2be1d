"""A process that carries out part of a search: python search_driver.py FOLDER SAMPLER PARALLEL [KILL_AFTER]."""

import os
import signal
import sys

from search_helpers import bowl, plan

from keyhole.studies.search.engine import Search


def main(folder, sampler, parallel, kill_after=0):
    with Search(plan(sampler), folder) as search:
        going, told = [], 0
        while going := going + search.ask(parallel - len(going)):
            proposal = going.pop(0)
            search.report(proposal.number, 1, bowl(proposal.settings) + 1)
            search.tell(proposal.number, bowl(proposal.settings))
            told += 1
            if told == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
