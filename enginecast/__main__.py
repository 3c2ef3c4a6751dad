"""`python -m enginecast` and the `enginecast` command."""

from enginecast.cli import main

if __name__ == "__main__":
    main()
