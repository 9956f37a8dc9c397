"""Where `accelerate estimate-memory` finds a model: a local file or folder, a configuration, or the Hub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate._base.errors import AccelerateError, ConfigurationError, MissingPackageError
from accelerate._base.imports import is_timm_available, is_transformers_available, require
from accelerate.offload.estimate import ModelTensors, read_tensors, tensors_of_model
from accelerate.offload.weight_files import find_weight_files, is_weight_file, read_json

if TYPE_CHECKING:
    from torch import nn

CONFIG_NAME = "config.json"
_REMEDY = (
    "Pass a folder or file with weights (.safetensors, .bin, an index), a config.json of Transformers or timm, "
    "or with a connection a name on the Hub"
)


@dataclass(frozen=True)
class FoundModel:
    """A model and a sentence that says where its tensors come from."""

    model: ModelTensors
    source: str


def find_model(name: str, library: str | None = None, *, trust_remote_code: bool = False) -> FoundModel:
    """Return the tensors of a model, without reading its weights.

    Args:
        name: A path, or a name on the Hub.
        library: Build the model by this library, "transformers" or "timm", also where weights are at hand.

    Raises:
        ConfigurationError: If there is no such model, or it cannot be read.
        MissingPackageError: If the library that builds it is not installed.
    """
    path = Path(name).expanduser()
    if path.exists():
        return _local(path, library, trust_remote_code=trust_remote_code)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or is_weight_file(path):
        raise ConfigurationError(f"There is nothing at {name!r}. {_REMEDY}.")
    if library is None and _is_timm_architecture(name):
        library = "timm"
    return _by_name(name, library, trust_remote_code=trust_remote_code)


def _local(path: Path, library: str | None, *, trust_remote_code: bool) -> FoundModel:
    config = path / CONFIG_NAME if path.is_dir() else path
    built_from_config = path.is_file() and path.suffix == ".json" and not is_weight_file(path)
    if path.is_file() and not (library or built_from_config or is_weight_file(path)):
        raise ConfigurationError(f"{str(path)!r} is not a file of weights, by its ending {path.suffix!r}. {_REMEDY}.")
    files = [] if library or built_from_config else find_weight_files(path)
    if files:
        counted = files[0].name if len(files) == 1 else f"{len(files)} files"
        kind = "headers" if files[0].suffix == ".safetensors" else "structure"
        return FoundModel(ModelTensors(tuple(read_tensors(files))), f"the {kind} of {counted}")
    if not config.is_file():
        raise ConfigurationError(f"The folder {str(path)!r} has neither weights nor a {CONFIG_NAME}. {_REMEDY}.")
    library = library or _library_of(config)
    model = create_empty_model(str(path), library, trust_remote_code)
    return FoundModel(
        ModelTensors(tuple(tensors_of_model(model))), f"the configuration, built by {library} without weights"
    )


def _library_of(config: Path) -> str:
    described = read_json(config)
    for key, library in (("model_type", "transformers"), ("architecture", "timm")):
        if key in described:
            return library
    raise ConfigurationError(
        f"{str(config)!r} does not say what it configures: 'model_type' (Transformers) and 'architecture' (timm) are "
        "missing. Pass --library_name, or a folder with weights."
    )


def _is_timm_architecture(name: str) -> bool:
    if "/" in name or not is_timm_available():
        return False
    try:
        return bool(_timm().is_model(name))
    except MissingPackageError:
        return False


def _by_name(name: str, library: str | None, *, trust_remote_code: bool) -> FoundModel:
    if library == "timm" and "/" not in name:
        model = create_empty_model(name, "timm")
        return FoundModel(
            ModelTensors(tuple(tensors_of_model(model))), "the architecture, built by timm without weights"
        )
    folder = _cached(name, library)
    if folder is None:
        folder = _downloaded(name)
    found = _local(folder, library, trust_remote_code=trust_remote_code)
    return FoundModel(found.model, f"{found.source}, from the Hub")


def _cached(name: str, library: str | None) -> Path | None:
    """Return the folder of the Hub's cache that has this model, as far as an estimate needs it."""
    import huggingface_hub as hub

    try:
        folder = Path(hub.snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):  # not in the cache; a name that cannot be one is told by the download
        return None
    try:
        usable = (folder / CONFIG_NAME).is_file() or bool(library is None and find_weight_files(folder))
    except ConfigurationError:  # some shards only
        usable = False
    return folder if usable else None


