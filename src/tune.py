"""python -m src.tune"""

from kvlab.cli.tune import main

if __name__ == "__main__":
    main()
