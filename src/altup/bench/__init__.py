"""Speed and memory on this machine, against peers, in one run: a table of cases and one runner.

- A *case* is one question, such as "how long does a training step take?": a line of the table in `cases/`.
- A *problem* is a case at one size. It lists its providers; ratios refer to the one that it
  names or, without a name, to the fastest peer.
- A *provider* is a way to do that work: ours, plain (ours without kernels), a peer's, or a floor, which does only
  a part of the work and bounds the time of the others from below.
- A *work* is a provider that has been built: functions to run, and a comparison with the reference.
- A *row* is one number that was measured, with all that is needed to read it alone.

The runner builds the providers of a problem, compares each with the reference, and times in turns those that
agree. To add a provider, add a line to the list of its case and a function that returns a `Work`.
"""
