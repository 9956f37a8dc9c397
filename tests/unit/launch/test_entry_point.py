"""What each process of a TPU run carries out, decided by reading the script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.launching import make_config

from accelerate._base.errors import ConfigurationError
from accelerate.launch.entry_point import WHOLE_SCRIPT, choose_entry_point

GUARD = "if __name__ == '__main__':\n    main()\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def chosen(source: str, **given: Any) -> str:
    Path("train.py").write_text(source)
    choice = choose_entry_point(make_config(**given))
    assert choice.reason
    return choice.value


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("print(1)\n", WHOLE_SCRIPT),
        ("def fit(): ...\n", WHOLE_SCRIPT),
        ("def main(): ...\n" + GUARD, WHOLE_SCRIPT),
        ("def main(): ...\nif '__main__' == __name__ and True:\n    main()\n", WHOLE_SCRIPT),
        (
            "def main(): ...\ntry:\n    import x\nexcept ImportError:\n    if __name__ in ['__main__']: pass\n",
            WHOLE_SCRIPT,
        ),
        # It runs once, not twice.
        ("def main(): ...\nmain()\n", WHOLE_SCRIPT),
        ("def main(): ...\nif True:\n    start(main)\n", WHOLE_SCRIPT),
        ("from other import main\n", WHOLE_SCRIPT),
        ("class A:\n    def main(self): ...\n", WHOLE_SCRIPT),
        ("async def main(): ...\n", WHOLE_SCRIPT),
        ("def main(:\n", WHOLE_SCRIPT),  # running it shows what is wrong
        ("def main(): ...\n", "main"),
        ("def main(index): ...\n", "main"),
        ("def main(words=None, *more, **others): ...\n", "main"),
        ("def main(): ...\ndef other():\n    main()\n    if __name__ == '__main__': ...\n", "main"),
        ("if True:\n    def main(): ...\nif x == '__main__': ...\n", "main"),
        ("@click.command()\ndef main(rate, *, steps): ...\n", "main"),
    ],
)
def test_a_script(source: str, value: str) -> None:
    assert chosen(source) == value
    assert chosen(source, file={"main_training_function": "main"}) == value


@pytest.mark.parametrize(
    "source",
    [
        "def _mp_fn(index):\n    main()\ndef main(): ...\n" + GUARD,
        "from other import fit as _mp_fn\n",
        "from other import *\n",
        "_mp_fn = 1\n",
        "import _mp_fn.part\n",
    ],
)
def test_a_function_that_is_named_is_called(source: str) -> None:
    assert chosen(source, main_training_function="_mp_fn") == "_mp_fn"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def main(): ...\ndef fit(): ...\n", r"it has main, fit"),
        ("class A:\n    def _mp_fn(self): ...\n", "it has no function at all"),
        ("async def _mp_fn(): ...\n", "it has no function at all"),
    ],
)
def test_a_function_that_is_not_there(source: str, told: str) -> None:
    message = (
        rf"main_training_function='_mp_fn' \(flag --main_training_function\): 'train.py' has no .*{told}.*leave --main"
    )
    with pytest.raises(ConfigurationError, match=message):
        chosen(source, main_training_function="_mp_fn")


@pytest.mark.parametrize(
    ("parameters", "needed"),
    [("rate, steps", "rate, steps"), ("index, *, steps", "index, steps"), ("a, b, c=1", "a, b")],
)
def test_a_function_that_a_process_cannot_call(parameters: str, needed: str) -> None:
    for given in ({}, {"main_training_function": "fit"}):
        source = f"def {given.get('main_training_function', 'main')}({parameters}): ...\n"
        with pytest.raises(
            ConfigurationError, match=rf"it needs {needed}, and a process has its index alone to give. Give"
        ):
            chosen(source, **given)


def test_a_folder_and_an_archive_run_as_they_are() -> None:
    Path("program").mkdir()
    Path("program/__main__.py").write_text("def main(): ...\nmain()\n")
    Path("program.pyz").touch()
    for name in ("program", "program.pyz"):
        assert choose_entry_point(make_config(name)).value == WHOLE_SCRIPT
        with pytest.raises(ConfigurationError, match=f"{name}' is a folder or an archive, of which none can be called"):
            choose_entry_point(make_config(name, main_training_function="fit"))


def test_a_module_is_found_without_importing_it() -> None:
    Path("package/inner").mkdir(parents=True)
    for name in ("package/__init__.py", "package/inner/__init__.py"):
        Path(name).write_text("raise RuntimeError('imported')\n")
    Path("package/train.py").write_text("def main(index): ...\n")
    Path("package/inner/__main__.py").write_text("def fit(): ...\n")
    assert choose_entry_point(make_config("package.train", module=True)).value == "main"
    assert choose_entry_point(make_config("package.inner", module=True)).value == WHOLE_SCRIPT
    for name in ("package.inner", "package.train"):
        with pytest.raises(ConfigurationError, match=f"{name}' has no such function"):
            choose_entry_point(make_config(name, module=True, main_training_function="train"))
    # One that is not there says so when it is run.
    for name in ("package.other", "no_such_package", "package", "sys"):
        assert choose_entry_point(make_config(name, module=True)).value == WHOLE_SCRIPT
        assert choose_entry_point(make_config(name, module=True, main_training_function="fit")).value == "fit"
