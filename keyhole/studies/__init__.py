"""Arms x seeds under one budget: plan, run, compare, report."""
