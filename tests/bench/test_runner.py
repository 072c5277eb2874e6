"""The runner on problems whose answers and times are known beforehand."""

from __future__ import annotations

import signal
import time
from functools import partial

import pytest
import torch

from altup.bench import timing
from altup.bench.problem import Fact, Problem, Provider, Setup, Work, errors
from altup.bench.runner import Runner, TimeIsUp, fast_math, stopped_after

SETUP = Setup(torch.device("cpu"), quick=True)
X = torch.tensor([1.0, 2.0, 3.0])


class Clock:
    """Time that passes only where `pass_time` says so: results do not depend on how busy the machine is."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def pass_time(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made)
    monkeypatch.setattr(time, "monotonic", made)
    return made


def squares(function=torch.square, log=None, name="", wait=lambda: None):
    """A provider of Σ x² that may be wrong or `wait`, checked against x² and 2x."""

    def build():
        x = X.clone().requires_grad_()

        def forward(i):
            if log is not None:
                log.append(name)
            wait()
            return function(x).sum()

        def backward(out):
            wait()
            return torch.autograd.grad(out, x)

        def compare():
            out = forward(0)
            (gradient,) = backward(out)
            return errors({"sum": out, "gradient": gradient}, {"sum": torch.tensor(14.0), "gradient": 2 * X})

        return Work(forward, backward, compare, per_repetition=4)

    return build


def run(providers, **options):
    rows = []
    problem = Problem("squares", {"d": 3}, providers, baseline="right", tolerances={"": 1e-6, "sum": 0.1})
    if "derive" in options:
        problem.derive = options.pop("derive")
    Runner(SETUP, rows.append, **{"rounds": 2, **options}).run([problem])
    return rows


def timed(rows):
    return {row.provider for row in rows if row.metric == "ms"}


def problems_of(rows):
    return {row.provider: (row.status, row.note) for row in rows if row.status != "ok"}


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, upstream):
        return 2.001 * ctx.saved_tensors[0] * upstream


def test_without_a_baseline_the_fastest_peer_is_it(clock):
    providers = [
        Provider("ours", squares(wait=partial(clock.pass_time, 0.001))),
        Provider("slow peer", squares(wait=partial(clock.pass_time, 0.02)), "peer"),
        Provider("peer", squares(wait=partial(clock.pass_time, 0.002)), "peer"),
        Provider("wrong peer", squares(lambda x: x**2 + 1), "peer"),
    ]
    rows = []
    Runner(SETUP, rows.append, rounds=2).run([Problem("squares", {"d": 3}, providers, tolerances={"": 1e-6})])
    notes = {row.provider: row.note for row in rows if row.metric == "speedup"}
    assert notes == dict.fromkeys(("ours", "slow peer"), "over peer, the fastest peer")


def test_some_sizes_only():
    rows = []
    of_sizes = [
        Problem("squares", {"d": d, "batch": batch}, [Provider("one", squares())], tolerances={"": 1e-6})
        for d in (3, 4)
        for batch in (1, 2, 5)
    ]
    Runner(SETUP, rows.append, rounds=1, where=["d=3", "batch=1", "batch=5"]).run(of_sizes)
    assert {(row.d, row.batch) for row in rows} == {(3, 1), (3, 5)}
    rows.clear()
    Runner(SETUP, rows.append, rounds=1, where=["tokens=3"]).run(of_sizes)
    assert rows == []


def test_unchecked_nothing_is_compared():
    wrong = Provider("wrong", squares(lambda x: x**2 + 1))
    assert timed(run([Provider("right", squares()), wrong], unchecked=True)) == {"right", "wrong"}


def test_what_takes_long_by_the_clock_is_not_repeated_for_its_own_sake(clock):
    """The first repetition, and the one that is timed: minutes of decoding are not made three times."""
    log = []

    def build():
        def forward(i):
            log.append(i)
            clock.pass_time(6.0)

        return Work(forward, mode="generate", on_host=True)

    rows = []
    Runner(SETUP, rows.append, rounds=1).run([Problem("decoding", {"d": 1}, [Provider("slow", build)])])
    assert log == [0, 1]
    assert [row.p50 for row in rows if row.metric == "ms"] == [6000.0]


def test_fast_math_is_for_the_time_of_a_run():
    def settings():
        reduces = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
        return torch.get_float32_matmul_precision(), reduces

    before = settings()
    with fast_math():
        assert settings() == ("high", True)
    assert settings() == before


def test_only_what_agrees_is_timed_and_the_rest_is_reported():
    def cannot_be_built():
        raise ModuleNotFoundError("No module named 'somebody'\nand more")

    rows = run(
        [
            Provider("right", squares()),
            Provider("nearly", squares(lambda x: x**2 + 0.01)),
            Provider("wrong sum", squares(lambda x: x**2 + 1)),
            Provider("wrong gradient", squares(WrongGradient.apply)),
            Provider("nan", squares(lambda x: x**2 * torch.nan)),
            Provider("absent", cannot_be_built, "peer"),
            Provider("for gpus", squares(), compiled=True),
            Provider("also right", squares(lambda x: x * x)),
        ]
    )
    assert timed(rows) == {"right", "nearly", "also right"}
    found = problems_of(rows)
    assert found["wrong sum"] == ("disagrees", "sum is off by 0.21, more than 0.1")
    assert found["wrong gradient"] == ("disagrees", "gradient is off by 0.0005, more than 1e-06")
    assert found["nan"][0] == "disagrees"
    assert found["absent"] == ("failed", "ModuleNotFoundError: No module named 'somebody'")
    assert found["for gpus"][0] == "skipped"
    assert next(row for row in rows if row.provider == "wrong gradient").error == pytest.approx(0.0005, rel=1e-3)
    assert all(row.d == 3 and row.case == "squares" for row in rows)


def test_times_and_ratios(clock):
    providers = [("right", 0.004), ("slower", 0.012)]
    rows = run([Provider(n, squares(wait=partial(clock.pass_time, s))) for n, s in providers], rounds=3)

    def middle(provider, metric, mode="both"):
        return next(r.p50 for r in rows if (r.provider, r.metric, r.mode) == (provider, metric, mode))

    assert middle("right", "ms") == pytest.approx(8)
    assert middle("slower", "ms", "forward") == pytest.approx(12)
    assert middle("slower", "ms", "backward") == pytest.approx(12)
    assert middle("right", "seq/s") == pytest.approx(4000 / middle("right", "ms"))
    assert middle("slower", "speedup") == pytest.approx(middle("right", "ms") / middle("slower", "ms"))
    assert not [row for row in rows if row.provider == "right" and row.metric == "speedup"]
    assert all(row.p20 <= row.p50 <= row.p80 for row in rows)


def test_providers_take_turns_and_another_begins_each_round(monkeypatch):
    monkeypatch.setattr(timing, "BURST_MS", 0.0)  # bursts of one
    log: list[str] = []
    names = ["a", "b", "c"]
    run([Provider(name, squares(log=log, name=name)) for name in names], rounds=3)
    assert log[-9:] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]


def test_a_provider_that_fails_later_does_not_stop_the_others():
    def fails_in_the_end():
        x = X.clone().requires_grad_()
        calls = []

        def forward(i):
            calls.append(i)
            if len(calls) > 6:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return (x**2).sum()

        return Work(forward, lambda out: out.backward())

    rows = run([Provider("right", squares()), Provider("greedy", fails_in_the_end)])
    assert problems_of(rows) == {"greedy": ("failed", "OutOfMemoryError: CUDA out of memory")}
    assert timed(rows) == {"right"}


def test_time_limit_leaves_time_for_what_was_built(clock):
    names = [f"p{i}" for i in range(12)]
    wait = partial(clock.pass_time, 0.02)
    rows = run([Provider(name, squares(wait=wait)) for name in names], rounds=1000, time_limit=1.5)
    assert clock.now < 4  # one round of what was built, and no more; all rounds would take minutes
    skipped = [
        name for name, (status, note) in problems_of(rows).items() if (status, note) == ("skipped", "time limit")
    ]
    assert 0 < len(skipped) < 12
    assert timed(rows) == set(names) - set(skipped)


def test_the_time_limit_holds_inside_a_provider():
    """The alarm comes while the second one is built; the first one's times are kept."""

    def build():
        signal.raise_signal(signal.SIGALRM)
        return squares()()

    rows = []
    problem = Problem("toy", {}, [Provider("quick", squares()), Provider("slow", build)])
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeIsUp), stopped_after(3600.0):
        Runner(SETUP, rows.append, rounds=1).run([problem])
    assert timed(rows) == {"quick"}
    assert problems_of(rows) == {}
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_what_is_cheap_is_timed_before_what_compiles_is_built():
    """So that it is there when the compiler takes longer than the time that is left."""

    def never_ends():
        raise KeyboardInterrupt

    rows = []
    providers = [Provider("slow", never_ends, compiled=True), Provider("right", squares())]
    setup = Setup(torch.device("cpu"), quick=True, compiles=True)
    with pytest.raises(KeyboardInterrupt):
        Runner(setup, rows.append).run([Problem("squares", {"d": 3}, providers, tolerances={"": 1e-6})])
    assert timed(rows) == {"right"}


