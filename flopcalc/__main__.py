"""python -m flopcalc: the same command line."""

from flopcalc.cli import main

if __name__ == "__main__":
    main()
