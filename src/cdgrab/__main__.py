"""`python -m cdgrab`, for torchrun and for those without the script on their path."""

import sys


def main() -> None:
    """Hand over to the command line, whose packages may be missing."""
    try:
        from cdgrab_experiments.cli import main as command_line
    except ModuleNotFoundError as error:
        print(
            f'Error: the command line needs the package {error.name}: pip install "cdgrab[experiments]"',
            file=sys.stderr,
        )
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    command_line()


if __name__ == "__main__":
    main()
