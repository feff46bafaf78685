"""Stands in for `sky` where SkyPilot is installed: parses a command and its task as SkyPilot does, and stops there.

Prints what would be launched, as one line of JSON. Run by SkyPilot's own Python: it imports nothing of the tests.
"""

import json
import sys

import click
import sky
from sky.client.cli import command
from sky.utils import dag_utils

words = sys.argv[1:]
parsed: click.Command = command.cli
while isinstance(parsed, click.Group):
    parsed = parsed.commands[words.pop(0)]
options = parsed.make_context(parsed.name, words).params
(path,) = options["entrypoint"]
(task,) = dag_utils.load_chain_dag_from_yaml(path, env_overrides=list(options["env"])).tasks
infra = {} if options["infra"] is None else {"infra": options["infra"]}
(resources, *_) = [choice.copy(**infra) for choice in task.resources]
task.expand_and_validate_file_mounts()
print(
    json.dumps(
        {
            "name": options.get("name") or task.name,
            "sky": sky.__version__,
            "infra": str(resources.infra.to_str()),
            "use_spot": resources.use_spot,
            "ports": resources.ports,
            "recovery": resources.job_recovery,
            "accelerators": sorted({name for choice in task.resources for name in choice.accelerators or ()}),
            "envs": task.envs,
            "mounts": task.file_mounts,
            "run": task.run,
        }
    )
)
