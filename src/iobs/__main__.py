"""`python -m iobs` is the command `iobs`."""

from iobs.cli import main

if __name__ == "__main__":
    main()
