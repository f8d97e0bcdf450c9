"""python -m src.roofline"""

from kvlab.cli.roofline import main

if __name__ == "__main__":
    main()
