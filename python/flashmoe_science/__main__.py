"""The command line: python -m flashmoe_science doctor | explain | bench.

Only argparse is imported here; each command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys

from flashmoe_science import bench
from flashmoe_science.cli import doctor, explain

COMMANDS = {"doctor": doctor, "explain": explain, "bench": bench}

EXAMPLES = """\
examples:
  python -m flashmoe_science doctor
  python -m flashmoe_science explain --heads 8 --kv-heads 2 --len 512 --dim 64 --dtype bf16 --causal
  python -m flashmoe_science explain --moe --tokens 4096 --experts 64 --k 4 --dtype bf16
  python -m flashmoe_science bench --workload pair_bias --dtype fp32,bf16
"""


def make_parser() -> argparse.ArgumentParser:
    """The whole command line. A command is a module: SUMMARY, EXAMPLES, add_arguments, run."""
    parser = argparse.ArgumentParser(
        prog="flashmoe-science",
        description="Attention and mixtures of experts for models of materials, molecules and "
        "proteins.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=module.__doc__,
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = make_parser().parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # who reads has enough, as head has; Python would flush once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
