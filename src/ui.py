"""python -m src.ui: the same as `kvlab ui`."""

from kvlab.cli.ui import main

if __name__ == "__main__":
    main()
