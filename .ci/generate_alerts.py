"""Writes docker/alerts.yml from the table of alert rules: `make alerts`."""

from __future__ import annotations

from pathlib import Path

import yaml  # type: ignore[import-untyped]

from skerry.history.alerts import prometheus_rules

HEADER = """\
# Alert rules for Prometheus, made by `make alerts` from client/skerry/history/alerts.py; docs/operating.md explains the
# metrics. A replica that can't answer a scrape within its timeout is `up == 0`. Each rule of a run takes the maximum
# over replicas, since they all see the same log.
"""


def _block(dumper: yaml.Dumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


yaml.add_representer(str, _block)
path = Path(__file__).parents[1] / "docker" / "alerts.yml"
path.write_text(HEADER + yaml.dump(prometheus_rules(), sort_keys=False, width=1000))
print(f"wrote {path}")
