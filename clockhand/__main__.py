"""`python -m clockhand` is the command `clockhand`."""

from clockhand.cli import main

if __name__ == "__main__":
    main()
