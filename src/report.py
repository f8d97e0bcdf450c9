"""python -m src.report"""

from kvlab.cli.report import main

if __name__ == "__main__":
    main()
