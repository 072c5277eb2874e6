"""`altup` and `python -m altup`."""


def main() -> None:
    from altup.core.interrupts import end_on_interrupt

    end_on_interrupt()  # before the imports, which take a while
    from altup.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
