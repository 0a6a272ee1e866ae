"""Checks an installed wheel, in an environment that cannot see the clone.

    python -I .ci/check_wheel.py dist/specrollout-*.whl

The wheel must hold every file of the packages that git tracks, the extensions and their stubs; what
is installed must be what it holds, and generate the same tokens with drafts as without.
"""

import importlib
import runpy
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import distribution, entry_points
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"rollout": "rollout", "spec_workers": "spec_workers", "ngram_native": "ngram_native"}
FOLDERS = PACKAGES | {"conf": "rollout/conf"}
EXTENSIONS = ("ngram_native/_ext", "rollout/ops/_cpu")
SOURCES = ("csrc", "CMakeLists.txt")


def check_contents(wheel: Path) -> None:
    """Compare the wheel's files with those that git tracks."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", *FOLDERS], check=True, capture_output=True, text=True
    )
    expected = {f"{name}.{end}" for name in EXTENSIONS for end in ("abi3.so", "pyi")}
    expected.add("ngram_native/py.typed")
    for path in map(Path, listed.stdout.splitlines()):
        if not set(SOURCES) & set(path.parts):
            expected.add(str(FOLDERS[path.parts[0]] / path.relative_to(path.parts[0])))
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    if names != expected:
        missing, extra = sorted(expected - names), sorted(names - expected)
        sys.exit(f"error: {wheel.name} lacks {missing}, and should not have {extra}")
    if "-cp310-abi3-" not in wheel.name:
        sys.exit(f"error: {wheel.name} is not tagged cp310-abi3")


def check_installed(wheel: Path) -> None:
    """Import the packages, the extensions and the command, none of them from the clone."""
    version = distribution("specrollout").version
    if not wheel.name.startswith(f"specrollout-{version}-"):
        sys.exit(f"error: specrollout {version} is installed, not {wheel.name}")
    for name in (*PACKAGES, *(each.replace("/", ".") for each in EXTENSIONS)):
        found = importlib.import_module(name).__file__
        if ROOT in Path(found).parents:
            sys.exit(f"error: {name} comes from the clone: {found}")
    for point in entry_points(group="console_scripts"):
        if point.module.split(".")[0] in PACKAGES:
            point.load()


def check_generation(folder: Path) -> None:
    """Compare plain decoding of a tiny random model with drafts from the corpus."""
    from rollout import RolloutEngine, SamplingParams

    save_tiny_llama = runpy.run_path(str(ROOT / "tests/helpers/tiny_model.py"))["save_tiny_llama"]
    model = save_tiny_llama(folder / "model")
    params = SamplingParams(temperature=0.8, max_new_tokens=32, seed=3, n=4)
    found = []
    for spec in ("none", "ngram"):
        engine = RolloutEngine.from_pretrained(model, spec=spec, kv_bytes=1 << 22, device="cpu")
        found.append([(r.token_ids, r.logprobs) for r in engine.generate([[5, 6, 7]], params)])
        engine.close()
    if found[0] != found[1]:
        sys.exit("error: drafts changed tokens or logprobs")


def check_command(folder: Path) -> None:
    """Run the command, which composes its configuration."""
    command = str(Path(sys.executable).with_name("specrollout"))
    for argument in (["--version"], ["--cfg", "job"]):
        subprocess.run([command, *argument], check=True, stdout=subprocess.DEVNULL, cwd=folder)


def main() -> None:
    wheel = Path(sys.argv[1])
    check_contents(wheel)
    check_installed(wheel)
    with tempfile.TemporaryDirectory() as folder:
        check_generation(Path(folder))
        check_command(Path(folder))
    print(f"{wheel.name}: contents, imports, command and generation are right")


if __name__ == "__main__":
    main()
