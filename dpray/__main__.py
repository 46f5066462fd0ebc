"""`python -m dpray` is `dpray`."""

from dpray.cli import main

if __name__ == "__main__":
    main()
