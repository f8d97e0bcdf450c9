"""python -m src.requirements"""

from kvlab.cli.requirements import main

if __name__ == "__main__":
    main()
