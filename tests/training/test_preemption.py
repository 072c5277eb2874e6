"""Which signals a run hears."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from altup.training.preemption import SIGNALS, StopRequest


@pytest.fixture
def hangup() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_a_request(number: signal.Signals, hangup: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
    assert signal.getsignal(number) == before


def test_nohup_is_respected(hangup: None) -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.requested
