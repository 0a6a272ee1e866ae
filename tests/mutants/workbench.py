"""A copy of the tree in which one mutant at a time is tested."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.mutants.mutation import Mutation

ROOT = Path(__file__).resolve().parents[2]
_EXTENSIONS = ("rollout.ops._cpu", "ngram_native._ext")
_WITHOUT_FINDERS = """\
# An editable install's finder would lead imports back to the tree it was made of.
import sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__name__.startswith("ScikitBuild")]
"""


class Workbench:
    """The tracked and untracked files that git does not ignore, the compiled extensions, and a
    `zygote` that runs tests there."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        self._folder, self._native = folder, folder / "native"
        self._copy()
        environment = os.environ | {
            "PYTHONPATH": f"{self.tree}{os.pathsep}{self._folder / 'site'}",
            "PYTHONDONTWRITEBYTECODE": "1",  # in processes that tests start
            "OMP_NUM_THREADS": "1",
        }
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.zygote"],
            cwd=self.tree,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._hear()

    def run(
        self, files: Sequence[str], limits: Sequence[float], *, log: str, covers: bool = False
    ) -> dict[str, Any]:
        """The zygote's answer; see there. ``log``: the name of pytest's output."""
        shutil.rmtree(self.tree / ".hypothesis", ignore_errors=True)  # what others found
        packages = ("rollout", "spec_workers", "ngram_native")
        order = {
            "files": list(files),
            "limits": list(limits),
            "log": str(self._folder / log),
            "cover": [str(self.tree / package) for package in packages] if covers else [],
        }
        assert self._zygote.stdin is not None
        self._zygote.stdin.write(json.dumps(order) + "\n")
        self._zygote.stdin.flush()
        return self._hear()

    @contextlib.contextmanager
    def mutated(self, mutation: Mutation) -> Any:
        """Gives whether it could be built."""
        path = self.tree / mutation.file
        original = path.read_bytes()
        extension = self.tree / "ngram_native" / "_ext.abi3.so"
        built = extension.read_bytes()
        written = path.stat().st_mtime_ns
        path.write_bytes(mutation.applied_to(original))
        try:
            yield not mutation.is_native or self._build(extension)
        finally:
            path.write_bytes(original)
            if not mutation.is_native:  # a build goes by the time as well
                os.utime(path, ns=(written, written))  # what was compiled of it holds again
            if mutation.is_native:
                _replace(extension, built)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._zygote.pid, signal.SIGTERM)
        self._zygote.wait()

    def _hear(self) -> dict[str, Any]:
        assert self._zygote.stdout is not None
        line = self._zygote.stdout.readline()
        if not line:
            raise RuntimeError("the process that runs the tests has died")
        return json.loads(line)

    def _copy(self) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, check=True, text=True,
        )  # fmt: skip
        names = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
        for path in self.tree.rglob("*.py"):  # what was compiled and built earlier stays
            if path.relative_to(self.tree).as_posix() not in names:
                path.unlink()
        for name in names:
            (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.tree / name)
        for link, target in (("rollout/conf", Path("../conf")), ("models", ROOT / "models")):
            (self.tree / link).unlink(missing_ok=True)
            (self.tree / link).symlink_to(target)
        for name in _EXTENSIONS:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                raise RuntimeError(f"{name} is not built: make install")
            package = self.tree / name.rpartition(".")[0].replace(".", "/")
            shutil.copy2(spec.origin, package)
            for stub in Path(spec.origin).parent.glob("_ext.pyi"):
                shutil.copy2(stub, package)
        (self._folder / "site").mkdir(parents=True, exist_ok=True)
        (self._folder / "site" / "sitecustomize.py").write_text(_WITHOUT_FINDERS)

    def _build(self, extension: Path) -> bool:
        """The mutated corpus, in a build folder of its own; whether it compiles."""
        cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        if cmake is None:
            raise RuntimeError("cmake is not installed: make install")
        commands = [[cmake, "--build", str(self._native), "--target", "_ext"]]
        if not (self._native / "CMakeCache.txt").exists():
            commands.insert(0, [
                cmake, "-S", str(self.tree), "-B", str(self._native), "-G", "Ninja",
                "-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}",
            ])  # fmt: skip
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        with (self._folder / "build.log").open("w") as log:
            for command in commands:
                done = subprocess.run(command, stdout=log, stderr=log, env=environment)
                if done.returncode:
                    return False
        (found,) = self._native.rglob("_ext.abi3.so")
        _replace(extension, found.read_bytes())
        return True


def _replace(path: Path, content: bytes) -> None:
    """Write a new file in its place: the old one may be mapped by a process that is ending."""
    scratch = path.with_suffix(".new")
    scratch.write_bytes(content)
    scratch.replace(path)
