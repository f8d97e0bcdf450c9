"""python -m src.roofline: the same as `kvlab roofline`."""

from kvlab.cli.roofline import main

if __name__ == "__main__":
    main()
