"""A search over recipe keys: plan, ask, train, tell, report. It trains with the executors of studies."""
