"""These tests run in an environment of their own (`make test-integrations`) and are not collected elsewhere."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("peft") and find_spec("lightning") else ["test_*.py"]
