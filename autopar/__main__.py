"""`python -m autopar`."""

from autopar.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
