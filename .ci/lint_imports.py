"""lint-imports over the source tree.

An editable install maps `conf` into `rollout`, which makes the repository's root look like a folder
of that package; without the install's import hook the packages are found where they lie.
"""

import sys

sys.meta_path = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]

from importlinter.cli import lint_imports_command  # noqa: E402

lint_imports_command()
