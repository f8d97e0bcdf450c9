"""python -m src.report: the same as `kvlab report`."""

from kvlab.cli.report import main

if __name__ == "__main__":
    main()
