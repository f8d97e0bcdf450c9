"""python -m src.capacity"""

from kvlab.cli.capacity import main

if __name__ == "__main__":
    main()
