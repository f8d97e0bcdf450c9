"""python -m src.run: the same as `kvlab run`."""

from kvlab.cli.run import main

if __name__ == "__main__":
    main()
