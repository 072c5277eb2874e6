"""`altup` and `python -m altup`."""

import os


def main() -> None:
    from altup.core.interrupts import end_on_interrupt

    end_on_interrupt()  # before the imports, which take a while
    spin_briefly()
    from altup.cli.main import main as run

    run()


def spin_briefly() -> None:
    """Let OpenMP's threads sleep soon when they wait for each other, unless the user has said how they wait.

    By default they spin for milliseconds, which on cores that others use too makes a step take ten times as long.
    It is read when torch is loaded, and changes no result.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


if __name__ == "__main__":
    main()
