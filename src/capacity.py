"""python -m src.capacity: the same as `kvlab capacity`."""

from kvlab.cli.capacity import main

if __name__ == "__main__":
    main()