def test_every_case_has_its_share_of_the_time(clock):
    wait = partial(clock.pass_time, 0.02)
    problems = [
        Problem(case, {"d": 3}, [Provider(f"p{i}", squares(wait=wait)) for i in range(12)], tolerances={"": 1e-6})
        for case in ("first", "second")
    ]
    rows = []
    Runner(SETUP, rows.append, rounds=1, time_limit=6.0, cases=["first", "second"]).run(problems)
    for case in ("first", "second"):
        assert 0 < len(timed(row for row in rows if row.case == case)) < 12


def test_interrupting_keeps_what_was_timed():
    calls = []

    def interrupted():
        def forward(i):
            calls.append(i)
            if len(calls) > 40:
                raise KeyboardInterrupt

        return Work(forward)

    rows = []
    problem = Problem("squares", {}, [Provider("right", squares()), Provider("x", interrupted)], baseline="right")
    problem.tolerances = {"": 1}
    with pytest.raises(KeyboardInterrupt):
        Runner(SETUP, rows.append, rounds=1000).run([problem])
    assert "right" in timed(rows)


def test_only_chosen_providers_and_what_follows_from_them():
    def derive(timings):
        assert set(timings) == {"fast a", "fast b"}
        yield Fact("fast a", "fraction", timings["fast a"]["both"].p50 / timings["fast b"]["both"].p50, "of b")

    names = ("fast a", "fast b", "slow")
    rows = run([Provider(name, squares()) for name in names], only=["fast*"], derive=derive)
    assert {row.provider for row in rows} == {"fast a", "fast b"}
    fraction = next(row for row in rows if row.metric == "fraction")
    assert (fraction.provider, fraction.note, fraction.kind) == ("fast a", "of b", "ours")


def test_cold_start_alone():
    """Only what is compiled is started, once, and checked; nothing is timed."""
    setup = Setup(torch.device("cpu"), quick=True, compiles=True)
    log: list[str] = []
    providers = [Provider("eager", squares()), Provider("compiled", squares(log=log, name="c"), compiled=True)]
    rows: list = []
    Runner(setup, rows.append, cold=True).run([Problem("squares", {}, providers, "eager", {"": 1e-6})])
    assert [(row.provider, row.mode, row.metric, row.note) for row in rows] == [("compiled", "start", "s", "cold")]
    assert log == ["c", "c"]  # the start, and the check
