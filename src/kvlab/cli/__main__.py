"""python -m kvlab.cli: the same as `kvlab`."""

from kvlab.cli.main import main

if __name__ == "__main__":
    main()
