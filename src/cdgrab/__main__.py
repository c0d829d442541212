"""`python -m cdgrab`, for torchrun and for environments without the script on the path."""

import sys


def main() -> None:
    """Run the command line, or name the package that it lacks."""
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
