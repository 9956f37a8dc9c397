"""Import this library and Transformers with packages in front of the path, once for each folder that is given.

Each import runs in a process of its own, forked from one that has loaded what they share. What it wrote comes into
`output.txt` of the folder, and whether it came to its end into `done`.
"""

from __future__ import annotations

import importlib
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


def import_all(folder: Path) -> None:
    """Do what a program does at its start."""
    sys.path.insert(0, str(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import accelerate.utils

        for name in dir(accelerate.utils):
            getattr(accelerate.utils, name)
        for check in [name for name in dir(accelerate.utils) if name.startswith("is_") and name.endswith("_available")]:
            assert isinstance(getattr(accelerate.utils, check)(), bool), check
        accelerator = accelerate.Accelerator(cpu=True)
        assert accelerator.device.type == "cpu"
    if not (folder / "without_transformers").exists():
        from transformers import BertModel, Trainer

        assert BertModel.__name__ == "BertModel"
        assert Trainer.__name__ == "Trainer"
    (folder / "done").touch()


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
