"""python -m src.run"""

from kvlab.cli.run import main

if __name__ == "__main__":
    main()
