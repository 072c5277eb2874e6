"""Speed and memory on this machine, against peers, in one run.

A *case* is one question ("how long does a training step take?"). It yields *problems*, one size each, and each
problem lists its *providers*: the ways to do that work, ours and others'. To add a provider, add a line to the
list of its case in `cases/` and a function that returns a `Work`; the runner checks, times and reports it.
"""
