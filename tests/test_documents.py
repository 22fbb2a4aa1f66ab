"""README.md and CARD.md: their examples run, their links lead somewhere, and the README's API is the API.

In: the two documents. Out: nothing; an example fails by its own asserts.
"""

import inspect
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from conftest import REPO_ID, ROOT


def text_of(name):
    """The document as a reader sees it: kernels fills in the card's names."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return text.replace("{{ repo_id }}", REPO_ID).replace("{{ version }}", "1")


@pytest.mark.parametrize("name", ["README.md", "CARD.md"])
def test_every_example_runs(kernel, name, tmp_path, monkeypatch):
    """In order and in one namespace, as a reader would paste them; then the commands that run an example script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    examples = re.findall(r"```python\n(.*?)```", text_of(name), re.DOTALL)
    assert examples
    namespace, missing = {}, set()
    for number, example in enumerate(examples, 1):
        lacking = {p for p in re.findall(r"^(?:from|import) (\w+)", example, re.M) if not find_spec(p)}
        missing |= lacking
        if not lacking:
            exec(compile(example, f"{name}, example {number}", "exec"), namespace)
    for command in re.findall(r"^python (examples/.*)$", text_of(name), re.M) if "safetensors" not in missing else []:
        done = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    if missing:
        pytest.skip(f"examples that need {', '.join(sorted(missing))} did not run: not installed")


DOCUMENTS = ["README.md", "CARD.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_file_linked_to_is_there(name):
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", text_of(name)):
        assert (ROOT / name).parent.joinpath(target).is_file(), target


def test_the_api_table_names_every_function_and_argument(kernel):
    rows = {call.split("(")[0]: call for call in re.findall(r"^\| `(\w+\(.*?\))` \|", text_of("README.md"), re.M)}
    functions = {f for f in kernel.__all__ if inspect.isfunction(getattr(kernel, f))}
    assert set(rows) == functions
    for name, call in rows.items():
        arguments = re.findall(r"\b([A-Za-z_]\w*)\b(?=[=,)])", call.split("(", 1)[1])
        parameters = inspect.signature(getattr(kernel, name)).parameters
        assert [a for a in arguments if a in parameters] == list(parameters), name
