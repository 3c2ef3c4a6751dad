"""`python -m enginecast` and the `enginecast` command."""

import os
import sys


def main() -> None:
    """Run the command line; set what must be set before torch is loaded."""
    # Idle OpenMP threads spin by default.  On a machine that does something else as well, an export
    # of a small model spends most of its time so: 112 CPU seconds instead of 27 were seen.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    try:
        from enginecast.cli.app import main as run
    except Exception as error:  # without which nothing runs, and no message is formatted
        from enginecast.installation import unavailable

        broken = unavailable(error, "enginecast")
        if broken is None:
            raise
        print(f"error: {broken}", file=sys.stderr)
        sys.exit(broken.exit_code)
    run()


if __name__ == "__main__":
    main()
