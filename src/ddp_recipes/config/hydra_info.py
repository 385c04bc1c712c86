"""Hydra's answers to ``--help``, ``--cfg job``, ``--info`` and the shell, from the search path that runs have."""

import os
import re
from argparse import ArgumentParser, Namespace

from ddp_recipes.config.compose import session
from ddp_recipes.config.overrides import deleting_null
from ddp_recipes.config.translate import translated
from ddp_recipes.errors import RequestError


def is_requested(args: Namespace) -> bool:
    """Whether the command line asks Hydra something (``--help``, ``--cfg job``, …) instead of running."""
    return bool(args.help or args.hydra_help or args.cfg or args.info or args.shell_completion)


def show(parser: ArgumentParser, args: Namespace, config_path: str, config_name: str) -> None:
    """Print the answer.

    Raises:
        RequestError: as for a run.
    """
    config_dir: str | None = args.config_dir
    line = os.environ.get("COMP_LINE", "")
    if args.shell_completion:  # by a regex, for the line to be completed may end anywhere
        words: dict[str, str] = dict(re.findall(r"(--config-dir|-cd|--config-name|-cn)[ =](\S+)(?= )", line))
        config_dir = words.get("--config-dir") or words.get("-cd")
        config_name = words.get("--config-name") or words.get("-cn") or config_name
    with session(config_path, config_dir) as hydra, translated(hydra, config_name, args.overrides):
        try:
            if args.shell_completion:
                hydra.shell_completion(config_name, args.overrides)
            elif args.help:
                hydra.app_help(config_name, parser, args)
            elif args.hydra_help:
                hydra.hydra_help(config_name, parser, args)
            elif args.cfg:
                overrides = deleting_null(hydra, config_name, args.overrides)
                hydra.show_cfg(config_name, overrides, args.cfg, args.package, args.resolve)
            else:
                hydra.show_info(args.info, config_name, args.overrides)
        except ValueError as error:  # there is no completion for this shell
            raise RequestError(f"{error}") from None
