"""python -m src.ui"""

from kvlab.cli.ui import main

if __name__ == "__main__":
    main()
