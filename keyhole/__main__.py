"""`python -m keyhole`, and with it `torchrun --nproc-per-node 2 -m keyhole train RECIPE`."""

from keyhole.cli.main import main

if __name__ == "__main__":
    main()
