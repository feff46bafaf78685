"""Which modules the tree has, and how to import them all where torch is not."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "client" / "skerry", *(ROOT / "services" / name for name in ("skerry_syncer", "skerry_learner"))]

# Modules whose subject is torch; nothing else may import it, not even when it is there.
TORCH_MODULES = (
    "skerry_learner",
    "skerry.wire.torch_codecs",
    "skerry.integrations",
    "skerry.learner",
    "skerry.ranks",
    "skerry.model.torch",
)

# Run by another interpreter: tries modules in turn while torch and its like are blocked, and prints what failed.
IMPORT_ALL = """
import importlib, json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "lightning", "matplotlib", "jax"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
failed = {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = repr(error)
print(json.dumps(failed))
"""


def module_names(package: Path) -> list[str]:
    """Returns every module of a package, except those that run when they are imported."""
    paths = sorted(package.rglob("*.py"))
    names = [".".join(path.relative_to(package.parent).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__init__") for name in names if not name.endswith(".__main__")]


def torch_free_modules() -> list[str]:
    """Returns every module of the tree that has to import without torch."""
    return [name for package in PACKAGES for name in module_names(package) if not _needs_torch(name)]


def _needs_torch(name: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in TORCH_MODULES)
