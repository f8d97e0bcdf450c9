"""python -m src.tune: the same as `kvlab tune`."""

from kvlab.cli.tune import main

if __name__ == "__main__":
    main()
