"""The tests notice when a formula, a seed, a seal or a check is broken: fifty places, one at a time."""

from __future__ import annotations

import pytest

from tests.chaos.mutations import MUTATIONS, PACKAGE, ROOT, Mutation, try_all


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[one.what for one in MUTATIONS])
def test_a_break_is_where_it_is_said_to_be(mutation: Mutation) -> None:
    """What it replaces stands in the file once, what takes its place compiles, and its tests exist. Where code was
    moved or rewritten, say in `mutations.py` where the same mistake could be made now."""
    text = (PACKAGE / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1, (
        f"{mutation.file} holds {mutation.old!r} {text.count(mutation.old)} times"
    )
    compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")
    assert [test for test in mutation.run().split() if not (ROOT / test).is_file()] == []


def test_there_are_fifty() -> None:
    assert len(MUTATIONS) >= 50
    assert len({one.what for one in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.slow
def test_every_break_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = list(try_all(MUTATIONS))
    with capsys.disabled():
        print(*outcomes, sep="\n")
    assert [str(outcome) for outcome in outcomes if not outcome.noticed_by] == []
