"""python -m src.requirements: the same as `kvlab requirements`."""

from kvlab.cli.requirements import main

if __name__ == "__main__":
    main()