def _downloaded(name: str) -> Path:
    """Bring the configuration of a model from the Hub and return its folder."""
    import huggingface_hub as hub

    seen = verify_on_hub(name)
    if isinstance(seen, str):
        why = "is gated: ask for access on its page, then run `hf auth login`" if seen == "gated" else "is not there"
        raise ConfigurationError(f"The model {name!r} {why}. {_REMEDY}.")
    try:
        return Path(hub.hf_hub_download(name, CONFIG_NAME)).parent
    except Exception as error:  # as in verify_on_hub
        raise ConfigurationError(
            f"The model {name!r} on the Hub has no {CONFIG_NAME} that can be read ({_first_line(error)}). "
            "Download its weights and pass their folder."
        ) from error


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """Return what the Hub says of a model, `"gated"` if access has to be asked for, or `"repo"` if there is none.

    Raises:
        ConfigurationError: If the Hub cannot be asked.
    """
    import huggingface_hub as hub
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        return hub.model_info(repo, token=token)
    except GatedRepoError:
        return "gated"
    except (RepositoryNotFoundError, HFValidationError):
        return "repo"
    except Exception as error:
        # Without a connection the client raises classes of its HTTP library, which changes with its versions.
        raise ConfigurationError(
            f"{repo!r} is no local path and not in the cache, and the Hub cannot be asked ({_first_line(error)}). "
            f"{_REMEDY}."
        ) from error


def create_empty_model(
    model_name: str, library_name: str, trust_remote_code: bool = False, access_token: str | None = None
) -> nn.Module:
    """Build a model on the meta device from a configuration.

    Args:
        model_name: A folder with a config.json, such a file, a name on the Hub, or an architecture of timm.
        library_name: "transformers" or "timm".
        trust_remote_code: Run the modeling code that comes with the configuration.

    Raises:
        ConfigurationError: If the library cannot build it.
        MissingPackageError: If the library is not installed.
    """
    builders: dict[str, Callable[[], nn.Module]] = {
        "transformers": lambda: _transformers_model(model_name, trust_remote_code, access_token),
        "timm": lambda: _timm_model(model_name),
    }
    if library_name not in builders:
        raise ConfigurationError(
            f"There is no way to build a model by {library_name!r}. Write --library_name transformers or timm, "
            "or pass a folder with weights."
        )
    try:
        return builders[library_name]()
    except AccelerateError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        ImportError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        hint = "Pass a folder with its weights, or update the library."
        if "trust_remote_code" in str(error):
            hint = "Pass --trust_remote_code if you have read the code that comes with it."
        raise ConfigurationError(
            f"{library_name} cannot build {model_name!r} ({_first_line(error)}). {hint}"
        ) from error


def _transformers_model(model_name: str, trust_remote_code: bool, token: str | None) -> nn.Module:
    from accelerate.big_modeling import init_empty_weights

    transformers: Any = require("transformers", why="Building a model from a configuration of Transformers")
    config = transformers.AutoConfig.from_pretrained(model_name, trust_remote_code=trust_remote_code, token=token)
    architecture = next(iter(getattr(config, "architectures", None) or ()), "")
    model_class = getattr(transformers, architecture, None)
    with init_empty_weights():
        if model_class is not None and not getattr(config, "auto_map", None):
            model: nn.Module = model_class(config)
        else:
            model = transformers.AutoModel.from_config(config, trust_remote_code=trust_remote_code)
    # Weights that the configuration ties count once.
    model.tie_weights()  # type: ignore[operator]
    return model


def _timm_model(model_name: str) -> nn.Module:
    from accelerate.big_modeling import init_empty_weights

    timm = _timm()
    path = Path(model_name)
    arguments: dict[str, Any] = {}
    architecture = add_timm_hub_prefix(model_name)
    if path.exists():
        described = read_json(path / CONFIG_NAME if path.is_dir() else path)
        if "architecture" not in described:
            raise ConfigurationError(
                f"The configuration {model_name!r} names no 'architecture', so it is not one of timm. "
                "Pass --library_name transformers if it is one of Transformers."
            )
        architecture = str(described["architecture"])
        arguments = dict(described.get("model_args") or {})
        if "num_classes" in described:
            arguments["num_classes"] = described["num_classes"]
    with init_empty_weights():
        model: nn.Module = timm.create_model(architecture, pretrained=False, **arguments)
    return model


def _timm() -> Any:
    try:
        return require("timm", why="Building a model of timm")
    except RuntimeError as error:  # a torchvision that was built for another torch
        raise MissingPackageError(
            f"Building a model of timm needs the package 'timm', which fails to import ({_first_line(error)}). "
            "Install a torchvision that fits this torch.",
            name="timm",
        ) from error


def check_has_model(error: Exception) -> str:
    """Return the library whose answer to a missing model this error is, `"timm"` or `"transformers"`, or `"unknown"`."""
    text = str(error)
    if is_timm_available() and isinstance(error, RuntimeError) and "Unknown model" in text:
        return "timm"
    if is_transformers_available() and isinstance(error, OSError) and "does not appear to have a file named" in text:
        return "transformers"
    return "unknown"


def add_timm_hub_prefix(model_name: str) -> str:
    """Return the name by which timm finds a model on the Hub: `owner/name` becomes `hf-hub:owner/name`."""
    return f"hf-hub:{model_name}" if "/" in model_name and not model_name.startswith("hf-hub:") else model_name


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
