"""Grids of runs that answer a question: the paper's tables and figures at any scale, its numbers beside ours.

The words, from the question to the number:

- a *study* is a question and the models that answer it (`study.py`, `library/*.yaml`);
- a *row* is one model of a study, known by its label;
- a *scale* says how large and how long the runs are (`scale.py`, `scales/*.yaml`);
- a *sweep* finds a model's best settings before it is compared (`sweep.py`);
- a *trial* is a row at one size, and one length where the study has several, with one seed (`plan.py`);
- a *job* is a piece of work: a pretraining run, a fine-tuning run, or a comparison of speed (`jobs.py`). Its *key*
  is a hash of everything that decides what is computed, so that trials share jobs and none runs twice;
- a *record* is what is stored of a finished job: config, measures, curves, coefficients (`results.py`);
- a *result* is one number: one measure of one trial, a line of a study's CSV file (`results.py`);
- a *claim* says that one row is better than another; its *verdict* is what results say of it (`statistics.py`).

`plan.py` lists what can be run now, given the records so far; `queue.py` runs it, `work.py` does one job and
records it; `run.py` turns records into results; `tables.py`, `figures.py` and `report.py` show them.
"""
