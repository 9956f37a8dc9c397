"""Import this library and its clients with packages in front of the path, once for each folder that is given.

Each import runs in a process of its own, forked from one that has loaded what they share. What it wrote comes into
`output.txt` of the folder, and, if it came to its end, which packages this library has found into `done`. Two files of the
folder say what is special about it: `hidden` names packages that are not to be found, `clients` the names that are imported
beside this library, by module.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import warnings
from pathlib import Path

# Neither of the two, nor anything that imports them or looks for packages at its import.
SHARED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "numpy",
    "huggingface_hub",
    "safetensors.torch",
)
SHARED_OF_TRANSFORMERS = ("bitsandbytes", "sklearn.metrics", "tokenizers", "torchao.quantization")


def hide(folder: Path, names: list[str]) -> None:
    """Let Python find all installed packages but some: through links to the others, in a folder on the path."""
    for place in [entry for entry in sys.path if entry.endswith("site-packages")]:
        links = folder / "site-packages"
        links.mkdir()
        for path in Path(place).iterdir():
            if path.name.partition("-")[0] not in names:
                (links / path.name).symlink_to(path)
        sys.path[sys.path.index(place)] = str(links)
    importlib.invalidate_caches()
    for name in names:
        assert name not in sys.modules
        assert importlib.util.find_spec(name) is None, name
        assert not any(entry.name == name for entry in importlib.metadata.distributions()), name


def import_all(folder: Path) -> None:
    """Do what a program does at its start."""
    sys.path.insert(0, str(folder))
    hidden = json.loads((folder / "hidden").read_text())
    if hidden:
        hide(folder, hidden)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import accelerate.utils

        for name in dir(accelerate.utils):
            getattr(accelerate.utils, name)
        checks = [name for name in dir(accelerate.utils) if name.startswith("is_") and name.endswith("_available")]
        answers = {
            check.removeprefix("is_").removesuffix("_available"): getattr(accelerate.utils, check)() for check in checks
        }
        assert all(isinstance(answer, bool) for answer in answers.values()), answers
        accelerator = accelerate.Accelerator(cpu=True)
        assert accelerator.device.type == "cpu"
    for module, names in json.loads((folder / "clients").read_text()).items():
        for name in names:
            assert getattr(importlib.import_module(module), name).__name__ == name
    assert not set(hidden) & sys.modules.keys()
    (folder / "done").write_text(json.dumps([name for name, answer in answers.items() if answer]))


def main(folders: list[Path]) -> None:
    for name in SHARED + SHARED_OF_TRANSFORMERS:
        importlib.import_module(name)
    for folder in folders:
        process = os.fork()
        if process == 0:
            with open(folder / "output.txt", "w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                try:
                    import_all(folder)
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(0)
        os.waitpid(process, 0)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
