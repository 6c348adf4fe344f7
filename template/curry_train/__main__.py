"""Run the command line: `python -m curry_train`."""

from .cli.main import main

if __name__ == "__main__":
    main(prog_name="python -m curry_train")
