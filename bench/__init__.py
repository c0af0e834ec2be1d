"""Side-by-side measurements against peers; run them with `make bench` or `python -m bench`."""
