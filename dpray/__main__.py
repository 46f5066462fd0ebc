"""Run `dpray` as `python -m dpray`."""

from dpray.cli import main

if __name__ == "__main__":
    main()
