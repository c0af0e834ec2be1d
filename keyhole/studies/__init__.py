"""Arms x seeds under one budget: plan, run, compare, report.

plan, prepare, match, rates, study, display      a study from its file to the end of its last trial
trial, measure                                   one task: train, then measure
execute, local, worker, together                 who carries tasks out on this machine,
cluster, driver, join, node                      and on a Ray cluster
result, statistics, intervals                    what was found, and how sure it is
report/                                          told in words, tables and charts
search/                                          the same executors, asked to find good recipe keys
"""
