"""python -m src.serve: the same as `kvlab serve`."""

from kvlab.cli.serve import main

if __name__ == "__main__":
    main()
